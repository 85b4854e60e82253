"""What klrl asks of a tensordict policy: its log-probs, its keys, and no nested policy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

from tensordict import TensorDictBase, unravel_key
from tensordict.nn import CompositeDistribution, ProbabilisticTensorDictSequential
from torch import Tensor
from torch.distributions import Distribution

from klrl.kl.estimators import sum_beyond
from klrl.kl.reference import FrozenPolicy
from klrl.kl.saturated import PRE_TANH, beside, readable
from klrl.kl.shapes import add_heads

#: A key of a TensorDict: a string, or a tuple of them (TorchRL's NestedKey).
Key: TypeAlias = str | tuple[Any, ...]


def as_key(key: Key) -> Key:
    """``("a",)`` -> ``"a"``, ``("a", ("b",))`` -> ``("a", "b")``."""
    return unravel_key(key)


def score(model: ProbabilisticTensorDictSequential, tensordict: TensorDictBase) -> Tensor:
    """log pi(a|s) of a transition's action, on the transition's device, as the policy gives it.

    It begins with the batch's shape; :mod:`klrl.kl.shapes` says what may follow. A policy with
    several heads gives the sum over them. Saturated actions of a TanhNormal are
    scored as :mod:`klrl.kl.saturated` tells. An environment on the CPU may ask a policy on a GPU.
    The copy is shallow: the model writes its parameters into what it is given.
    """
    device = next(model.parameters()).device
    action_device = tensordict.get(model.dist_sample_keys[0]).device
    if device != action_device:
        tensordict = tensordict.to(device)
    moved = tensordict.copy()
    if not isinstance(model, ProbabilisticTensorDictSequential | FrozenPolicy):
        return model.log_prob(moved).to(action_device)
    dist = model.get_dist(moved)
    log_prob = model.log_prob(moved, dist=dist)
    if not isinstance(log_prob, Tensor):
        log_prob = add_heads([log_prob.get(key) for key in log_prob_keys(model)])
    return where_saturated(model, tensordict, dist, log_prob).to(action_device)


def where_saturated(
    model: ProbabilisticTensorDictSequential,
    tensordict: TensorDictBase,
    dist: Distribution,
    log_prob: Tensor,
) -> Tensor:
    """:func:`klrl.kl.saturated.readable`, with what a transition keeps of the policy that sampled.

    Args:
        model: whose log-prob it is.
        tensordict: the transition, into which the model has not written.
        dist: the model's distribution there.
        log_prob: of the action, [...].
    """
    if PRE_TANH in model.out_keys and tensordict.get(PRE_TANH, None) is not None:
        return log_prob  # it reads that itself

    def known() -> tuple[Distribution | None, Tensor | None]:
        if not has_all(tensordict, model.dist_params_keys):
            return None, None
        keys = [key for key in model.log_prob_keys if key is not None]
        written = bool(keys) and has_all(tensordict, keys)
        stored = sum_heads(tensordict, keys, log_prob.ndim) if written else None
        return model.build_dist_from_params(tensordict), stored

    return readable(log_prob, dist, tensordict, model.dist_sample_keys[0], known)


def heads_where_saturated(
    model: ProbabilisticTensorDictSequential,
    tensordict: TensorDictBase,
    dist: CompositeDistribution,
    log_probs: TensorDictBase,
) -> TensorDictBase:
    """:func:`where_saturated` for a composite whose heads' log-probs stand apart.

    Args:
        model: whose log-probs they are.
        tensordict: the transition, into which the model has not written.
        dist: the model's distribution there.
        log_probs: under the action's key with the suffix ``_log_prob``, one per head.
    """
    known = None
    if has_all(tensordict, model.dist_params_keys):
        known = model.build_dist_from_params(tensordict)
    # Heads beside each other would share one pre_tanh.
    data = tensordict.exclude(*(beside(key) for key in dist.dists))
    for key, head in dist.dists.items():
        name = f"{key}_log_prob" if isinstance(key, str) else (*key[:-1], f"{key[-1]}_log_prob")
        source = None if known is None else known.dists[key]
        value = readable(
            log_probs.get(name), head, data, key, partial(_pair, source, data.get(name, None))
        )
        log_probs.set(name, value)
    return log_probs


def _pair(
    source: Distribution | None, stored: Tensor | None
) -> tuple[Distribution | None, Tensor | None]:
    return source, stored


def require_policy(name: str, model: Any) -> None:
    """Refuse what has no distribution over an action, and a policy inside a policy.

    Raises:
        TypeError: a network, or a head without keys.
        ValueError: as :func:`refuse_nested_policy`.
    """
    needed = ("dist_params_keys", "dist_sample_keys")
    if not hasattr(model, "get_dist") or not all(getattr(model, key, None) for key in needed):
        raise TypeError(
            f"{name}={type(model).__name__}: has no distribution over an action; end it in a "
            "ProbabilisticTensorDictModule(in_keys, out_keys, distribution_class=...)"
        )
    refuse_nested_policy(name, model)


def refuse_nested_policy(name: str, model: Any) -> None:
    """Refuse a policy whose last part is a policy with a network of its own.

    tensordict 0.14.3's ``get_dist`` skips that network: it takes the parameters from the data,
    where those of the sampling policy stand, and every KL is 0.

    Raises:
        ValueError: with the flat form to write instead.
    """
    if not isinstance(model, ProbabilisticTensorDictSequential):
        return
    last = list(model.module.children())[-1]
    if isinstance(last, ProbabilisticTensorDictSequential):
        raise ValueError(
            f"{name}: its last part is a policy, whose network get_dist would skip; write "
            "ProbabilisticTensorDictSequential(trunk, *head.module)"
        )


def log_prob_keys(model: ProbabilisticTensorDictSequential) -> list[Key]:
    """Where a policy writes its log-probs, one key per head.

    ``ProbabilisticTensorDictSequential.log_prob_key`` fails in tensordict 0.14 (its class lacks the
    attribute that the property reads); the plural works.

    Raises:
        ValueError: the policy writes none.
    """
    # log_prob_keys names them even where nothing writes them; out_keys does not.
    written = [as_key(key) for key in model.out_keys]
    keys = [as_key(key) for key in model.log_prob_keys if key is not None]
    keys = [key for key in keys if key in written]
    if not keys:
        raise ValueError(f"{type(model).__name__} writes no log-prob: set return_log_prob=True")
    return keys


def sum_heads(tensordict: TensorDictBase, keys: Sequence[Key], batch_dims: int) -> Tensor:
    """The log-prob of an action of several heads: the sum of theirs, each summed to [...]."""
    return sum_beyond(add_heads([tensordict.get(key) for key in keys]), batch_dims)


def has_all(tensordict: TensorDictBase, keys: Sequence[Key]) -> bool:
    """Whether every key is there."""
    return all(tensordict.get(key, None) is not None for key in keys)
