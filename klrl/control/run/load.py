"""Load trained policies from a run folder, for the run's own task or a changed task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from klrl.base.errors import ConfigError
from klrl.base.files import expanded
from klrl.config import (
    CheckpointReferenceConfig,
    Config,
    CustomEnvConfig,
    CustomReferenceConfig,
    JobConfig,
    OwnPart,
    ReferenceConfig,
)
from klrl.config.checks import typed_choice
from klrl.config.compose import job_config
from klrl.config.given import Given
from klrl.config.own import typed_args
from klrl.config.own.parts import parts_in
from klrl.config.own.trust import check_known
from klrl.control.env.copies import VectorGymEnv, make_copies
from klrl.control.policy.actor import make_agent
from klrl.control.policy.networks import Agent
from klrl.control.policy.own import own_reference
from klrl.control.run.job_checks import check_env, control_config, make_checked, policy_kind
from klrl.kl.reference import Loaded
from klrl.runs.checkpoint import load_component
from klrl.runs.find import find_run
from klrl.runs.folder import RunFolder
from klrl.runs.machine import check_device
from klrl.runs.resume import allowed, stored_config
from klrl.train.policy_kl import Parties

#: The setting that names a reference's run.
_PATH = "reference.path"

#: With ``env=gym``, the settings that an evaluation on a changed task may override.
_TASK = ("env.id", "env.kwargs")
#: With ``env=custom``, the settings that such an evaluation may override.
_OWN_TASK = ("env.args",)


def trained_actor(run: str | Path, which: str = "last", device: str = "cpu") -> Any:
    """Load the policy of a control run; arguments as in :func:`klrl.api.load_policy`."""
    return trained_agent(run, which, device).actor


def trained_agent(run: str | Path, which: str = "last", device: str = "cpu") -> Agent:
    """Load policy and critic of a run, frozen; arguments as in :func:`klrl.api.load_policy`."""
    folder = find_run(str(run), "run")
    check_device(device)
    make_checked(control_config(folder).env).close()
    agent = _described_agent(folder, None)
    load_component(folder, which, "agent", agent.modules, torch.device(device))
    agent.to(torch.device(device)).modules.requires_grad_(False).eval()
    return agent


def trained_reference(run: Path, which: str, device: str) -> Agent:
    """Load a checkpoint's reference, frozen, as the policy of an agent with an untrained critic."""
    agent = _described_agent(run, RunFolder(run).manifest.get("reference"))
    if isinstance(part := control_config(run).reference, CustomReferenceConfig):
        agent.actor = own_reference("reference", part, agent)
    # No ``say``: damaged checkpoint entries were reported when the policy was loaded.
    load_component(run, which, "reference", agent.actor, torch.device(device), say=lambda _: None)
    agent.modules.to(device).requires_grad_(False).eval()
    return agent


def _described_agent(run: Path, described: Mapping[str, Any] | None) -> Agent:
    """Build networks for a run's task, from ``described`` or, if that is None, its settings."""
    config = control_config(run)
    env = make_copies(config.env, seed=0, num_envs=1)
    checked = None if described is None else str(run)
    if checked and isinstance(config.reference, CheckpointReferenceConfig):
        checked = config.reference.path  # the run whose code the user may have named or trusted
    agent = agent_like(described or describe_policy(config), env, checked)
    env.close()
    return agent


def load_agent(run: str, which: str, agent: Agent) -> None:
    """``actor.init``: load a trained run's weights, including normaliser and critic."""
    folder = find_run(run, "actor.init")
    load_component(folder, which, "agent", agent.modules, torch.device("cpu"))


def describe_policy(config: Config) -> dict[str, object]:
    """Return the settings that, with the environment's specs, determine a run's networks."""
    described = {"actor": asdict(config.actor), "normalize": config.env.normalize_observation}
    return described | {"mixed": config.learner.dtype == "mixed"}


def agent_like(described: Mapping[str, Any], env: VectorGymEnv, run: str | None = None) -> Agent:
    """Build networks with fresh weights from a description by :func:`describe_policy`.

    ``run``: the described run; if given, refuse its custom code unless the user trusts it.
    """
    actor = typed_choice("actor", described)
    if run is not None:
        check_known(expanded(run), parts_in("actor", actor))
    how = {"normalize": described["normalize"], "mixed": described.get("mixed", False)}
    return make_agent(actor, env, separate=False, **how)


