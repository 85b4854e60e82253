"""Evaluate the policy of a run that ended: what ``klrl evaluate`` and ``Run.evaluate`` do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.base.text import warn
from klrl.config import JobConfig
from klrl.config.checks import check_device_name
from klrl.config.own import changed_sources
from klrl.domains import domain_of
from klrl.runs.find import find_run
from klrl.runs.machine import device_of
from klrl.runs.other_task import config_on_task
from klrl.runs.resume import edited_settings
from klrl.train.evaluate import Evaluation, Starts
from klrl.train.schedule import Size


def evaluate_run(
    run: str | Path,
    words: Sequence[str] = (),
    *,
    episodes: int | None = None,
    sampled: bool = False,
    which: str = "last",
    seed: int = 0,
    device: str = "cpu",
) -> Evaluation:
    """What ``klrl evaluate`` measures.

    Args:
        run: the run folder.
        words: another task, as in ``env.kwargs.g=14``; see :mod:`klrl.runs.other_task`.
        episodes: how many; None: :attr:`klrl.domains.Domain.plays`.
        sampled: draw actions (tokens) as in training; else take the likeliest.
        which: last or best checkpoint.
        seed: of the start states and samples; a set of its own, apart from those of training.
        device: where to put the policy.

    Raises:
        ConfigError: no such run or checkpoint, a task that the policy cannot play, or an argument
            out of range.
        NonFiniteError: a step returned NaN or infinity.
        RewardError: the reward function failed.
    """
    folder, config = asked_of(run, "RUN", words, episodes=episodes, seed=seed, device=device)
    domain = domain_of(config)
    evaluated: Evaluation = domain.function("evaluate")(
        folder,
        config,
        starts=Starts("evaluate", seed),
        size=Size(episodes or domain.plays),
        sampled=sampled,
        which=which,
        device=device_of(device),
    )
    return evaluated


def asked_of(
    run: str | Path,
    setting: str,
    words: Sequence[str],
    *,
    episodes: int | None,
    seed: int,
    device: str,
) -> tuple[Path, JobConfig]:
    """The folder of a run that is to be played, and its settings on the task that is asked for.

    Arguments and errors as of :func:`evaluate_run`; ``setting`` names the run in messages.
    """
    check_device_name(device)
    for name, value, least in (("episodes", episodes, 1), ("seed", seed, 0)):
        if value is not None and (not isinstance(value, int) or value < least):
            raise ConfigError(f"{name}={value}: give a whole number >= {least}")
    folder = find_run(str(run), setting)
    config = config_on_task(folder, words)
    for line in filter(None, [edited_settings(folder), *changed_sources(config, ("env", "actor"))]):
        warn(line)
    return folder, config
