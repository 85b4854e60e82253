"""Compute or read the log-probs of a tensordict policy, and find its keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from tensordict import TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor
from torch.distributions import Distribution

from klrl.kl.estimators import sum_beyond
from klrl.kl.reference import FrozenPolicy
from klrl.kl.saturated import PRE_TANH, any_kept, any_lost, draw, log_probs, sibling, warn
from klrl.kl.shapes import add_heads

#: Older TorchRL policies write the log-prob here; read if the policy's own key is missing.
OLDER_KEY = "sample_log_prob"
#: A key of a TensorDict: a string, or a nested tuple of strings (TorchRL's NestedKey).
Key: TypeAlias = str | tuple[Any, ...]


def as_key(key: Key) -> Key:
    """Flatten a key: ``("a",)`` -> ``"a"``, ``("a", ("b",))`` -> ``("a", "b")``."""
    return unravel_key(key)


def score(
    model: ProbabilisticTensorDictSequential,
    tensordict: TensorDictBase,
    keys: Sequence[Key] | None = None,
) -> Tensor:
    """Compute log pi(a|s) of a transition's action under ``model``, on the action's device.

    The shape begins with the batch shape; see :mod:`klrl.kl.shapes`. Log-probs of heads are summed.
    The model may be on a different device than the transition. The model writes the distribution's
    parameters into its input, so it gets a shallow copy of the transition. The transition itself is
    changed only by :func:`keep_pre_tanh`.

    ``keys``: keys of the sampling policy's log-probs; None: the log-prob keys of ``model``.
    """
    keep_pre_tanh(model, tensordict, keys)
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
    return where_kept(model, tensordict, dist, log_prob).to(action_device)


def keep_pre_tanh(
    model: ProbabilisticTensorDictSequential,
    tensordict: TensorDictBase,
    keys: Sequence[Key] | None = None,
) -> None:
    """Apply :func:`draw` to saturated actions, if the data have the distribution's parameters.

    ``model`` needs the sampling policy's kind of distribution; ``keys`` as in :func:`score`.
    """
    if (
        isinstance(model, ProbabilisticTensorDictSequential | FrozenPolicy)
        and tensordict.get(PRE_TANH, None) is None
        and has_all(tensordict, model.dist_params_keys)
    ):
        written = written_keys(tensordict, model.log_prob_keys if keys is None else keys)
        dist = model.build_dist_from_params(tensordict)
        draw(tensordict, dist, model.dist_sample_keys[0], written)


def where_kept(
    model: ProbabilisticTensorDictSequential,
    tensordict: TensorDictBase,
    dist: Distribution,
    log_prob: Tensor | TensorDictBase,
) -> Tensor | TensorDictBase:
    """Recompute ``log_prob`` if the data have samples before tanh; else return it unchanged.

    Warns if an action is saturated, and the data have neither its sample before tanh nor the
    distribution's parameters.

    Args:
        model: the policy that computed the log-prob.
        tensordict: the transition, without the model's outputs.
        dist: the model's distribution in the transition.
        log_prob: log-prob of the action, [...]; or a TensorDict with the log-prob of each head.
    """
    key = model.dist_sample_keys[0]
    if PRE_TANH in model.out_keys and tensordict.get(PRE_TANH, None) is not None:
        return log_prob  # the model has read the samples itself
    if any_kept(dist, tensordict, key):
        each = log_probs(dist, tensordict, key)
        if isinstance(log_prob, Tensor):
            return sum_beyond(add_heads(list(each.values())), log_prob.ndim)
        return log_prob.update(each)
    if any_lost(dist, tensordict, key) and not has_all(tensordict, model.dist_params_keys):
        warn()
    return log_prob


def require_policy(name: str, model: object) -> None:
    """Refuse a model that has no distribution over an action."""
    needed = ("dist_params_keys", "dist_sample_keys")
    if not hasattr(model, "get_dist") or not all(getattr(model, key, None) for key in needed):
        raise TypeError(
            f"{name}={type(model).__name__}: has no distribution over an action; end it in a "
            "ProbabilisticTensorDictModule(in_keys, out_keys, distribution_class=...)"
        )


def require_reference(name: str, model: object) -> None:
    """Refuse a recurrent reference.

    It would read the sampling policy's hidden state from the data. Then its log-probs would be
    wrong by several nats, without an error message.
    """
    written = {as_key(key) for key in getattr(model, "out_keys", ())}
    carried = [key for key in getattr(model, "in_keys", ()) if as_key(("next", key)) in written]
    if carried:
        raise ValueError(
            f"{name}: is recurrent (carries {carried[0]} from step to step), so it would read "
            "the hidden state of the sampling policy; give a policy that is not recurrent"
        )


def log_prob_keys(model: ProbabilisticTensorDictSequential) -> list[Key]:
    """Return the keys under which a policy writes its log-probs, one per head."""
    # log_prob_keys may list keys that the policy never writes; out_keys has only written keys.
    written = [as_key(key) for key in model.out_keys]
    keys = [as_key(key) for key in model.log_prob_keys if key is not None]
    keys = [key for key in keys if key in written]
    if not keys:
        raise ValueError(f"{type(model).__name__} writes no log-prob: set return_log_prob=True")
    return keys


def written_keys(tensordict: TensorDictBase, keys: Sequence[Key | None]) -> list[Key]:
    """Return ``keys`` if the data have them all; else :data:`OLDER_KEY` if present; else []."""
    named = [as_key(key) for key in keys if key is not None]
    older = [sibling(key, OLDER_KEY) for key in named[:1]]
    return next((found for found in (named, older) if has_all(tensordict, found)), [])


def sum_heads(tensordict: TensorDictBase, keys: Sequence[Key], batch_dims: int) -> Tensor:
    """Sum the log-probs of an action's heads, and the dimensions after ``batch_dims``."""
    return sum_beyond(add_heads([tensordict.get(key) for key in keys]), batch_dims)


def has_all(tensordict: TensorDictBase, keys: Sequence[Key]) -> bool:
    """Whether a TensorDict has every key."""
    return all(tensordict.get(key, None) is not None for key in keys)


def is_wrapper(model: object) -> bool:
    """Whether a model is an LLM wrapper rather than a control actor."""
    return hasattr(model, "log_probs_key") and hasattr(model, "input_mode")
