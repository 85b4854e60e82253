"""Measure divergences of two policies, state by state, for ``klrl kl`` and ``Run.kl``.

The acting policy, one of the two or a third policy, samples actions (tokens). Divergences are
measured in the states that it visits. For Gaussians with several dimensions, js and tv are means
over draws. All other divergences are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from klrl.base.errors import ConfigError, user_code
from klrl.base.seeds import derived_seed, generators_kept, seed_generators
from klrl.config import OwnPart
from klrl.config.own import typed_args
from klrl.config.shorthand import part_of
from klrl.domains import CONTROL, LANGUAGE, Domain, domain_of
from klrl.runs.find import find_policy, is_model
from klrl.runs.machine import device_of
from klrl.runs.resume import stored_config
from klrl.train.evaluate import check_playing, stored_job
from klrl.train.scores import EvaluationPlan, Scores, Size, Starts, mean_over_states

#: Divergence -> the template of its printed name; {0} and {1} are the two policies.
NAMES = {"reverse": "KL({0}||{1})", "forward": "KL({1}||{0})", "js": "js", "tv": "tv"}


@dataclass(frozen=True)
class Parties:
    """The two policies that are compared, and the policy that acts."""

    #: The first policy: a run; in language also a model's folder; in control also an OwnPart, which
    #: names the user's policy.
    run: Path | OwnPart
    other: Path | OwnPart | None  # the second policy; None: the reference of ``run``
    on: Path | OwnPart  # the policy that acts
    which: str  # last or best checkpoint of each run


@dataclass(frozen=True)
class Distance:
    """One divergence of two policies, in nats (tv: unitless)."""

    mean: float  # over all states
    error: float | None  # standard error of ``mean`` over episodes; None for one episode
    median: float  # the quantiles are over all states
    q90: float
    q99: float
    worst: float  # the largest value, at ``step`` of ``episode``, both counted from 0
    episode: int
    step: int
    #: Mean over episodes of the divergence's sum over an episode. For KL(a||b) in the states of a,
    #: this estimates the KL of whole episodes (chain rule).
    total: float
    total_error: float | None  # standard error of ``total``; None for one episode


@dataclass(frozen=True)
class PolicyKL:
    """The result of ``klrl kl``."""

    distances: dict[str, Distance]  # name and acting policy (``js on run``) -> distance
    domain: Domain
    episodes: int
    states: int
    cut: int  # episodes that did not end; their states are included
    notes: Sequence[str]  # remarks for the user

    @property
    def row(self) -> dict[str, Any]:
        """Distances and counts, as ``--json`` prints them."""
        counts = {"episodes": self.episodes, "states": self.states, "cut": self.cut}
        return {**{name: vars(each) for name, each in self.distances.items()}, **counts}


@user_code()
def kl_between(
    run: str | Path,
    other: str | Path | None = None,
    words: Sequence[str] = (),
    *,
    on: str | Path | None = None,
    episodes: int | None = None,
    which: str = "last",
    seed: int = 0,
    device: str = "cpu",
) -> PolicyKL:
    """Measure the divergences of two policies.

    Args:
        run: a run folder, the folder of a language model that klrl did not train or, for control,
            ``FILE.py:function``, ``module:Name`` or an ONNX file (docs/your_policy.md).
        other: the same; None: the reference of ``run``.
        words: settings that change the task of ``on``, such as ``env.kwargs.g=14``. For a model's
            folder they are ``env.data=FILE``, its prompts, and others (docs/language.md); for code
            or an ONNX file, the environment: ``env=hopper``.
        on: the folder of the run (model) whose policy acts, in that run's task; None: ``run``.
        episodes: how many episodes (responses); None: :attr:`klrl.domains.Domain.plays`.
        which: ``last`` or ``best`` checkpoint of the runs.
        seed: seed of the start states and samples.
        device: the device of the policies.

    Raises:
        ConfigError: no such run or checkpoint, or policies that cannot be compared.
        NonFiniteError: a divergence was NaN or infinite.
    """
    first, second = _party(run, "RUN"), None if other is None else _party(other, "other")
    actor: Path | OwnPart
    if on is None and isinstance(first, OwnPart):
        check_playing(episodes=episodes, seed=seed, device=device)
        actor, config = first, CONTROL.function("of_code")(run, words)
    else:
        setting, acting = ("RUN", run) if on is None else ("on", on)
        actor, config = stored_job(
            acting, setting, words, episodes=episodes, seed=seed, device=device
        )
    domain = domain_of(config)
    parties = Parties(first, second, actor, which)
    _check(parties, domain)
    starts = Starts("kl", seed)
    with generators_kept():
        seed_generators(derived_seed(seed, starts.use))
        plan = EvaluationPlan(starts, Size(episodes or domain.plays), True, device_of(device))
        waves, notes = domain.function("between")(parties, config, plan)
        visited: list[Scores] = list(waves)
    found = [each for wave in visited for each in wave.kls]
    labels = ("policy", "reference") if other is None else ("run", "other")
    acts = labels[1] if actor == parties.other else str(actor)
    states = labels[0] if actor == first else acts
    distances = {
        f"{name.format(*labels)} on {states}": distance([each[key] for each in found])
        for key, name in NAMES.items()
        if key in found[0]
    }
    visits = sum(each["reverse"].size for each in found)
    return PolicyKL(distances, domain, len(found), visits, sum(wave.cut for wave in visited), notes)


def distance(values: Sequence[np.ndarray]) -> Distance:
    """Summarise a divergence from its values [T] in the states of each episode.

    Raises:
        NonFiniteError: a value is NaN or infinite.
    """
    mean, error = mean_over_states(values)
    sums = np.array([each.sum() for each in values])
    episode = int(np.argmax([each.max() for each in values]))
    step = int(values[episode].argmax())
    median, q90, q99 = map(float, np.quantile(np.concatenate(values), (0.5, 0.9, 0.99)))
    worst, total = float(values[episode][step]), float(sums.mean())
    total_error = None if error is None else float(sums.std(ddof=1) / np.sqrt(len(sums)))
    return Distance(mean, error, median, q90, q99, worst, episode, step, total, total_error)


def _party(policy: str | Path, setting: str) -> Path | OwnPart:
    """Find a policy: a run, a model's folder, or code or an ONNX file of the user."""
    if part := part_of(str(policy)):
        part.args = typed_args(setting, part)
        return part
    return find_policy(policy, setting)


def _check(parties: Parties, domain: Domain) -> None:
    """Require one domain for all policies, and a reference of ``run`` if ``other`` is None."""
    for setting, path in (("RUN", parties.run), ("other", parties.other)):
        if path is None:
            continue
        kind = CONTROL.name
        if isinstance(path, Path):
            kind = LANGUAGE.name if is_model(path) else stored_config(path).domain
        if kind != domain.name:
            told = f"is a {kind} policy, but the acting policy is a {domain.name} policy"
            raise ConfigError(
                f"{setting}={_shown(path)}: {told}; give only control or only language runs"
            )
    run = parties.run
    alone = isinstance(run, OwnPart) or is_model(run) or not stored_config(run).has_reference
    if parties.other is None and alone:
        raise ConfigError(f"RUN={_shown(run)}: has no reference (kl=none); name another policy")


def _shown(policy: Path | OwnPart) -> str:
    return str(policy.target if isinstance(policy, OwnPart) else policy)
