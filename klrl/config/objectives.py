"""Declares published objectives for language jobs, such as ``loss=grpo advantage=grpo``.

An objective has two presets: ``loss=NAME`` changes settings of ``loss=clip``, and
``advantage=NAME`` changes settings of ``advantage=group``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """A named variant of a choice, with its own values of some settings."""

    what: str  # the preset's line in ``--help``
    below: str  # the name of the choice
    values: Mapping[str, object]  # setting -> value


#: group -> name -> preset
PRESETS: dict[str, dict[str, Preset]] = {"loss": {}, "advantage": {}}


def _objective(name: str, what: str, *, baseline: str, **loss: object) -> None:
    """Declare an objective's two presets; ``baseline`` is a value of ``advantage.baseline``."""
    loss = {"clip_epsilon": 0.2, "normalize_advantage": False, **loss}
    PRESETS["loss"][name] = Preset(f"language: {what}", "clip", loss)
    PRESETS["advantage"][name] = Preset(f"language: {what}", "group", {"baseline": baseline})


_objective("grpo", "GRPO (Shao et al. 2024)", baseline="normalized", reduction="response")
_objective("dr_grpo", "Dr. GRPO (Liu et al. 2025)", baseline="mean", reduction="sequence")
_objective(
    "dapo",
    "DAPO (Yu et al. 2025) with clip-higher and overlong filtering; with kl=none",
    baseline="normalized",
    reduction="token",
    clip_epsilon_high=0.28,
    mask_truncated=True,
)
_objective("rloo", "RLOO (Ahmadian 2024)", baseline="leave_one_out", reduction="sequence")

#: The value of ``advantage.baseline`` that divides score and KL by the std of the scores.
SHAPED = "normalized_shaped"
_PUBLISHED = [str(each.values["baseline"]) for each in PRESETS["advantage"].values()]
BASELINES = tuple(dict.fromkeys((*_PUBLISHED, SHAPED)))
