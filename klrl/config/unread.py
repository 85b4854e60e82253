"""Rules about settings that a valid config may hold and yet never read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unread:
    """Refuse an override that nothing would read.

    Attributes:
        key: of the setting, as in ``loss.gain``.
        unread: whether this job, a ``Config`` or a ``LanguageConfig``, never reads it.
        reason: why, and the remedy.
    """

    key: str
    unread: Callable[[Any], bool]
    reason: str


_no_entropy = "loss.entropy_bonus=false never reads it; drop it or set loss.entropy_bonus=true"
_unbounded = "loss.beta_rule=forward has no bounds, as in TorchRL; use loss.beta_rule=doubling"
#: Of both kinds of job.
UNREAD = (
    Unread(
        "loss.gain",
        lambda c: getattr(c.loss, "beta_rule", "proportional") != "proportional",
        "only loss.beta_rule=proportional reads it; drop it or set that",
    ),
    *(
        Unread(
            f"loss.{name}",
            lambda c: getattr(c.loss, "beta_rule", "") == "proportional",
            "loss.beta_rule=proportional reads loss.gain instead; drop it",
        )
        for name in ("increment", "decrement")
    ),
    Unread("loss.entropy_coeff", lambda c: not c.loss.entropy_bonus, _no_entropy),
    *(
        Unread(f"loss.{name}", lambda c: getattr(c.loss, "beta_rule", "") == "forward", _unbounded)
        for name in ("beta_min", "beta_max")
    ),
    Unread("eval.episodes", lambda c: c.eval.every == 0, "eval.every=0 never evaluates; drop it"),
)
#: Of control jobs.
UNREAD_CONTROL = (
    Unread(
        "loss.samples_mc_kl",
        lambda c: getattr(c.loss, "kl_old", "sampled") != "sampled",
        "loss.kl_old=exact draws no samples; set loss.kl_old=sampled",
    ),
    Unread(
        "kl.apply",
        lambda c: getattr(c.kl, "placement", "reward") == "loss",
        "kl.placement=loss charges no reward; drop it",
    ),
    Unread("loss.samples_mc_entropy", lambda c: not c.loss.entropy_bonus, _no_entropy),
    Unread(
        "loss.samples_mc_entropy",
        lambda c: c.actor.name != "tanh_normal",
        "only actor=tanh_normal lacks a closed-form entropy; drop it",
    ),
    Unread(
        "loss.separate_losses",
        lambda c: not c.actor.share_trunk,
        "policy and critic share nothing; set actor.share_trunk=true",
    ),
)