def load_reference(
    config: ReferenceConfig,
    agent: Agent,
    env: VectorGymEnv,
    described: Mapping[str, Any] | None,
) -> Loaded:
    """Load pi_ref from a different run, with its normaliser, or make it of the user's policy.

    Also returns the description of a different run's networks. ``described``: on resume, the
    description in this run's manifest. Then only networks are built, since their weights are in
    this run's checkpoint; the other run's folder need not exist.
    """
    if isinstance(config, CustomReferenceConfig):
        return own_reference("reference", config, agent), None
    assert isinstance(config, CheckpointReferenceConfig)
    path, folder = config.path, None
    if described is None:
        folder = find_run(path, _PATH)
        described = describe_policy(control_config(folder, _PATH))
    reference = agent_like(described, env, path if folder is None else None)
    if reference.family.name != agent.family.name:
        raise ConfigError(
            f"{_PATH}={path}: its policy is {reference.family.name}, but this run's is "
            f"{agent.family.name}; choose actor={reference.family.name}"
        )
    if folder is not None:
        load_component(folder, config.which, "agent", reference.modules, torch.device("cpu"))
    return reference.actor, dict(described)


def load_parties(
    parties: Parties, config: Config, device: torch.device
) -> tuple[Agent, Agent, Agent]:
    """Load the policies that :func:`klrl.train.policy_kl.kl_between` compares: two and the player.

    Raises:
        ConfigError: the policies cannot act in the states of ``parties.on``.
    """
    _check_kinds(parties, config)
    load = partial(trained_agent, which=parties.which, device=str(device))
    if isinstance(parties.run, OwnPart):
        policy = agent_of_code("RUN", parties.run, config).to(device)
    else:
        policy = load(parties.run)
    other = policy
    if isinstance(parties.other, OwnPart):
        other = replace(policy, actor=own_reference("other", parties.other, policy).to(device))
    elif parties.other is None:
        assert isinstance(parties.run, Path)
        other = trained_reference(parties.run, parties.which, str(device))
    elif parties.other != parties.run:
        other = load(parties.other)
    if parties.on in (parties.run, parties.other):
        return policy, other, policy if parties.on == parties.run else other
    assert isinstance(parties.on, Path)
    return policy, other, load(parties.on)


def _check_kinds(parties: Parties, config: Config) -> None:
    """Require that the stored policies can act in the states of ``parties.on``."""
    acts = config if isinstance(parties.on, OwnPart) else control_config(parties.on)
    on = policy_kind(config.env, acts.actor)
    for setting, path in (("RUN", parties.run), ("other", parties.other)):
        if not isinstance(path, Path):
            continue
        stored = control_config(path)
        kind = policy_kind(stored.env, stored.actor)
        if setting == "RUN":  # compare with this policy's bounds, not with the task's
            on = on._replace(bounds=kind.bounds)
        for name, theirs, here in kind.differences(on):
            told = f"its {name} is {theirs}, but this comparison requires {here}"
            raise ConfigError(f"{setting}={path}: {told}; give runs with the same {name}")


def control_on_task(run: Path, stored: Config, overrides: Sequence[str]) -> JobConfig:
    """Return a control run's settings with a changed task; see :mod:`klrl.runs.resume`."""
    keys = _OWN_TASK if isinstance(stored.env, CustomEnvConfig) else _TASK
    checked = allowed(overrides, keys)
    # A different environment might refuse the stored arguments.
    reset = [Given("env.kwargs={}")] if any(each.key == "env.id" for each in checked) else []
    config = stored_config(run, [*reset, *checked], changeable=keys)
    assert isinstance(config, Config)
    if isinstance(config.env, CustomEnvConfig):
        config.env.args = typed_args("env", config.env)
    check_env(config.env, config.actor, frozenset())
    kind, task = policy_kind(stored.env, stored.actor), policy_kind(config.env, stored.actor)
    for name, own, others in kind.differences(task._replace(bounds=kind.bounds)):
        raise ConfigError(
            f"{' '.join(overrides)}: its {name} is {others}, but the policy's is {own}; "
            f"give a task with the same {name}"
        )
    return config


def job_of_code(policy: str | Path, words: Sequence[str]) -> Config:
    """Return the job in which code or an ONNX file acts in the environment that ``words`` name."""
    if not any(Given(word).group == "env" for word in words):
        raise ConfigError(f"{policy}: has no task; name its environment, as in env=hopper")
    config = job_config([*words, "kl=none", "logger=none"])
    if not isinstance(config, Config):
        raise ConfigError(f"{policy}: code and ONNX files act in control; give a control task")
    check_env(config.env, config.actor, frozenset())
    return config


def agent_of_code(setting: str, part: OwnPart, config: Config) -> Agent:
    """Make the agent whose policy is the user's; its critic is untrained."""
    env = make_copies(config.env, seed=0, num_envs=1)
    agent = make_agent(config.actor, env, normalize=False, separate=False)
    env.close()
    return replace(agent, actor=own_reference(setting, part, agent))
