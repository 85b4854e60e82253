"""The training loop, :meth:`Training.train`; its steps are methods of :class:`Parts`.

Parts is implemented in :mod:`klrl.control.run.parts` and :mod:`klrl.language.run.parts`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from klrl.base import ranks
from klrl.base.errors import ConfigError, user_code
from klrl.base.interrupt import StopRequest
from klrl.config import JobConfig, TargetControllerConfig, factory
from klrl.config.identity import NUMERICS
from klrl.config.own import check_sources
from klrl.domains import Domain, domain_of
from klrl.kl.charge import BLIND, ReferenceKL
from klrl.kl.controllers import FixedKLController
from klrl.kl.measure import in_unit
from klrl.kl.reference import FrozenReference, ReferenceRule
from klrl.runs.checkpoint import Checkpoints, Counters
from klrl.runs.folder import RunFolder
from klrl.runs.metrics import Row, require_declared
from klrl.runs.one_run import check_one_run
from klrl.runs.progress import Phases
from klrl.runs.record import Recorder, recording, recording_status
from klrl.runs.state import Component
from klrl.train.callbacks import Callback
from klrl.train.learner import Learner
from klrl.train.schedule import MANY, Evaluations
from klrl.train.scores import Evaluation, Size, Starts


@dataclass(frozen=True)
class Rewards:
    """Means per frame or token of a rollout's rewards and charged KL, computed in float64."""

    raw: float
    shaped: float
    applied: float  # KL charged to the reward, nats, without the coefficient; 0 if none
    own: Row = field(default_factory=dict)  # metrics that only control or only language has
    size: float = 0.0  # mean absolute reward without the charge; control only


class Rollout(Protocol):
    """The methods of a collector that the training loop calls."""

    def collect(self) -> TensorDictBase:
        """Collect the next rollout: [N, T]; in a language run [B]."""

    def close(self) -> None:
        """Close the environment."""


