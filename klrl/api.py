"""Python functions that train, load, evaluate and compare policies, as the command line does.

    import klrl

    run = klrl.run("env=pendulum", "kl.coef=0.1")
    run.rows[-1]["kl/ref/exact"]; run.evaluate(episodes=100).row; run.figure()

Importing this module does not import torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack, cast

from omegaconf import DictConfig, OmegaConf

from klrl.base.cache import trust as trust_run
from klrl.base.errors import ConfigError
from klrl.config import JobConfig
from klrl.config.checks import check_device_name, checked, to_config
from klrl.config.compose import job_config
from klrl.config.given import Given
from klrl.config.overrides import explained, flags, read
from klrl.config.own import complete
from klrl.domains import domain_of, recorded_domain
from klrl.runs.find import find_manifest, find_run
from klrl.runs.folder import RunFolder
from klrl.runs.machine import check_machine
from klrl.runs.resume import stored_config
from klrl.runs.returns import final_return, last_recorded
from klrl.runs.rows import read_rows
from klrl.train.start import run_in_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from pandas import DataFrame
    from tensordict.nn import ProbabilisticTensorDictSequential

    from klrl.language.model.pretrained import CausalLM
    from klrl.runs.metrics import Row
    from klrl.train.callbacks import Callback
    from klrl.train.policy_kl import PolicyKL
    from klrl.train.scores import Evaluation

    Policy: TypeAlias = ProbabilisticTensorDictSequential | CausalLM

#: A pandas.DataFrame where pandas is installed, else a dictionary of numpy's arrays.
Frame: TypeAlias = "DataFrame | dict[str, NDArray[Any]]"
#: Lets one thread at a time compose a config, since Hydra's state is global to the process.
_composing = threading.Lock()


class How(TypedDict, total=False):
    """Options for playing a policy."""

    which: str  # the checkpoint: last (default) or best
    seed: int  # seeds start states and samples; default 0
    device: str  # default cpu


class Run(os.PathLike[str]):
    """A run folder. Each access to a property reads the folder's files again.

    Raises:
        ConfigError: the folder contains no run.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = find_manifest(str(folder), "folder")

    def __fspath__(self) -> str:
        return str(self.folder)

    def __str__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        about = self.summary
        score = "" if about["return"] is None else f", return {about['return']:.5g}"
        return f"Run({str(self.folder)!r}: {about['status']}, {about['frames']:,} frames{score})"

    @property
    def config(self) -> JobConfig:
        """The run's stored settings."""
        return stored_config(self.folder)

    @property
    def manifest(self) -> dict[str, object]:
        """The contents of ``manifest.json``: versions, device, status, error."""
        return RunFolder(self.folder).manifest

    @property
    def rows(self) -> list[Row]:
        """The rows of ``metrics.jsonl``, one dictionary per iteration; see docs/runs.md.

        If the policy was evaluated before its first update, the first row is for iteration 0.
        """
        metrics = RunFolder(self.folder).metrics
        return read_rows(metrics) if metrics.is_file() else []

    @property
    def summary(self) -> dict[str, object]:
        """The run's ``status``, its ``frames`` (in language: samples) so far, and its last metrics.

        The metrics are ``return``, ``kl/ref/exact``, ``kl/ref/coef``, ``kl/old/exact`` and
        ``kl/old/beta``; a metric that the run has not recorded is None. ``return`` comes from the
        last evaluation, else from training episodes, else it is the mean reward.
        """
        rows = self.rows
        axis = recorded_domain(self.manifest).axis
        last = last_recorded(rows)
        names = ("kl/ref/exact", "kl/ref/coef", "kl/old/exact", "kl/old/beta")
        return {
            "status": RunFolder(self.folder).status,
            "frames": int(last.get(axis, 0)),
            "return": final_return(last),
            **{name: last.get(name) for name in names},
        }

    def frame(self) -> Frame:
        """Return :attr:`rows` as columns; NaN where a row lacks a metric."""
        return columns_of(self.rows)

    def _repr_html_(self) -> str:
        from klrl.report.tables import Table, as_html

        known = {name: value for name, value in self.summary.items() if value is not None}
        cells = {name: f"{x:.5g}" if isinstance(x, float) else str(x) for name, x in known.items()}
        return as_html(Table(("run", str(self)), [*cells.items()]))

    def policy(self, which: str = "last", device: str = "cpu") -> Policy:
        """Load the trained policy, frozen; see :func:`klrl.api.load_policy`."""
        return load_policy(self.folder, which, device)

    def evaluate(
        self,
        episodes: int | None = None,
        *overrides: str,
        sampled: bool = False,
        **how: Unpack[How],
    ) -> Evaluation:
        """Play the policy, as ``klrl evaluate`` does.

        Args:
            episodes: number of episodes or responses; None: the default of ``klrl evaluate``.
            overrides: changes to the task, as in ``"env.kwargs.g=14"``.
            sampled: sample actions or tokens as in training, instead of taking the likeliest.
            how: see :class:`How`.

        Returns:
            An object with ``returns``, one per episode that ended; ``row``, metrics such as
            ``eval/return`` and its standard error ``eval/return_se``; and ``line``, a summary.
        """
        from klrl.train.evaluate import evaluate_run

        return evaluate_run(self.folder, overrides, episodes=episodes, sampled=sampled, **how)

    def kl(
        self,
        other: str | Path | None = None,
        *overrides: str,
        on: str | Path | None = None,
        episodes: int | None = None,
        **how: Unpack[How],
    ) -> PolicyKL:
        """Measure divergences between this run's policy and another policy, as ``klrl kl`` does.

        Args:
            other: the other policy: a run folder, the folder of a language model, or for control
                ``module:name`` of your own policy. None: this run's reference.
            overrides: changes to the task, as in ``"env.kwargs.g=14"``.
            on: the run whose policy plays the episodes; None: this run. Divergences are measured
                in the states of these episodes.
            episodes: number of episodes or responses; None: the default of ``klrl kl``.
            how: see :class:`How`.

        Returns:
            An object with ``distances``, a dictionary whose keys are names such as
            ``KL(run||other) on run``; and ``row``, a dictionary with the same numbers.
        """
        from klrl.train.policy_kl import kl_between

        return kl_between(self.folder, other, overrides, on=on, episodes=episodes, **how)

    def figure(self) -> Figure:
        """Plot return, KLs and coefficients, as in the run's ``curves.png``."""
        from klrl.runs.curves import curves_figure

        rows = self.rows
        domain = recorded_domain(self.manifest)
        return curves_figure(rows, f"{self.config.title}  {self.folder.name}", domain)


