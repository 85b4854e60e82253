"""klrl from Python: what the command line does, as functions.

    import klrl

    run = klrl.run("env=pendulum", "kl.coef=0.1")
    run.rows[-1]["kl/ref/exact"]; run.evaluate(episodes=100).row; run.figure()

Nothing here imports torch before it is needed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from klrl.base.errors import ConfigError, first_line
from klrl.config import GROUPS, LANGUAGE, JobConfig
from klrl.config.checks import check_config, check_device_name, to_config
from klrl.config.compose import allow_env_kwargs, check_config_dir, check_words, job_config, keys
from klrl.config.overrides import is_own, key_of, quote_paths, value_of
from klrl.config.stored import typed
from klrl.domains import domain_of, recorded_domain
from klrl.runs.find import find_manifest, find_run
from klrl.runs.folder import RunFolder
from klrl.runs.loggers import read_rows
from klrl.runs.machine import check_machine
from klrl.runs.metrics import final_return, last_recorded
from klrl.runs.resume import stored_config
from klrl.sweep.single import run_in_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from klrl.runs.metrics import Row
    from klrl.train.callbacks import Callback
    from klrl.train.evaluate import Evaluation

#: Hydra composes in state of the process's.
_composing = threading.Lock()


class Run(os.PathLike[str]):
    """A run folder, read when it is asked.

    Args:
        folder: the run's.

    Attributes:
        folder: the same.

    Raises:
        ConfigError: there is no run in it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = find_manifest(str(folder), "folder")

    def __fspath__(self) -> str:
        return str(self.folder)

    def __str__(self) -> str:
        """The folder, as 0.1.0's ``klrl.run`` returned it."""
        return str(self.folder)

    def __repr__(self) -> str:
        about = self.summary
        score = "" if about["return"] is None else f", return {about['return']:.5g}"
        return f"Run({str(self.folder)!r}: {about['status']}, {about['frames']:,} frames{score})"

    @property
    def config(self) -> JobConfig:
        """Its settings, typed."""
        return stored_config(self.folder)

    @property
    def manifest(self) -> dict[str, Any]:
        """What ``manifest.json`` says: versions, device, status, error."""
        return RunFolder(self.folder).manifest

    @property
    def rows(self) -> list[Row]:
        """One dictionary per iteration, as ``metrics.jsonl`` has them; see docs/runs.md."""
        metrics = RunFolder(self.folder).metrics
        return read_rows(metrics) if metrics.exists() else []

    @property
    def summary(self) -> dict[str, Any]:
        """``status``, ``frames`` (language: samples) done, and the last recorded values.

        ``return`` (of the last evaluation, else of training, else the mean reward),
        ``kl/ref/exact``, ``kl/ref/coef``, ``kl/old/exact``, ``kl/old/beta``: None where the run
        has none.
        """
        rows = self.rows
        axis = recorded_domain(self.manifest, rows[-1] if rows else {}).axis
        last = last_recorded(rows)
        names = ("kl/ref/exact", "kl/ref/coef", "kl/old/exact", "kl/old/beta")
        return {
            "status": RunFolder(self.folder).status,
            "frames": int(last.get(axis, 0)),
            "return": final_return(last),
            **{name: last.get(name) for name in names},
        }

    def policy(self, which: str = "last", device: str = "cpu") -> Any:
        """The trained policy, frozen; see :func:`klrl.api.load_policy`."""
        return load_policy(self.folder, which, device)

    def evaluate(self, episodes: int | None = None, *words: str, **how: Any) -> Evaluation:
        """Play the policy; arguments as :func:`klrl.train.evaluate.evaluate_run`.

        Args:
            episodes: how many; None: as the command line.
            words: another task, as in ``"env.kwargs.g=14"``.
            how: ``sampled``, ``which``, ``seed``, ``device``.

        Returns:
            ``returns`` (one per episode), ``row`` (``eval/return``, ``eval/return_std``).
        """
        from klrl.train.evaluate import evaluate_run

        if how.get("sampled") and self.config.domain != LANGUAGE:
            raise ConfigError("sampled=True: for language runs; a control policy plays its mode")
        return evaluate_run(self.folder, words, episodes=episodes, **how)

    def figure(self) -> Figure:
        """Return, KLs and coefficients, as ``curves.png`` has them."""
        from klrl.runs.curves import curves_figure

        rows = self.rows
        domain = recorded_domain(self.manifest, rows[-1] if rows else {})
        return curves_figure(rows, f"{self.config.title}  {self.folder.name}", domain)


def compose(*overrides: str, config_dir: str | Path | None = None) -> JobConfig:
    """The settings of a job, typed and checked; change them and give them to :func:`run`.

    Args:
        overrides: words as on the command line, as in ``"env=hopper"``, ``"kl.coef=0.1"``.
        config_dir: a folder with choices of your own.

    Raises:
        ConfigError: a word or a value is refused.
    """
    words = _words(overrides, config_dir)
    with _composing:
        return job_config(words, str(config_dir) if config_dir else None)