class Parts(ABC):
    """The parts of a run, and the steps of the loop, that differ between control and language."""

    kl: ReferenceKL | None  # None for ``kl=none``
    reference: FrozenReference | None  # None for ``kl=none``
    preflight: Sequence[str]  # lines to print at the start of the run
    learner: Learner
    longest_episode: int | None  # in steps; None if the environment does not declare a limit
    starts: tuple[int, int] = MANY  # number of start states of evaluations, and of the closing one
    exact_kl = True  # whether every rollout's KL is exact
    estimate_advantage: Callable[[TensorDictBase], TensorDictBase]

    def __init__(self, config: JobConfig, device: torch.device) -> None:
        self.device = device
        self.phase = Phases()
        self.reference_rule: ReferenceRule = factory("reference", config.reference, config.domain)(
            config.reference
        )

    @abstractmethod
    def rollout(self, iteration: int, say: Callable[[str], None]) -> Rollout:
        """Make the collector that starts at ``iteration``; ``say`` prints lines for the user."""

    @abstractmethod
    def charge_kl(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Charge the KL to the reward, unless ``kl.placement=loss``; return the KL's metrics."""

    @abstractmethod
    def rewards(self, batch: TensorDictBase) -> Rewards:
        """Return the reward metrics of a rollout, after :meth:`charge_kl`."""

    @abstractmethod
    def evaluation(self, starts: Starts, size: Size) -> Evaluation:
        """Evaluate the current policy; training's random state is unchanged."""

    def held_out(self) -> Row:
        """Return ``nll/held_out`` of a job that learns from data; else an empty row."""
        return {}

    @property
    @abstractmethod
    def actor(self) -> nn.Module:
        """The policy that is trained."""

    @abstractmethod
    def components(self) -> dict[str, Component]:
        """Return the checkpoint's parts by name; :meth:`Training.checkpoints` adds others."""

    def update_normalizer(self, batch: TensorDictBase) -> None:
        """Add the rollout to the normaliser's statistics, after the policy's update."""
        return  # no normaliser by default

    @property
    def reward_norm(self) -> float:
        """The factor on the last rollout's rewards, in addition to ``env.reward_scale``.

        The KL in the loss is multiplied by this factor too.
        """
        return 1.0

    @property
    def resume(self) -> dict[str, str]:
        """Manifest entry: a resume is exact (on a CPU to the bit) or ``anew`` (new episodes)."""
        return {"resume": "exact"}

    @property
    @abstractmethod
    def collecting(self) -> str:
        """A line for the user: how rollouts are collected."""

    @property
    def built(self) -> Sequence[object]:
        """The transforms that charge the KL, in order, for the manifest."""
        whole = None if self.kl is None else self.kl.transform
        return () if whole is None else (whole, *getattr(whole, "transforms", ()))

    def callbacks(self) -> Sequence[Callback]:
        """Return hooks in addition to the user's."""
        return ()


class Training:
    """One run: the training loop, its counters and its parts.

    ``before``: the manifest if the run is resumed, else None. The manifest records how the update
    was compiled, and the networks of a reference that comes from a different run. A resumed run
    loads its weights from its checkpoint, not from ``actor.init``.
    """

    recorder: Recorder  # set while the run is open

    def __init__(self, config: JobConfig, before: Mapping[str, Any] | None = None) -> None:
        self.config = config
        self.domain: Domain = domain_of(config)
        self.counters = Counters()
        self.parts: Parts = self.domain.function("parts")(config, before)
        coef = 0.0 if self.parts.kl is None else self.parts.kl
        kind: Any = factory("controller", config.controller, config.domain)
        controller: FixedKLController = kind.of(config.controller, coef, config.frames)
        self.controller = controller
        self.evaluations = Evaluations(config, self.domain, self.parts, self.counters)
        self._stop = StopRequest()
        self._callbacks: list[Callback] = []

    def train(
        self,
        files: RunFolder,
        *,
        group: str | None = None,
        resume: bool = False,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Collect, charge the KL, estimate advantages, update and record, until the run is over.

        Raises:
            NonFiniteError: a value was NaN or infinite; the last good checkpoint is kept.
            Interrupted: the run was asked to stop; the checkpoint is written.
        """
        self._callbacks = [*self.parts.callbacks(), *callbacks]
        with ExitStack() as stack:
            stop = stack.enter_context(self._stop)
            checkpoints = self.checkpoints(files)
            marks = checkpoints.load_last(self.parts.device) if resume else None
            rollout = self._open(stack, files, group, marks)
            if marks is None:
                self.parts.phase("evaluation")
                self.save(
                    checkpoints, improved=self.evaluations.start(self.recorder), stopping=True
                )
            else:
                self._check_best(checkpoints, marks)
            while not self.evaluations.over:
                started = time.perf_counter()
                self.parts.phase.take()  # discard the time between iterations
                self.parts.phase("sampling")
                batch = rollout.collect()
                self.parts.phase("scoring")
                measured = self.parts.charge_kl(batch)
                self.parts.estimate_advantage(batch)
                self.parts.phase("update")
                learned = self.learn(batch)
                self.parts.phase("")
                self.parts.update_normalizer(batch)
                self.counters.iteration += 1
                self.counters.frames += batch.numel()
                row = self.make_row(batch, measured, learned, time.perf_counter() - started)
                self.update_penalty(batch, measured)
                self.parts.phase("evaluation")
                improved = self.evaluations.during(row)
                self.evaluations.closing(row, files, self.recorder, improved)
                self.record(row, batch)
                stopping = stop.agreed()
                self.parts.phase("checkpoint")
                self.save(checkpoints, improved, stopping)
                if stopping and not self.evaluations.over:
                    stop.obey()
            self._call_hooks("finished")

    def stop(self) -> None:
        """End the run after this iteration and write a checkpoint, as Ctrl-C does."""
        self._stop.request()

    @property
    def signum(self) -> int | None:
        """The signal that asked the run to stop, or None."""
        return self._stop.signum

    # ------------------------------------------------------------------------------ the steps

    def learn(self, batch: TensorDictBase) -> Row:
        """Update policy and critic with this iteration's coefficients; return the metrics."""
        progress = self.counters.frames / self.config.frames
        coef = 0.0 if self.parts.kl is None else self.parts.kl.coef
        return self.parts.learner.update(batch, progress, coef * self.parts.reward_norm)

    def make_row(
        self, batch: TensorDictBase, measured: Mapping[str, Tensor], learned: Row, seconds: float
    ) -> Row:
        """Make the iteration's line of ``metrics.jsonl``; ``seconds`` is the iteration's time."""
        size, axis, rewards = batch.numel(), self.domain.axis, self.parts.rewards(batch)
        coef = 0.0 if self.parts.kl is None else self.parts.kl.coef
        row: Row = {
            "iteration": self.counters.iteration,
            axis: self.counters.frames,
            "reward/raw": rewards.raw,
            "reward/shaped": rewards.shaped,
            **rewards.own,
            "kl/ref/coef": coef,
            "kl/ref/penalty": coef * rewards.applied,
            **{name: float(value) for name, value in measured.items()},
            **learned,
            **self.controller.row(),
            "time/iteration": seconds,
            **{f"time/{name}": each for name, each in self.parts.phase.take().items()},
            f"time/{axis}_per_second": size / seconds,
        }
        require_declared(row)
        return row

    def update_penalty(self, batch: TensorDictBase, measured: Mapping[str, Tensor]) -> None:
        """Update the reference and the coefficient of its KL."""
        if self.parts.reference is None:
            return
        self.parts.reference.move(self.parts.actor, self.counters.iteration)
        if self.config.kl.coef_from_reward and self.controller.coef == 0:
            self._price(self.parts.rewards(batch).size)
        config = self.config.controller
        unit = config.unit if isinstance(config, TargetControllerConfig) else None
        kl = in_unit(measured, unit, exact=self.parts.exact_kl)
        self.controller.update(kl, n=batch.numel())

    def _price(self, earned: float) -> None:
        """Set ``kl.coef=null`` to what a step earns on average, in absolute value."""
        self.controller.coef = earned
        if earned or self.counters.iteration == 1:
            what = "what a step earned; .1 nats now cost a tenth of it"
            self.recorder.say(f"kl.coef={earned:.3g}: {what if earned else 'no reward so far'}")

    def record(self, row: Row, batch: TensorDictBase) -> None:
        """Call the hooks, then write the iteration's row."""
        self._call_hooks("iterated", dict(row), batch)
        self.recorder.record(row)

    def save(self, checkpoints: Checkpoints, improved: bool, stopping: bool) -> None:
        """Write checkpoint ``best`` if the policy improved, and ``last`` if due or at the end."""
        counters = self.counters
        due = counters.iteration % self.config.checkpoint.every == 0
        if improved:
            self._save(checkpoints, "best")
        if due or stopping or self.evaluations.over:
            self._save(checkpoints, "last")

    def _save(self, checkpoints: Checkpoints, which: str) -> None:
        counters = self.counters
        about = {
            "iteration": counters.iteration,
            "best_return": counters.best_return,
            "eval": self.evaluations.how,
            **self.recorder.marks(),
        }
        checkpoints.save(which, counters.frames, about)

    # ---------------------------------------------------------------------- opening, resuming

    def checkpoints(self, files: RunFolder) -> Checkpoints:
        """Make the checkpoint writer, with every object whose state is saved."""
        components: dict[str, Component] = {
            **self.parts.components(),
            "counters": self.counters,
            "controller": self.controller,
            "beta": self.parts.learner.beta_rule,
        }
        if self.parts.learner.rate is not None:
            components["rate"] = self.parts.learner.rate
        files.check_owned()
        return Checkpoints(files.checkpoints, components, self.parts.device)

    def _check_best(self, checkpoints: Checkpoints, marks: Mapping[str, Any]) -> None:
        """Forget the best return if its checkpoint is gone, or if settings of ``eval`` changed."""
        how = self.evaluations.how
        if not checkpoints.drop_best(self.counters.frames) or marks.get("eval", how) != how:
            self.counters.best_return = None

    def _open(
        self,
        stack: ExitStack,
        files: RunFolder,
        group: str | None,
        marks: Mapping[str, Any] | None,
    ) -> Rollout:
        """Open manifest, record and collector; return the collector. ``stack`` closes them."""
        steps, reference = self.parts.learner.steps, self.parts.reference
        manifest = files.open(
            self.config,
            device=str(self.parts.device),
            reference=None if reference is None else reference.description,
            compile=steps.mode,
            evaluation="sampled" if self.config.eval.sampled else self.domain.mode,
        )
        late = stack.enter_context(ExitStack())
        stack.enter_context(recording_status(files, self.config, self.counters))
        self.recorder = stack.enter_context(
            recording(
                files,
                self.config,
                self.counters,
                late=late,
                group=group,
                manifest=manifest,
                marks=None if ranks.rank() else marks,
                phases=self.parts.phase,
            )
        )
        stack.callback(self._call_hooks, "ended")
        say = self.recorder.say
        for line in self._opening_lines(None if marks is None else manifest["numerics"]):
            say(line)
        steps.say = say
        steps.made = files.update
        rollout = self.parts.rollout(self.counters.iteration, say)
        stack.callback(rollout.close)
        parts = {
            "controller": self.controller,
            "advantage": self.parts.estimate_advantage,
            "loss": self.parts.learner.loss,
            "loss.own_beta_rule": self.parts.learner.beta_rule,
        }
        if lost := [setting for setting, part in parts.items() if getattr(part, "unsaved", False)]:
            say(f"resume: a later resume will reset {lost[0]}, whose state is not saved")
        built = [f"{type(each).__module__}.{type(each).__name__}" for each in self.parts.built]
        collector = self.parts.collecting
        say(f"rollouts: {collector}")
        files.update(
            built=built,
            collector=collector,
            **self.parts.resume | ({"resume": "anew"} if lost else {}),
        )
        self._call_hooks("started")
        return rollout

    def _opening_lines(self, begun_with: int | None) -> list[str]:
        """Return the lines to print first; ``begun_with``: NUMERICS of a resumed run, or None."""
        lines = [*self.parts.preflight, *self.evaluations.lines()]
        if begun_with is not None:
            at = f"resumed at {self.counters.frames:,} {self.domain.axis}"
            other = f"; klrl's arithmetic has changed: numerics {begun_with} before, {NUMERICS} now"
            lines.append(at + (other if begun_with != NUMERICS else ""))
        if self.parts.kl is not None and not isinstance(self.parts.kl.divergence.name, str):
            lines.append(BLIND)
        if self.parts.reference is not None:
            name, size = self.config.reference.name, self.parts.reference.bytes
            lines.append(f"reference: {name}, {size / 1e6:.2f} MB in addition to the policy")
        return lines

    def _call_hooks(self, hook: str, *args: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, hook)(self, *args)


#: Allows one run at a time in a process: runs would share torch's random generator and threads.
_running = threading.Lock()


def start(
    config: JobConfig,
    files: RunFolder,
    *,
    group: str | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> int | None:
    """Train one policy and record the run.

    Returns:
        A signal that came too late to stop this run (a sweep then stops); else None.

    Raises:
        ConfigError: the settings cannot be run, the folder already has a run or belongs to a
            different process, or this process is training another run. Nothing was recorded.
        OwnerError: the folder was moved or deleted, or a different process took it over.
        ExitError: user code called ``sys.exit``; the last good checkpoint is kept.
        RewardError: a reward function failed; the last good checkpoint is kept.
        NonFiniteError: a value was NaN or infinite; the last good checkpoint is kept.
        Interrupted: the run was asked to stop; the checkpoint is written.
    """
    if not _running.acquire(blocking=False):
        raise ConfigError(
            f"folder={files.path}: this process is already training a run; wait, or start this one "
            "in a separate process"
        )
    before = torch.get_num_threads()
    try:
        with user_code(), files.owned():
            if files.exists and not resume:
                raise ConfigError(
                    f"folder={files.path}: already has a run; give a different folder, or resume it"
                )
            check_one_run(files, f"{'resume' if resume else 'folder'}={files.path}")
            check_sources(config)
            torch.set_num_threads(config.threads)
            training = Training(config, ranks.first(lambda: files.manifest) if resume else None)
            training.train(files, group=group, resume=resume, callbacks=callbacks)
            return training.signum
    finally:
        torch.set_num_threads(before)
        _running.release()
