"""What klrl asks of a tensordict policy: its log-probs and its keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from tensordict import TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor
from torch.distributions import Distribution

from klrl.kl.estimators import sum_beyond
from klrl.kl.reference import FrozenPolicy
from klrl.kl.saturated import PRE_TANH, any_kept, any_lost, beside, draw, log_probs, warn
from klrl.kl.shapes import add_heads

#: Where older TorchRL policies wrote the log-prob of all heads; read where today's key is missing.
OLDER_KEY = "sample_log_prob"
#: A key of a TensorDict: a string, or a tuple of them (TorchRL's NestedKey).
Key: TypeAlias = str | tuple[Any, ...]


def as_key(key: Key) -> Key:
    """``("a",)`` -> ``"a"``, ``("a", ("b",))`` -> ``("a", "b")``."""
    return unravel_key(key)


def score(
    model: ProbabilisticTensorDictSequential,
    tensordict: TensorDictBase,
    keys: Sequence[Key] | None = None,
) -> Tensor:
    """log pi(a|s) of a transition's action, on the transition's device, as the policy gives it.

    It begins with the batch's shape; :mod:`klrl.kl.shapes` says what may follow. A policy with
    several heads gives the sum over them. Saturated actions of a TanhNormal get a sample before
    tanh in the transition (:func:`keep_pre_tanh`). An environment on the CPU may ask a policy on a
    GPU. The copy is shallow: the model writes its parameters into what it is given.

    ``keys`` are where the policy that sampled wrote its log-probs; default where ``model`` does.
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
    """:func:`klrl.kl.saturated.draw`, where a transition holds the parameters that sampled it.

    ``model`` is of the family that sampled; ``keys`` as in :func:`score`.
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
    """A log-prob, read from the samples before tanh where a transition holds them.

    With a warning where an action is saturated and nothing is known of it.

    Args:
        model: whose log-prob it is.
        tensordict: the transition, into which the model has not written.
        dist: the model's distribution there.
        log_prob: of the action, [...]; or a TensorDict of those of a composite's heads.
    """
    key = model.dist_sample_keys[0]
    if PRE_TANH in model.out_keys and tensordict.get(PRE_TANH, None) is not None:
        return log_prob  # it reads that itself
    if any_kept(dist, tensordict, key):
        each = log_probs(dist, tensordict, key)
        if isinstance(log_prob, Tensor):
            return sum_beyond(add_heads(list(each.values())), log_prob.ndim)
        return log_prob.update(each)
    if any_lost(dist, tensordict, key) and not has_all(tensordict, model.dist_params_keys):
        warn()
    return log_prob


def require_policy(name: str, model: object) -> None:
    """Refuse what has no distribution over an action."""
    needed = ("dist_params_keys", "dist_sample_keys")
    if not hasattr(model, "get_dist") or not all(getattr(model, key, None) for key in needed):
        raise TypeError(
            f"{name}={type(model).__name__}: has no distribution over an action; end it in a "
            "ProbabilisticTensorDictModule(in_keys, out_keys, distribution_class=...)"
        )


def require_reference(name: str, model: object) -> None:
    """Refuse what scores another policy's data with that policy's numbers.

    A recurrent policy reads its hidden state from the data, where it is that of the policy that
    sampled: in silence, log-probs of the reference would be off by nats.
    """
    written = {as_key(key) for key in getattr(model, "out_keys", ())}
    carried = [key for key in getattr(model, "in_keys", ()) if as_key(("next", key)) in written]
    if carried:
        raise ValueError(
            f"{name}: is recurrent (carries {carried[0]} from step to step), and would be asked "
            "with the hidden state of the policy that sampled; give a policy without one"
        )


def log_prob_keys(model: ProbabilisticTensorDictSequential) -> list[Key]:
    """Where a policy writes its log-probs, one key per head.

    ``ProbabilisticTensorDictSequential.log_prob_key`` fails in tensordict 0.14 (its class lacks the
    attribute that the property reads); the plural works.
    """
    # log_prob_keys names them even where nothing writes them; out_keys does not.
    written = [as_key(key) for key in model.out_keys]
    keys = [as_key(key) for key in model.log_prob_keys if key is not None]
    keys = [key for key in keys if key in written]
    if not keys:
        raise ValueError(f"{type(model).__name__} writes no log-prob: set return_log_prob=True")
    return keys


def written_keys(tensordict: TensorDictBase, keys: Sequence[Key | None]) -> list[Key]:
    """Of the log-probs that a transition holds: the keys, or :data:`OLDER_KEY`, or []."""
    named = [as_key(key) for key in keys if key is not None]
    older = [beside(key, OLDER_KEY) for key in named[:1]]
    return next((found for found in (named, older) if has_all(tensordict, found)), [])


def sum_heads(tensordict: TensorDictBase, keys: Sequence[Key], batch_dims: int) -> Tensor:
    """The log-prob of an action of several heads: the sum of theirs, each summed to [...]."""
    return sum_beyond(add_heads([tensordict.get(key) for key in keys]), batch_dims)


def has_all(tensordict: TensorDictBase, keys: Sequence[Key]) -> bool:
    """Whether every key is there."""
    return all(tensordict.get(key, None) is not None for key in keys)


def is_wrapper(model: object) -> bool:
    """Whether a model is an LLM wrapper rather than a control actor."""
    return hasattr(model, "log_probs_key") and hasattr(model, "input_mode")
