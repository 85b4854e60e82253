"""Declares the published objectives of language jobs by name: ``loss=grpo advantage=grpo``.

Each objective is two presets: ``loss=NAME``, which changes settings of ``loss=clip``, and
``advantage=NAME``, which changes settings of ``advantage=group``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """A named variant of a choice: the choice ``below`` with different values of some settings."""

    what: str
    below: str
    values: Mapping[str, object]


#: group -> name -> preset
PRESETS: dict[str, dict[str, Preset]] = {"loss": {}, "advantage": {}}


def _objective(name: str, what: str, *, baseline: str, **loss: object) -> None:
    """``baseline`` names a function of :mod:`klrl.language.run.advantage`."""
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

#: The ``advantage.baseline`` that divides score and KL by the spread of the group's scores.
SHAPED = "normalized_shaped"
_PUBLISHED = [str(each.values["baseline"]) for each in PRESETS["advantage"].values()]
BASELINES = tuple(dict.fromkeys((*_PUBLISHED, SHAPED)))
