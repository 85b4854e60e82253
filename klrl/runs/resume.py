"""Reads the settings of a stored run, and applies the overrides of a resume or of another task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from klrl.base.errors import ConfigError
from klrl.base.files import expanded
from klrl.base.text import warn
from klrl.config import JobConfig
from klrl.config.checks import check_plain, checked, plain
from klrl.config.given import Given, quoted
from klrl.config.identity import settings_hash
from klrl.config.overrides import explained, parse
from klrl.config.own import own_parts
from klrl.config.own.trust import NAMED, check_known
from klrl.domains import domain_of
from klrl.runs.find import find_run
from klrl.runs.folder import BrokenRun, RunFolder, read_settings, run_id
from klrl.runs.one_run import check_one_run
from klrl.runs.owner import refuse_owned

#: Settings that a resume may change; all others define the run. After running out of memory, a run
#: can resume with smaller micro-batches.
CHANGEABLE = (
    *("frames", "device", "threads", "env.threads", "rank_timeout", "eval", "checkpoint.every"),
    *("learner.micro_batch", "learner.tokens_per_batch"),
)

#: Settings that are dictionaries with arbitrary keys.
_OPEN = ("env.kwargs", "env.args")


def resumed_config(path: str, given: Sequence[Given]) -> tuple[Path, JobConfig]:
    """Return a resumed run's folder and settings; ``given`` may set :data:`CHANGEABLE` keys."""
    find_run(path, "resume")
    run = expanded(path)
    refuse_owned(run, f"resume={run}")
    check_one_run(RunFolder(run), f"resume={run}")
    if edited := edited_settings(run):
        raise ConfigError(f"{run}: {edited}; restore that file, or start a new run")
    config, done = stored_config(run, given), RunFolder(run).checkpointed
    if done > config.iterations * config.frames_per_iteration:
        told = f"the run already has {done:,}; give at least {done}"
        raise ConfigError(f"frames={config.frames}: {told}")
    return run, config


def edited_settings(run: Path) -> str | None:
    """Return an error message if a run's stored settings were edited, else None.

    Compares their hash with ``config_hash`` and ``next_hash`` in the manifest: a resume stores
    ``next_hash``, the settings and ``config_hash`` in this order, and may be killed in between.
    """
    manifest = RunFolder(run).manifest if RunFolder(run).exists else {}
    known = [manifest[key] for key in ("config_hash", "next_hash") if key in manifest]
    if not known or settings_hash(stored_config(run)) in known:
        return None
    return "its .hydra/config.yaml has changed since the run began"


def warn_edited(setting: str, path: str, run: Path) -> None:
    """Warn if someone edited the settings of a run whose policy a job loads."""
    if edited := edited_settings(run):
        warn(f"{setting}={path}: {edited}")


def stored_config(
    run: Path, given: Sequence[Given] = (), *, changeable: Sequence[str] = CHANGEABLE
) -> JobConfig:
    """Read the typed settings of a run from its ``.hydra/config.yaml``, and apply ``given``.

    The overrides in ``given`` may set keys in ``changeable``, and keys below those.
    """
    if RunFolder(run).exists and run_id(run) is None:
        raise ConfigError(
            f"{run}: its manifest.json has no run id: klrl before 0.3.0 made it, or it is "
            "broken; use the klrl that made it"
        )
    try:
        settings = read_settings(run)
    except BrokenRun as error:
        raise ConfigError(f"{run}: {error}; give another run") from error
    check_plain(f"{run}: .hydra/config.yaml", settings)
    try:
        config = checked(settings)
    except ConfigError as error:
        told = "the run was made by another version of klrl"
        raise ConfigError(f"{run}: {error}; {told}") from error
    check_known(run, own_parts(config), config.env)
    if not given:
        return config
    cfg = OmegaConf.create(settings)
    with explained(given, None):
        for each in given:
            _check_changeable(each, changeable)
            OmegaConf.update(cfg, each.key, each.parsed.value(), merge=False)
        changed = checked(plain(cfg))
    for (_, part), (_, known) in zip(own_parts(changed), own_parts(config), strict=True):
        part.path = known.path
    if {"env.id", "env.reward"} & {each.key for each in given}:
        changed.env.sources = {}
    return changed


def _check_changeable(given: Given, changeable: Sequence[str]) -> None:
    key = given.key
    fixed = not any(key == k or key.startswith(f"{k}.") for k in changeable)
    if fixed or given.startswith("~"):
        raise ConfigError(
            f"{given}: a resumed run keeps it; only {', '.join(changeable)} may change"
        )
    if given.parsed.is_sweep_override():
        raise ConfigError(f"{given}: give one value")


def config_on_task(run: Path, overrides: Sequence[str]) -> JobConfig:
    """Return the settings of a stored run, changed by overrides of its task.

    In control, overrides may set ``env.id`` (this clears ``env.kwargs``) and ``env.kwargs.*`` or,
    for ``env=custom``, ``env.args.*``. In language, they may set the model, reward and prompts.
    """
    NAMED.update(overrides)
    own = stored_config(run)
    if not overrides:
        return own
    config: JobConfig = domain_of(own).function("on_task")(run, own, overrides)
    return config


def allowed(overrides: Sequence[str], keys: Sequence[str]) -> list[Given]:
    """Refuse overrides of keys outside ``keys``; return the others, ``env.id`` first."""
    for override in map(str, overrides):
        key = Given(override).key
        if "=" not in override or not any(key == k or key.startswith(f"{k}.") for k in keys):
            shown = ", ".join(f"{k}.*" if k in _OPEN else k for k in keys)
            raise ConfigError(f"{override}: evaluation cannot set it; give one RUN, then {shown}")
    return sorted(parse(map(quoted, overrides)), key=lambda each: each.key != "env.id")
