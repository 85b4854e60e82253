"""Compute or read the log-probs of a tensordict policy, and find its keys."""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq
from typing import Any, TypeAlias

from tensordict import TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
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


def under_keys_of(
    model: TensorDictModuleBase, tensordict: TensorDictBase, keys: Sequence[Key]
) -> TensorDictBase:
    """Return the data with the actions at ``keys`` under the model's keys: a copy if these differ.

    A composite's key may lie above or below the given ones: its actions are there already.
    """
    given = [as_key(key) for key in keys]
    own = [as_key(key) for key in getattr(model, "dist_sample_keys", given)]
    lacking = [key for key in own if not any(_nested(key, other) for other in given)]
    for key, other in zip(given, own, strict=bool(lacking)):
        if other in lacking:
            u = tensordict.get(sibling(key), None)
            tensordict = tensordict.copy().exclude(sibling(other)).set(other, tensordict.get(key))
            tensordict = tensordict if u is None else tensordict.set(sibling(other), u)
    return tensordict


def _path(key: Key) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _nested(key: Key, other: Key) -> bool:
    """Whether one key is, or lies below, the other."""
    return all(map(eq, _path(key), _path(other)))


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
    action_device = leaves(tensordict.get(model.dist_sample_keys[0]))[0].device
    if device != action_device:
        tensordict = tensordict.to(device)
    moved = tensordict.copy()
    if not isinstance(model, ProbabilisticTensorDictSequential | FrozenPolicy):
        return model.log_prob(moved).to(action_device)
    dist = model.get_dist(moved)
    log_prob = model.log_prob(moved, dist=dist)
    # A composite names its log-probs by its heads, which log_prob_keys need not list.
    log_prob = add_heads(leaves(log_prob))
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
        dist = model.build_dist_from_params(tensordict)
        if any_lost(dist, tensordict, model.dist_sample_keys[0]):
            written = written_keys(tensordict, model.log_prob_keys if keys is None else keys)
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

    ``tensordict`` is the transition without the model's outputs, ``dist`` the model's distribution
    in it. ``log_prob``: [...], or a TensorDict with the log-prob of each head.
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


def require_policy(name: str, model: object, *, keys: bool = True) -> None:
    """Refuse a model that has no distribution over an action, or ``keys`` of one."""
    needed = ("dist_params_keys", "dist_sample_keys")
    if not hasattr(model, "get_dist") or not all(getattr(model, key, not keys) for key in needed):
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
    """Return the keys of an action's log-probs: ``keys`` if the data have them all; else others.

    These are :data:`OLDER_KEY`; or, if ``X_log_prob`` names the log-prob of a composite's actions
    below ``X``, the log-probs next to these actions. The result is [] if one is missing.
    """
    named: list[Key] = [as_key(key) for key in keys if key is not None]
    for found in (named, [sibling(key, OLDER_KEY) for key in named[:1]]):
        if has_all(tensordict, found):
            return found
    above = [(*key[:-1], key[-1].removesuffix("_log_prob")) for key in map(_path, named)]
    beside = ("_log_prob", f"_{PRE_TANH}")  # not actions, but written next to them
    heads: list[Key] = [
        (*key[:-1], f"{key[-1]}_log_prob")
        for key in map(_path, tensordict.keys(True, True))
        if any(_nested(key, stem) for stem in above) and not key[-1].endswith(beside)
    ]
    return heads if has_all(tensordict, heads) else []


def leaves(value: Tensor | TensorDictBase) -> list[Tensor]:
    """Return the tensors of an action or log-prob, one per head."""
    return [value] if isinstance(value, Tensor) else list(value.values(True, True))


def has_all(tensordict: TensorDictBase, keys: Sequence[Key]) -> bool:
    """Whether a TensorDict has every key."""
    return all(key in tensordict.keys(include_nested=True) for key in keys)


def is_wrapper(model: object) -> bool:
    """Whether a model is an LLM wrapper rather than a control actor."""
    return hasattr(model, "log_probs_key") and hasattr(model, "input_mode")
