"""``logger=wandb``: logs each job to a wandb run, offline if the server does not accept it."""

from __future__ import annotations

import configparser
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from klrl.base.errors import ConfigError, Interrupted, first_line
from klrl.base.files import expanded, read_plain, refuse_link
from klrl.base.text import escaped
from klrl.config import WandbConfig
from klrl.config.identity import identity
from klrl.domains import Domain
from klrl.runs.folder import read_manifest
from klrl.runs.loggers import LoggedRun, Logger, Samples, Video
from klrl.runs.metrics import Row, metrics_of
from klrl.runs.resume import stored_config
from klrl.runs.rows import read_rows

#: Time limits in seconds: for wandb's server to accept a new run, and to receive the last uploads.
_INIT_SECONDS, _FINISH_SECONDS = 20.0, 120.0


class _WandbLogger(Logger):
    """Logs rows to a wandb run, against frames or samples."""

    part = "wandb"

    def __init__(self, run: Any, axis: str) -> None:
        self._run, self._axis = run, axis
        self._table: dict[str, object] = {}

    def log(self, row: Row) -> None:
        self._run.log({**row, **self._table})
        self._table = {}

    def log_samples(self, samples: Samples) -> None:
        """Make a table of responses, which :meth:`log` logs with the next row."""
        import wandb

        names = list(samples[0])
        # Convert lists to text, since a column must have a single type.
        rows = [
            [json.dumps(x) if isinstance(x := sample[n], list | dict) else x for n in names]
            for sample in samples
        ]
        self._table = {"samples_shown": wandb.Table(columns=names, data=rows)}

    def log_video(self, video: Video, at: int) -> None:
        import wandb

        film = video.mp4 or video.gif
        shown = wandb.Video(str(film), format=film.suffix[1:])
        self._run.log({self._axis: at, video.name: shown})


@contextmanager
def wandb_run(config: WandbConfig, logged: LoggedRun) -> Iterator[Sequence[Logger]]:
    """``logger=wandb``: open a wandb run; an exception in the context marks it as failed.

    Without a server, the run is logged offline. If wandb itself fails, the job runs without it.
    """
    run = logged.guard.call(_WandbLogger.part, _open_run, config, logged)
    # Not `with run`: wandb would print its own traceback, even for Ctrl-C.
    code = 1
    try:
        yield () if run is None else (_WandbLogger(run, logged.domain.axis),)
        code = 0
    except Interrupted as stop:
        code = stop.exit_code
        raise
    finally:
        if run is not None and not logged.guard.has_failed(_WandbLogger.part):
            _finish(run, code, config, logged)
        if logged.guard.has_failed(_WandbLogger.part):
            _end_service()


#: Sweeps of this process that wandb's server has failed; their later runs are logged offline.
_failed_sweeps: set[str | None] = set()


def _finish(run: Any, code: int, config: WandbConfig, logged: LoggedRun) -> None:
    """End a wandb run, and wait for its uploads; a failure does not end the job."""
    online, log = not (run.offline or run.disabled), Path(run.settings.log_internal)
    if online:
        waiting = f"waiting for wandb's uploads, at most {_FINISH_SECONDS:.0f} s"
        logged.guard.call("progress", print, waiting, flush=True)
    try:
        if logged.rows is not None:
            _close(run, config, logged.folder, logged.rows(), logged.domain)
        run.finish(exit_code=code)
        # ``finish`` does not raise if the server refused rows, as by 401.
        for line in log.read_text("utf-8").splitlines() if online and log.is_file() else ():
            if '"level":"ERROR+4"' in line:
                raise OSError(json.loads(line)["msg"])
    except Exception as error:
        _failed_sweeps.add(logged.group)
        instead = "metrics.jsonl has all rows; wandb sync uploads them later"
        logged.guard.failed(_WandbLogger.part, error, instead)


#: What an artifact has of a run's folder: enough to evaluate, resume and report the run.
_FILES = (".hydra/*", "checkpoints/**/*", "curves.png", "manifest.json", "metrics.jsonl")


