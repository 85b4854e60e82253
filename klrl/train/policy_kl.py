"""How far two policies are apart, state by state: what ``klrl kl`` and ``Run.kl`` measure.

Whose states they are is part of every name: those to which the sampled actions (tokens) of one of
them, or of a third, lead. A divergence is exact in each, but for js and tv of Gaussians, which have
no closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from klrl.base.errors import ConfigError
from klrl.base.seeds import derived_seed, generators_kept, seed_generators
from klrl.config import LANGUAGE, JobConfig
from klrl.domains import Domain, domain_of
from klrl.runs.find import find_run
from klrl.runs.machine import device_of
from klrl.runs.resume import stored_config
from klrl.train.evaluate import Starts, mean_over_states
from klrl.train.evaluate_run import asked_of
from klrl.train.schedule import Size

#: Divergence -> its name between two policies.
NAMES = {"reverse": "KL({0}||{1})", "forward": "KL({1}||{0})", "js": "js", "tv": "tv"}


@dataclass(frozen=True)
class Parties:
    """Whose policies are compared, and whose states: run folders.

    Attributes:
        run: the policy's.
        other: the other policy's, for language also a folder of a model; None: the reference of
            ``run``.
        on: who acts.
        which: last or best checkpoint of each.
    """

    run: Path
    other: Path | None
    on: Path
    which: str


class Visited(NamedTuple):
    """What was measured in some episodes (responses)."""

    episodes: list[dict[str, np.ndarray]]  # divergence -> [T], in each state of the episode
    cut: int = 0  # episodes that did not end


@dataclass(frozen=True)
class Distance:
    """One divergence of two policies; nats, tv without a unit.

    Attributes:
        mean: over all states.
        error: its standard error over episodes; None for one.
        median, q90, q99: quantiles of the states.
        worst: the largest, with its ``episode`` and ``step`` there, from 0.
            own states is that of whole episodes (chain rule).
        total_error: its standard error.
    """

    mean: float
    error: float | None
    median: float
    q90: float
    q99: float
    worst: float
    episode: int
    step: int
    total: float
    total_error: float | None


@dataclass(frozen=True)
class PolicyKL:
    """What ``klrl kl`` prints.

    Attributes:
        distances: by name, which ends with whose states they are, as ``KL(run||other) on run``.
        episodes, states: how many were visited.
        cut: episodes that did not end; their states count.
        notes: what else there is to know, a line each.
    """

    distances: dict[str, Distance]
    domain: Domain
    episodes: int
    states: int
    cut: int
    notes: Sequence[str]

    @property
    def row(self) -> dict[str, Any]:
        """All of it, as ``--json`` prints it."""
        told = {"episodes": self.episodes, "states": self.states, "cut": self.cut}
        return {**{name: vars(each) for name, each in self.distances.items()}, **told}


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
    """Measure how far two policies are apart.

    Args:
        run: a run folder.
        other: another, for language also a folder of a model; None: the reference of ``run``.
        words: another task than that of ``on``, as in ``env.kwargs.g=14``.
        on: who acts: ``run`` (None), ``other`` or a third run. Its task is played.
        episodes: how many (responses); None: :attr:`klrl.domains.Domain.plays`.
        which: last or best checkpoint of the runs.
        seed: of the start states and samples.
        device: where to put the policies.

    Raises:
        ConfigError: no such run or checkpoint, or policies that cannot be compared.
        NonFiniteError: a divergence was NaN or infinite.
    """
    folder = find_run(str(run), "RUN")
    setting, acting = ("RUN", run) if on is None else ("--on", on)
    actor, config = asked_of(acting, setting, words, episodes=episodes, seed=seed, device=device)
    domain = domain_of(config)
    parties = Parties(folder, None if other is None else _other(other, domain), actor, which)
    _check(parties, domain)
    starts = Starts("kl", seed)
    with generators_kept():
        seed_generators(derived_seed(seed, starts.use))
        waves, notes = domain.function("between")(
            parties,
            config,
            starts=starts,
            size=Size(episodes or domain.plays),
            device=device_of(device),
        )
        visited: list[Visited] = list(waves)
    return _told(parties, domain, visited, notes)


def _told(
    parties: Parties, domain: Domain, visited: Sequence[Visited], notes: Sequence[str]
) -> PolicyKL:
    found = [episode for wave in visited for episode in wave.episodes]
    labels = ("policy", "reference") if parties.other is None else ("run", "other")
    states = {parties.run: labels[0], parties.other: labels[1]}.get(parties.on, str(parties.on))
    return PolicyKL(
        {
            f"{name.format(*labels)} on {states}": distance([each[key] for each in found])
            for key, name in NAMES.items()
            if key in found[0]
        },
        domain,
        episodes=len(found),
        states=sum(each["reverse"].size for each in found),
        cut=sum(wave.cut for wave in visited),
        notes=notes,
    )


def distance(values: Sequence[np.ndarray]) -> Distance:
    """One divergence from its values in the states of each episode.

    Raises:
        NonFiniteError: one of them is NaN or infinite.
    """
    mean, error = mean_over_states(values)
    sums = np.array([each.sum() for each in values])
    episode = int(np.argmax([each.max() for each in values]))
    step = int(values[episode].argmax())
    median, q90, q99 = map(float, np.quantile(np.concatenate(values), (0.5, 0.9, 0.99)))
    return Distance(
        mean,
        error,
        median,
        q90,
        q99,
        float(values[episode][step]),
        episode,
        step,
        float(sums.mean()),
        None if error is None else float(sums.std(ddof=1) / np.sqrt(len(sums))),
    )


def _other(other: str | Path, domain: Domain) -> Path:
    """Another run's folder, or, for language, that of a model."""
    path = Path(other).expanduser()
    of_model = domain.name == LANGUAGE and (path / "config.json").is_file()
    if of_model and not (path / "manifest.json").is_file():
        return path
    return find_run(str(other), "--to")


def _check(parties: Parties, domain: Domain) -> None:
    """All parties are of one domain; without another there is a reference."""
    for setting, path in (("RUN", parties.run), ("--to", parties.other)):
        if path is None or not (path / "manifest.json").is_file():
            continue
        config: JobConfig = stored_config(path)
        if config.domain != domain.name:
            raise ConfigError(
                f"{setting}={path}: is a {config.domain} run, and the states are those of a "
                f"{domain.name} run; give runs of one kind"
            )
    if parties.other is None and not stored_config(parties.run).has_reference:
        raise ConfigError(f"RUN={parties.run}: has no reference (kl=none); name another with --to")
