"""Evaluate the policy of a stored run, for ``klrl evaluate`` and ``Run.evaluate``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from klrl.base.errors import ConfigError, user_code
from klrl.base.text import warn
from klrl.config import JobConfig
from klrl.config.checks import check_device_name
from klrl.config.own import changed_sources
from klrl.domains import LANGUAGE, domain_of
from klrl.runs.find import find_policy, is_model
from klrl.runs.machine import device_of
from klrl.runs.resume import config_on_task, edited_settings
from klrl.train.scores import Evaluation, EvaluationPlan, Size, Starts


@user_code()
def evaluate_run(
    run: str | Path,
    words: Sequence[str] = (),
    *,
    episodes: int | None = None,
    sampled: bool = False,
    which: str = "last",
    seed: int = 0,
    device: str = "cpu",
    into: Path | None = None,
) -> Evaluation:
    """Evaluate the policy of a run.

    Args:
        run: the run folder.
        words: settings that change the task, such as ``env.kwargs.g=14``; see
            :mod:`klrl.runs.resume`.
        episodes: number of episodes (responses); None: :attr:`klrl.domains.Domain.plays`.
        sampled: sample actions (tokens), as in training; else take the mode.
        which: ``last`` or ``best`` checkpoint.
        seed: seed of the start states and of sampled actions (tokens).
        device: the device of the policy.
        into: record the episodes in this new folder; control only.

    Raises:
        ConfigError: no such run or checkpoint, a task that the policy cannot play, or an argument
            out of range.
        NonFiniteError: a step returned NaN or infinity.
        RewardError: the reward function failed.
    """
    folder, config = stored_job(run, "RUN", words, episodes=episodes, seed=seed, device=device)
    domain = domain_of(config)
    if into is not None and "record" not in domain.functions:
        raise ConfigError(f"RUN={run}: is a {domain.name} run; give a control run")
    use, more = ("evaluate", ()) if into is None else ("record", (into.absolute(),))
    size = Size(episodes or domain.plays)
    plan = EvaluationPlan(Starts(use, seed), size, sampled, device_of(device))
    evaluated: Evaluation = domain.function(use)(folder, config, plan, which, *more)
    return evaluated


def stored_job(
    run: str | Path,
    setting: str,
    words: Sequence[str],
    *,
    episodes: int | None,
    seed: int,
    device: str,
) -> tuple[Path, JobConfig]:
    """Find the folder of a run; return it with the run's settings, changed by ``words``.

    A model's folder has the settings of a job in which the model answers prompts. ``setting`` names
    ``run`` in error messages; :func:`evaluate_run` describes the other arguments.
    """
    check_playing(episodes=episodes, seed=seed, device=device)
    folder = find_policy(run, setting)
    if is_model(folder):
        return folder, LANGUAGE.function("of_model")(folder, words)
    config = config_on_task(folder, words)
    changed = changed_sources(config, ("env", "actor", "reference"))
    for line in filter(None, [edited_settings(folder), *changed]):
        warn(line)
    return folder, config


def check_playing(*, episodes: int | None, seed: int, device: str) -> None:
    """Refuse arguments of :func:`evaluate_run` that are out of range."""
    check_device_name(device)
    for name, value, least in (("episodes", episodes, 1), ("seed", seed, 0)):
        if value is not None and (type(value) is not int or value < least):
            raise ConfigError(f"{name}={value}: give a whole number >= {least}")