def _close(
    run: Any, config: WandbConfig, folder: Path, rows: Sequence[Row], domain: Domain
) -> None:
    """Add the best scores to the summary, next to the last ones; log the artifact."""
    scores = [name for name, each in metrics_of(domain).items() if each.panel == "score"]
    values = {name: [row[name] for row in rows if name in row] for name in scores}
    run.summary.update({f"best/{name}": max(of) for name, of in values.items() if of})
    if config.artifacts:
        import wandb

        artifact = wandb.Artifact(f"run-{run.id}", "model")
        # Immutable: wandb uploads the files themselves, and makes no copy.
        for path in filter(Path.is_file, (path for each in _FILES for path in folder.glob(each))):
            name = str(path.relative_to(folder))
            artifact.add_file(str(path), name=name, policy="immutable", skip_cache=True)
        run.log_artifact(artifact)


def choices_of(settings: Mapping[str, Any]) -> list[str]:
    """List a run's task and choices, for wandb's tags: ``pendulum``, ``klpen``, ``retrieve``."""
    task = settings["env"].get("id") or settings["env"]["name"]
    groups = ("loss", "kl", "reference", "controller", "advantage")
    return [re.sub(r".*/|-v\d+$", "", task).lower(), *(settings[each]["name"] for each in groups)]


def run_name(settings: Mapping[str, Any], swept: str = "") -> str:
    """Name a run by its choices: ``pendulum-klpen-kl0.1-s0``.

    ``swept``: a job's name in a sweep, such as ``optim.lr=0.1,seed=0``; what the choices lack of it
    is added.
    """
    task, loss, kl, *_ = choices_of(settings)
    coef, seed = settings["kl"].get("coef"), settings["seed"]
    named = [] if kl == "none" else ["klauto" if coef is None else f"kl{coef:g}"]
    said = ("env", "loss", "kl.coef", "seed")
    more = [each for each in swept.split(",") if each.partition("=")[0] not in (*said, "")]
    return "-".join([task, loss, *named, f"s{seed}", *more])[:128]


def _open_run(config: WandbConfig, logged: LoggedRun) -> Any:
    """Open a wandb run, offline if the server does not accept it; define the run's metrics."""
    mode = wandb_mode(config.mode)
    try:
        if mode == "online" and logged.group is not None and logged.group in _failed_sweeps:
            raise OSError("failed an earlier run of this sweep")
        run = _init(config, logged, mode)
    except Exception as error:
        if mode != "online":
            raise
        _end_service()
        _failed_sweeps.add(logged.group)
        logged.guard.failed("wandb's server", error, "logs offline; wandb sync uploads it later")
        run = _init(config, logged, "offline")
    if logged.note is not None and run.id != logged.run_id:  # a wandb agent chose the id
        logged.note(wandb_id=run.id)
    axis = logged.domain.axis
    for metric in metrics_of(logged.domain).values():
        step = None if metric.name == axis else axis
        # Hide counts, most of which are straight lines, standard errors, and times of parts.
        hidden = metric.digits == 0 or metric.name.endswith("_se") or metric.title[:8] == "time of "
        run.define_metric(metric.name, step_metric=step, hidden=hidden)
    run.define_metric("*", step_metric=axis)  # for the table of responses, which is not declared
    if not run.starting_step:
        # Offline, a resumed run has a new file. Its upload replaces those before, so it starts with
        # the rows that are stored; a server that has the run has them.
        for row in read_rows(logged.folder / "metrics.jsonl"):
            run.log(row)
    return run


def _init(config: WandbConfig, logged: LoggedRun, mode: Any) -> Any:
    import wandb

    folder, settings = logged.folder, logged.settings
    refuse_link(folder / "wandb")
    manifest, job = read_manifest(folder), identity(stored_config(folder))
    about = {"version": manifest["klrl"], "argv": manifest["argv"], "identity": job.settings}
    return wandb.init(
        project=config.project,
        entity=config.entity,
        tags=list(dict.fromkeys([*choices_of(settings), *config.tags])),
        group=config.group or logged.group,
        notes=config.notes,
        job_type="train",
        name=run_name(settings, folder.name if logged.group else ""),
        id=logged.run_id,
        resume="allow",
        # Absolute, since wandb's service, one per process, may run in a different folder.
        dir=str(folder.resolve()),
        config={**settings, "klrl": {**about, "numerics": job.numerics}},
        mode=mode,
        settings=wandb.Settings(
            base_url=wandb_server(),
            disable_git=True,
            silent=True,
            console="off",
            init_timeout=_INIT_SECONDS,
            finish_timeout=_FINISH_SECONDS,
            finish_timeout_raises=True,
        ),
    )


