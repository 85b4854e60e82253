"""How far two control policies are apart in the states that one of them, or a third, visits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from klrl.base.errors import ConfigError
from klrl.config import Config
from klrl.control.acting import Array, make_acting
from klrl.control.actor import Agent
from klrl.control.distributions import Family, MultiCategorical
from klrl.control.evaluate import waves
from klrl.control.load import trained_agent, trained_reference
from klrl.control.preflight import MOST_JOINT, control_config, policy_kind
from klrl.kl.divergences import MEASURED
from klrl.train.evaluate import Starts
from klrl.train.policy_kl import Parties, Visited
from klrl.train.schedule import Size

#: Draws in each state where a divergence of Gaussians has no closed form.
DRAWS = 64


def distances(
    parties: Parties, config: Config, *, starts: Starts, size: Size, device: torch.device
) -> tuple[Iterator[Visited], list[str]]:
    """What :func:`klrl.train.policy_kl.kl_between` asks of control; ``config`` names the task."""
    _check_kinds(parties, config)
    place, which = str(device), parties.which
    policy = trained_agent(parties.run, which, place)
    if parties.other is None:
        other = trained_reference(parties.run, which, place)
    else:
        other = trained_agent(parties.other, which, place)
    known = {parties.run: policy, parties.other: other}
    player = known[parties.on] if parties.on in known else trained_agent(parties.on, which, place)
    names, notes = _names(policy.family)

    def visited() -> Iterator[Visited]:
        played = waves(lambda: _Watched(player, device), config.env, starts, size, sampled=True)
        for acting, scores, steps in played:
            seen = torch.from_numpy(np.stack(acting.seen)).to(device)
            each = (seen[:length, i] for i, length in enumerate(steps.tolist()))
            measured = [_measured(policy, other, names, states) for states in each]
            yield Visited(measured, scores.cut)

    return visited(), notes


class _Watched:
    """An :class:`klrl.control.acting.Acting` that keeps the observations of each step, [N, D]."""

    def __init__(self, agent: Agent, device: torch.device) -> None:
        acting = make_acting(agent, device)
        self.begin, self.action, self._sample = acting.begin, acting.action, acting.sample
        self.seen: list[Array] = []

    def sample(self, step: int, observation: Array) -> Array:
        self.seen.append(observation.copy())
        return self._sample(step, observation)


@torch.no_grad()
def _measured(policy: Agent, other: Agent, names: list[str], states: Tensor) -> dict[str, Array]:
    """The divergences in states [T, D], from the parameters in float64."""
    family = policy.family
    p, q = (
        dict(zip(family.param_keys, (x.double() for x in agent.policy_net(states)), strict=True))
        for agent in (policy, other)
    )
    noise = family.divergence_noise("js", p, DRAWS)
    return {
        name: family.divergence(name, p, q, None if name in ("reverse", "forward") else noise)
        .cpu()
        .numpy()
        for name in names
    }


def _names(family: Family) -> tuple[list[str], list[str]]:
    """Which divergences are measured, and a line where they are not exact, or are left out."""
    if isinstance(family, MultiCategorical) and math.prod(family.counts) > MOST_JOINT:
        many = f"{math.prod(family.counts)} joint actions, more than {MOST_JOINT}"
        return ["reverse", "forward"], [f"js and tv are left out: {many}"]
    drawn = "loc" in family.param_keys
    note = [f"js and tv by {DRAWS} draws in each state: theirs of Gaussians have no closed form"]
    return list(MEASURED), note if drawn else []


def _check_kinds(parties: Parties, config: Config) -> None:
    """The policies act on one task: they see the same, and choose among the same actions."""
    on = policy_kind(config.env, control_config(parties.on).actor)
    for setting, path in (("RUN", parties.run), ("--to", parties.other)):
        if path is None or path == parties.on:
            continue
        stored = control_config(Path(path))
        for name, theirs, here in policy_kind(stored.env, stored.actor).differences(on):
            raise ConfigError(
                f"{setting}={path}: its {name} is {theirs}, and {here} where the states are; give "
                "runs with the same"
            )