def compose(*overrides: str, config_dir: str | Path | None = None) -> JobConfig:
    """Compose and check the settings of a job. You may change them, and pass them to :func:`run`.

    Args:
        overrides: as on the command line: ``"env=hopper"``, ``"kl.coef=0.1"``.
        config_dir: a folder with choices of your own, such as ``env/mine.yaml``.

    Raises:
        ConfigError: an override or the job is invalid.
    """
    given = _checked_overrides(overrides, config_dir)
    with _composing:
        return job_config(given, str(config_dir) if config_dir else None)


def run(
    *overrides: str | JobConfig | Mapping[str, object],
    folder: str | Path | None = None,
    callbacks: Iterable[Callback] = (),
    config_dir: str | Path | None = None,
) -> Run:
    """Train one policy and record the run, as ``klrl`` on the command line does.

    Training seeds the global random generators of Python, numpy and torch.

    Args:
        overrides: as on the command line; or a single config from :func:`compose`, from Hydra, or
            from the ``.hydra/config.yaml`` of a run.
        folder: the run folder; default: a new folder below ``outputs/``.
        callbacks: objects that the training loop calls, :class:`klrl.train.callbacks.Callback`.
        config_dir: as in :func:`compose`.

    Raises:
        ConfigError: the job is invalid.
        RewardError: a reward function failed; the last good checkpoint is kept.
        NonFiniteError: a value was NaN or infinite; the last good checkpoint is kept.
        Interrupted: Ctrl-C, SIGTERM or a callback's ``training.stop()`` stopped the run.
    """
    hooks = _checked_callbacks(callbacks)
    given: list[Given] | None = None
    argv: list[str] | None = None
    only = overrides[0] if len(overrides) == 1 else None
    if isinstance(only, JobConfig):
        config = checked(asdict(only))
    elif isinstance(only, Mapping) and isinstance(only.get("env"), Mapping):
        config = _typed(only)
    else:
        given = _checked_overrides(overrides, config_dir)
        config = compose(*given, config_dir=config_dir)
        argv = ["python", "-m", "klrl", *flags(str(config_dir) if config_dir else None), *given]
    complete(config)
    check_machine(config, given or ())
    path = None if folder is None else str(folder)
    made = run_in_folder(path, config, given, setting="folder", argv=argv, callbacks=hooks)
    return Run(made)


