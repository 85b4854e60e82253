"""Compute or read the log-probs of a tensordict policy, and find its keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from tensordict import TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor
from torch.distributions import Distribution

from klrl.kl.estimators import sum_beyond
from klrl.kl.saturated import (
    PRE_TANH,
    any_kept,
    any_lost,
    draw,
    log_probs,
    sibling,
    suffixed,
    warn,
)
from klrl.kl.shapes import add_heads

#: Older TorchRL policies write the log-prob here; read if the policy's own key is missing.
OLDER_KEY = "sample_log_prob"
#: A key of a TensorDict: a string, or a nested tuple of strings (TorchRL's NestedKey).
Key: TypeAlias = str | tuple[Any, ...]


def as_key(key: Key) -> Key:
    """Flatten a key: ``("a",)`` -> ``"a"``, ``("a", ("b",))`` -> ``("a", "b")``."""
    return unravel_key(key)


def path(key: Key) -> tuple[Any, ...]:
    """Return a key as a tuple: ``"a"`` -> ``("a",)``."""
    return key if isinstance(key, tuple) else (key,)


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
    action_key = action_keys(model)[0]
    action_device = _leaves(tensordict.get(action_key))[0].device
    if device != action_device:
        tensordict = tensordict.to(device)
    moved = tensordict.copy()
    if not knows_keys(model):
        scorer = getattr(model, "log_prob", None)
        action = moved.get(action_key)
        log_prob = scorer(moved) if scorer else model.get_dist(moved).log_prob(action)
        return log_prob.to(action_device)
    dist = model.get_dist(moved)
    log_prob = model.log_prob(moved, dist=dist)
    # A composite names its log-probs by its heads, which log_prob_keys need not list.
    log_prob = where_kept(model, tensordict, dist, add_heads(_leaves(log_prob)))
    return log_prob.to(action_device)


def knows_keys(model: object) -> bool:
    """Whether a policy names its actions and parameters; TorchRL's losses need only get_dist."""
    return hasattr(model, "dist_sample_keys") and hasattr(model, "dist_params_keys")


def action_keys(model: object) -> list[Key]:
    """Return the keys of a policy's action; ``action`` if the policy names none."""
    return [as_key(key) for key in getattr(model, "dist_sample_keys", ["action"])]


def keep_pre_tanh(
    model: ProbabilisticTensorDictSequential,
    tensordict: TensorDictBase,
    keys: Sequence[Key] | None = None,
) -> None:
    """Apply :func:`draw` to saturated actions, if the data have the distribution's parameters.

    ``model`` needs the sampling policy's kind of distribution; ``keys`` as in :func:`score`.
    """
    if (
        knows_keys(model)
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
    key = action_keys(model)[0]
    if PRE_TANH in getattr(model, "out_keys", ()) and tensordict.get(PRE_TANH, None) is not None:
        return log_prob  # the model has read the samples itself
    if any_kept(dist, tensordict, key):
        each = log_probs(dist, tensordict, key)
        if isinstance(log_prob, Tensor):
            return sum_beyond(add_heads(list(each.values())), log_prob.ndim)
        return log_prob.update(each)
    readable = knows_keys(model) and has_all(tensordict, model.dist_params_keys)
    if any_lost(dist, tensordict, key) and not readable:
        warn()
    return log_prob


def require_policy(name: str, model: object) -> None:
    """Refuse a model that has no distribution over an action."""
    named = not knows_keys(model) or (model.dist_params_keys and model.dist_sample_keys)
    if not hasattr(model, "get_dist") or not hasattr(model, "in_keys") or not named:
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
    if not knows_keys(model):
        return [suffixed(key, "log_prob") for key in action_keys(model)]
    # log_prob_keys may list keys that the policy never writes; out_keys has only written keys.
    written = [as_key(key) for key in model.out_keys]
    keys = [as_key(key) for key in model.log_prob_keys if key is not None]
    keys = [key for key in keys if key in written]
    if not keys:
        raise ValueError(f"{type(model).__name__} writes no log-prob: set return_log_prob=True")
    return keys


def written_keys(tensordict: TensorDictBase, keys: Sequence[Key | None]) -> list[Key]:
    """Return the keys of an action's log-probs in the data; [] if the data lack one.

    These are ``keys``; or :data:`OLDER_KEY`; or, where ``X_log_prob`` names the log-prob of a
    composite's actions below ``X``, the log-probs next to these actions.
    """
    named = [as_key(key) for key in keys if key is not None]
    older = [sibling(key, OLDER_KEY) for key in named[:1]]
    heads = [head for key in named for head in _heads_of(tensordict, key)]
    return next((found for found in (named, older, heads) if has_all(tensordict, found)), [])


def _heads_of(tensordict: TensorDictBase, key: Key) -> list[Key]:
    """Return the log-prob keys of the actions below ``X``, for the key ``X_log_prob``."""
    *above, last = path(key)
    stem = (*above, last.removesuffix("_log_prob"))
    actions = tensordict.get(stem) if has_all(tensordict, [stem]) else None
    if not isinstance(actions, TensorDictBase):
        return [key]
    leaves = [as_key((stem, leaf)) for leaf in actions.keys(True, True)]
    beside = ("_log_prob", f"_{PRE_TANH}")  # what is written next to an action
    return [suffixed(leaf, "log_prob") for leaf in leaves if not leaf[-1].endswith(beside)]


def _leaves(value: Tensor | TensorDictBase) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value.values(True, True))


def sum_heads(tensordict: TensorDictBase, keys: Sequence[Key], batch_dims: int) -> Tensor:
    """Sum the log-probs of an action's heads, and the dimensions after ``batch_dims``."""
    return sum_beyond(add_heads([tensordict.get(key) for key in keys]), batch_dims)


def has_all(tensordict: TensorDictBase, keys: Sequence[Key]) -> bool:
    """Whether a TensorDict has every key."""
    present = tensordict.keys(include_nested=True)
    return all(key in present for key in keys)


def is_wrapper(model: object) -> bool:
    """Whether a model is an LLM wrapper rather than a control actor."""
    return hasattr(model, "log_probs_key") and hasattr(model, "input_mode")
