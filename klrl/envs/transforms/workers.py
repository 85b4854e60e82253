"""Sends a policy's outputs to the workers of a ParallelEnv, where KL transforms need them.

TorchRL's ParallelEnv sends its workers only the keys of ``full_action_spec`` and
``full_state_spec``. A policy's other outputs, such as its log-prob, reach the workers only if a
transform declares them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform

from klrl.kl.policies import Key, as_key


class SendToWorkers(Transform):
    """Declares a policy's outputs as inputs of the environment, so that its workers receive them.

    >>> def make():
    ...     return TransformedEnv(base(), Compose(SendToWorkers(actor), KLRewardTransform(actor)))
    >>> env = ParallelEnv(4, make)

    Each key is added to the environment's state spec and observation spec, in the shape that the
    policy writes. A reset or a step writes NaN (0 if not a float), which the policy's next output
    replaces; a batch has the NaN at ``("next", key)``. Without NaN, an action that the policy did
    not sample would be charged with the previous action's log-prob.

    Args:
        actor: the policy that writes the keys; not copied, but run once on zeros to find shapes.
        keys: the keys to send; default all but the action.

    Raises:
        KeyError: the policy does not write a key, or the environment already has it.
    """

    def __init__(
        self, actor: ProbabilisticTensorDictSequential, keys: Sequence[Key] | None = None
    ) -> None:
        super().__init__()
        # The actor is not a submodule, since its weights are not part of the environment's state.
        self.__dict__["_actor"] = actor
        self._keys = None if keys is None else [as_key(key) for key in keys]
        self._specs: dict[Key, Unbounded] | None = None

    def specs(self) -> dict[Key, Unbounded]:
        """Return each key's spec in the environment of this transform."""
        if self._specs is None:
            self._specs = self._infer_specs()
        return self._specs

    def _infer_specs(self) -> dict[Key, Unbounded]:
        parent, actor = self.parent, self.__dict__["_actor"]
        written = _written(actor, parent.observation_spec.zero())
        keys = self._keys
        if keys is None:
            known = {*map(as_key, parent.action_keys), *parent.observation_spec.keys(True, True)}
            keys = [key for key in written.keys(True, True) if key not in known]
        specs = {}
        for key in keys:
            value = written.get(key, None)
            if not isinstance(value, Tensor):
                raise KeyError(f"keys={key}: {type(actor).__name__} does not write it")
            if key in parent.observation_spec.keys(include_nested=True):
                raise KeyError(f"keys={key}: the environment already has this key")
            specs[key] = Unbounded(shape=value.shape, dtype=value.dtype, device=parent.device)
        return specs

    def _unset(self, tensordict: TensorDictBase) -> TensorDictBase:
        for key, spec in self.specs().items():
            empty = spec.zero()
            tensordict.set(key, empty.fill_(torch.nan) if empty.is_floating_point() else empty)
        return tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._unset(tensordict_reset)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._unset(next_tensordict)

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """Add the keys to the environment's state."""
        return self._declare(state_spec)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the keys to the environment's observations."""
        return self._declare(observation_spec)

    def _declare(self, spec: Composite) -> Composite:
        for key, leaf in self.specs().items():
            spec[key] = leaf.clone()
        return spec


def _written(actor: ProbabilisticTensorDictSequential, zeros: TensorDictBase) -> TensorDictBase:
    """Run a policy on an observation of zeros; leave the random state unchanged."""
    device = next(actor.parameters()).device
    cuda = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=cuda):
        return actor(zeros.to(device))