def load_run(folder: str | Path, *, trust: bool = False) -> Run:
    """Open an earlier run.

    Args:
        folder: the run folder.
        trust: let this process import the code that the run's settings name, even if another user
            made the run.

    Raises:
        ConfigError: the folder contains no run.
    """
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"load_run: {folder!r} is not a path; give a run folder")
    if trust:
        trust_run(folder)
    return Run(Path(folder))


def _typed(settings: Mapping[str, object]) -> JobConfig:
    """Convert a config that Hydra composed or a run stored to a checked job."""
    with explained([], None):
        if not isinstance(settings, DictConfig):
            return checked(settings)
        if OmegaConf.is_struct(settings):  # composed by Hydra
            return to_config(settings)
        # A stored config may be anyone's, so no interpolation is resolved.
        return checked(cast("dict[str, object]", OmegaConf.to_container(settings)))


def _checked_callbacks(callbacks: object) -> list[Callback]:
    """List the callbacks; refuse objects that are not Callbacks, and misspelt hooks."""
    from klrl.train.callbacks import Callback, check_hooks

    listed = list(callbacks) if isinstance(callbacks, Iterable) else [None]
    hooks = [each for each in listed if isinstance(each, Callback)]
    if len(hooks) < len(listed):
        raise ConfigError(
            f"callbacks={callbacks!r:.60}: give a list of klrl.Callback objects, as in "
            "callbacks=[MyCallback()]"
        )
    for each in hooks:
        check_hooks(each)
    return hooks


def checked_words(given: Sequence[object]) -> list[str]:
    """Return overrides; refuse other objects."""
    for each in given:
        if not isinstance(each, str):
            raise ConfigError(
                f"{each!r:.60}: not a setting; give overrides, as in klrl.run('env=pendulum', "
                "'kl.coef=0.1'), or one config from klrl.compose"
            )
    return [each for each in given if isinstance(each, str)]


def _checked_overrides(given: Sequence[object], config_dir: str | Path | None) -> list[Given]:
    """Check the overrides of a single job, and convert them to Hydra's grammar."""
    overrides = read(checked_words(given), str(config_dir) if config_dir else None)
    for each in overrides:
        if each.key == "resume" and each.value != "null":
            raise ConfigError(f"{each}: resumes a run; use klrl {each} on the command line")
        if each.of_sweep or each.of_hydra:
            raise ConfigError(f"{each}: only the command line reads it; drop it, or use folder=")
    return overrides


def columns_of(rows: Iterable[Mapping[str, object]]) -> Frame:
    """Turn rows into columns; None and missing values become NaN."""
    import numpy as np

    rows = list(rows)
    columns = {
        name: np.array([np.nan if (x := row.get(name)) is None else x for row in rows])
        for name in dict.fromkeys(name for row in rows for name in row)
    }
    try:
        from pandas import DataFrame
    except ModuleNotFoundError:
        return columns
    return DataFrame(columns)


def load_policy(
    run: str | Path, which: str = "last", device: str = "cpu", *, trust: bool = False
) -> Policy:
    """Load the policy of a run, frozen.

    Args:
        run: the run folder.
        which: last or best checkpoint.
        device: the policy's device.
        trust: as in :func:`load_run`.

    Returns:
        Control: a ``ProbabilisticTensorDictSequential`` from observation to action, which includes
        the observation normaliser. Language: a :class:`klrl.language.model.pretrained.CausalLM`,
        with the ``transformers`` model (a ``PeftModel`` with LoRA) and its tokenizer.

    Raises:
        ConfigError: there is no such run, checkpoint or device, or klrl must not import the run's
            code.
    """
    if trust:
        trust_run(run)
    check_device_name(device)
    folder = find_run(str(run), "run")
    return domain_of(stored_config(folder)).function("load")(folder, which, device)