def _end_service() -> None:
    """End wandb's service, which otherwise keeps the run's id in use and prints a traceback."""
    import wandb

    with suppress(Exception):
        wandb.teardown()


def check_wandb(logger: WandbConfig) -> None:
    """Refuse settings that ``wandb.init`` would refuse, before the run starts."""
    mode = os.environ.get("WANDB_MODE")
    if logger.mode == "auto" and mode not in (None, "", "online", "offline", "disabled"):
        raise ConfigError(f"WANDB_MODE={mode}: choose online, offline or disabled, or unset it")
    server = wandb_server()
    if wandb_mode(logger.mode) == "online" and not has_wandb_key(server):
        raise ConfigError(
            "logger.mode=online: there is no wandb key; run wandb login, set WANDB_API_KEY, "
            "or choose logger.mode=offline"
        )
    wrong = sorted(set(logger.project) & set("/\\#?%:"))
    if wrong or not logger.project or len(logger.project) > 128:
        raise ConfigError(
            f"logger.project={logger.project}: give 1 to 128 characters without / \\ # ? % :"
        )


def wandb_mode(mode: str) -> Any:
    """Resolve wandb's mode: ``auto`` is WANDB_MODE if set, else online with a key, else offline."""
    if mode != "auto":
        return mode
    given = os.environ.get("WANDB_MODE")
    return given or ("online" if has_wandb_key(wandb_server()) else "offline")


def wandb_server() -> str:
    """Return the URL of the user's wandb server; refuse a current folder that would change it."""
    # When wandb starts, it calls git in the current folder's repository, which may be a stranger's.
    os.environ["WANDB_DISABLE_GIT"] = "true"
    from wandb import Settings

    default, allowed = Settings(), {"project", "entity", "mode", "anonymous", "disabled"}
    home = expanded(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb") / "settings"
    user, folder = _settings_in(home), _settings_in(Path(default.settings_workspace))
    server = os.environ.get("WANDB_BASE_URL") or user.get("base_url") or default.base_url
    file = escaped(default.settings_workspace)
    for key, value in folder.items():
        if key not in allowed and (key, value.rstrip("/")) != ("base_url", server.rstrip("/")):
            raise ConfigError(
                f"{file}: sets {escaped(f'{key}={value}')}, which may send your wandb key "
                "elsewhere; remove it or, if this server is yours, set WANDB_BASE_URL to it"
            )
    return server


def _settings_in(file: Path) -> dict[str, str]:
    """Read a settings file of wandb, {} if there is none."""
    from wandb.sdk.lib.settings_file import SettingsFiles

    try:
        if os.path.exists(file):  # noqa: PTH110 - Path.exists raises where a folder is unreadable
            read_plain(file)
        return SettingsFiles(global_settings=None, local_settings=file).all()
    except (OSError, ValueError, configparser.Error) as error:
        told = f"{escaped(str(file))}: cannot be read ({first_line(error)})"
        raise ConfigError(f"{told}; fix or remove it") from error


def has_wandb_key(server: str) -> bool:
    """Return whether wandb finds a key for its server; refuse a malformed key."""
    from wandb.errors import AuthenticationError
    from wandb.sdk.lib.wbauth import authenticate_session

    try:
        found = authenticate_session(host=server, source="klrl", prompt=False, update_session=False)
    except AuthenticationError as error:
        raise ConfigError(
            f"wandb's key for {server}: {first_line(error).rstrip('.')}; fix it, or set "
            "logger.mode=offline"
        ) from error
    return found is not None
