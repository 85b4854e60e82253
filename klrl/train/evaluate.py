"""Play the policy of a run, whatever its domain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from klrl.base.errors import ConfigError

#: Played by default, of a control run and of a language run.
EPISODES, RESPONSES = 20, 512


class Evaluated(Protocol):
    """What an evaluation gives, of either domain."""

    @property
    def returns(self) -> list[float]:
        """One number per episode (response)."""

    @property
    def row(self) -> dict[str, float]:
        """``eval/return`` and its kin."""

    @property
    def told(self) -> str:
        """For a person to read."""


def evaluate_run(
    run: str | Path,
    words: Sequence[str] = (),
    *,
    episodes: int | None = None,
    sampled: bool = False,
    which: str = "last",
    seed: int = 0,
    device: str = "cpu",
) -> Evaluated:
    """What ``klrl evaluate`` measures.

    Args:
        run: the run folder.
        words: another task, as in ``env.kwargs.g=14``; see :mod:`klrl.runs.other_task`.
        episodes: how many; None: as the command line.
        sampled: language: draw responses as in training; else the likeliest tokens.
        which: last or best checkpoint.
        seed: of the episodes (samples).
        device: where to put the policy.

    Raises:
        ConfigError: no such run or checkpoint, a task that the policy cannot play, or an argument
            out of range.
        NonFiniteError: a step returned NaN or infinity.
        RewardError: the reward function failed.
    """
    from klrl.base.seeds import derived_seed
    from klrl.config.checks import check_device_name
    from klrl.domains import domain_of
    from klrl.runs.find import find_run
    from klrl.runs.other_task import config_on_task

    check_device_name(device)
    for name, number, least in (("episodes", episodes, 1), ("seed", seed, 0)):
        if number is not None and (not isinstance(number, int) or number < least):
            raise ConfigError(f"{name}={number}: give a whole number >= {least}")
    folder = find_run(str(run), "RUN")
    config = config_on_task(folder, words)
    return domain_of(config).evaluate(
        folder,
        config,
        episodes=episodes,
        sampled=sampled,
        which=which,
        seed=derived_seed(seed, "evaluate"),
        device=device,
    )