def run(
    *overrides: str | JobConfig | Mapping[str, Any],
    folder: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    config_dir: str | Path | None = None,
) -> Run:
    """Train one policy and record the run, as ``klrl`` on the command line does.

    It seeds torch's random generator, which is the process's, and leaves it so.

    Args:
        overrides: words as on the command line; or one config: from :func:`compose`, from Hydra,
            or as a run stored it in ``.hydra/config.yaml``.
        folder: the run folder; default a new one below ``outputs/``.
        callbacks: hooks of the loop, see :class:`klrl.train.callbacks.Callback`.
        config_dir: a folder with choices of your own, for words.

    Returns:
        The run.

    Raises:
        ConfigError: something cannot be run; nothing was recorded.
        RewardError: a reward function failed; the last good checkpoint is kept.
        NonFiniteError: a value was NaN or infinite; the last good checkpoint is kept.
        Interrupted: Ctrl-C, SIGTERM or ``training.stop()`` came; the checkpoint is written.
    """
    _check_callbacks(callbacks)
    words: list[str] | None = None
    if len(overrides) == 1 and isinstance(overrides[0], JobConfig):
        config = check_config(overrides[0])
    elif len(overrides) == 1 and _is_config(overrides[0]):
        config = _typed(overrides[0])
    else:
        words = _words(overrides, config_dir)
        config = compose(*words, config_dir=config_dir)
    check_machine(config, keys(words or ()))
    given = None if folder is None else str(folder)
    return Run(run_in_folder(given, config, words, setting="folder", callbacks=callbacks))


def load_run(folder: str | Path) -> Run:
    """A run that was made before.

    Raises:
        ConfigError: there is no run in the folder.
    """
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"load_run: {folder!r} is no path; give a run folder")
    return Run(Path(folder))


def _is_config(given: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether something is a config of Hydra's, or a stored one, and not words in a dictionary."""
    stored = isinstance(given, Mapping) and isinstance(given.get("env"), Mapping)
    return stored or isinstance(given, DictConfig)


def _typed(settings: Mapping[str, Any]) -> JobConfig:
    """A config of Hydra's, or a stored one, typed.

    Raises:
        ConfigError: a value is refused.
    """
    try:
        cfg = settings if isinstance(settings, DictConfig) else OmegaConf.create(dict(settings))
        if not any(is_dataclass(OmegaConf.get_type(cfg.get(group))) for group in GROUPS):
            cfg = typed(cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=True)))
        return to_config(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'config'}: {first_line(error)}") from error


def _check_callbacks(callbacks: Any) -> None:
    """Refuse what has no hooks, a class among it, before there is a folder."""
    from klrl.train.callbacks import Callback

    listed = callbacks if isinstance(callbacks, Iterable) else [callbacks]
    wrong = [each for each in listed if not isinstance(each, Callback)]
    if wrong or listed is not callbacks:
        raise ConfigError(
            f"callbacks={_shown(callbacks)}: give a list of klrl.Callback objects, as in "
            "callbacks=[MyCallback()]"
        )


def _words(given: Sequence[Any], config_dir: str | Path | None) -> list[str]:
    """Words as Hydra's grammar wants them.

    Raises:
        ConfigError: something that is no word, or no setting of a single job.
    """
    for word in given:
        if not isinstance(word, str):
            raise ConfigError(
                f"{_shown(word)}: not a setting; give words, as in klrl.run('env=pendulum', "
                "'kl.coef=0.1'), or one config from klrl.compose"
            )
    words = [str(word) for word in given]
    folder = str(config_dir) if config_dir else None
    check_config_dir(folder)
    check_words(words, folder)
    for word in words:
        key = key_of(word)
        if key == "resume" and value_of(word) not in ("", "null"):
            raise ConfigError(f"{word}: goes on with a run; use klrl {word} on the command line")
        if is_own(word) or key.startswith("hydra"):
            raise ConfigError(f"{word}: only the command line reads it; drop it, or see folder=")
    return quote_paths(allow_env_kwargs(words))


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def load_policy(run: str | Path, which: str = "last", device: str = "cpu") -> Any:
    """The policy of a run, frozen.

    Args:
        run: the run folder.
        which: last or best.
        device: where to put it.

    Returns:
        Of a control run a ``ProbabilisticTensorDictSequential``: observation in, action out, with
        its observation normaliser. Of a language run a :class:`klrl.language.model.CausalLM`: the
        model of ``transformers`` (a ``PeftModel`` with LoRA) and its tokenizer.

    Raises:
        ConfigError: no such run, checkpoint or device.
    """
    check_device_name(device)
    folder = find_run(str(run), "run")
    return domain_of(stored_config(folder)).load(folder, which, device)
