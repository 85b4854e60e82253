"""What every KL transform shares: one function that serves an environment step and a batch."""

from __future__ import annotations

from typing import Any, TypeAlias

from tensordict import TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform

#: A key of a TensorDict: a string, or a tuple of them (TorchRL's NestedKey).
Key: TypeAlias = str | tuple[Any, ...]


class NextTransform(Transform):
    """A transform that reads a transition and writes below its ``next``.

    Subclasses implement ``_step(tensordict, next_tensordict)``. TorchRL calls it once per
    environment step; :meth:`forward` calls it on a whole batch, so that both give the same numbers.
    """

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply to a batch of transitions, in place.

        Raises:
            KeyError: the batch has no "next".
        """
        next_tensordict = tensordict.get("next", None)
        if next_tensordict is None:
            raise KeyError(f"{type(self).__name__} reads transitions, and this batch has no 'next'")
        return tensordict.set("next", self._step(tensordict, next_tensordict))


def zeros_at_reset(
    tensordict_reset: TensorDictBase, spec: Composite, keys: list[Key]
) -> TensorDictBase:
    """A reset has no action and so no KL: write the zeros that the observation spec promises."""
    for key in keys:
        tensordict_reset.set(key, spec[key].zero())
    return tensordict_reset


def reward_like(parent: Transform) -> Unbounded:
    """A spec with the shape and type of the environment's reward."""
    spec = parent.full_reward_spec[parent.reward_key]
    return Unbounded(shape=spec.shape, dtype=spec.dtype, device=spec.device)


def as_key(key: Key) -> Key:
    """``("a",)`` -> ``"a"``, ``("a", ("b",))`` -> ``("a", "b")``."""
    return unravel_key(key)


def score(model: ProbabilisticTensorDictSequential, tensordict: TensorDictBase) -> Tensor:
    """Log pi(a|s) of a transition's action, on the transition's device, shape [...].

    An environment on the CPU may ask a policy on a GPU. The copy is shallow: the model writes its
    parameters into what it is given.
    """
    device = next(model.parameters()).device
    action_device = tensordict.get(model.dist_sample_keys[0]).device
    if device == action_device:
        return model.log_prob(tensordict.copy())
    return model.log_prob(tensordict.to(device)).to(action_device)
