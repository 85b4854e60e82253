"""The algorithm: :meth:`Training.train`. What its steps do for control stands in
:mod:`klrl.experiment`, for language in :mod:`klrl.language.experiment`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase

from klrl.checkpoint import Checkpoints, Counters
from klrl.config import JobConfig, KLPENConfig
from klrl.interrupt import StopRequest
from klrl.learner import Learned
from klrl.metrics import Row
from klrl.progress import Progress
from klrl.record import keep_status, recording
from klrl.rollout import Rollout
from klrl.run_folder import RunFolder


class Training(ABC):
    """The loop of a run, whose parts a subclass builds.

    Attributes:
        config: the job.
        device: where it computes.
        counters: iterations and frames (language: samples) so far.
        learner: ``update(batch, progress, kl_coef) -> Learned``; ``mode``, how its step runs.
        kl: KL(policy||reference) of the run with its ``coef``, None for ``kl=none``.
        controller: moves that coefficient.
        estimate_advantage: writes the advantages of a rollout.
        described: what the manifest tells of the reference, to build it again on resume.
        row_of: makes a line of ``metrics.jsonl``; arguments as :func:`klrl.record.make_row`.
    """

    config: JobConfig
    device: torch.device
    counters: Counters
    learner: Any
    kl: Any
    controller: Any
    estimate_advantage: Callable[[TensorDictBase], TensorDictBase]
    described: Mapping[str, Any] | None
    row_of: ClassVar[Callable[..., Row]]

    def train(self, files: RunFolder, *, group: str | None = None, resume: bool = False) -> None:
        """Rollout, KL, advantage, update, record; until the frames are done."""
        with ExitStack() as stack:
            stop = stack.enter_context(StopRequest())
            checkpoints = self._checkpoints(files)
            if resume:
                self.take_up(checkpoints)
            manifest = files.open(
                self.config,
                device=str(self.device),
                reference=self.described,
                compile=self.learner.mode,
            )
            stack.enter_context(keep_status(files, self.config, self.counters))
            record, progress = stack.enter_context(
                recording(
                    files,
                    self.config,
                    self.counters,
                    group=group,
                    wandb_id=manifest["wandb_id"],
                    resume=resume,
                )
            )
            self._say_where_it_starts(progress, resume)
            self.learner.say = progress.say
            rollout = self._make_rollout(progress.say)
            stack.callback(rollout.close)
            if not resume:
                self.save(checkpoints, improved=False, stopping=True)
            while self.counters.iteration < self.config.iterations:
                started = time.perf_counter()
                batch = rollout.collect()
                measured = self.charge_kl(batch)
                self.estimate_advantage(batch)
                learned = self.learn(batch)
                self.move_normalizer(batch)
                self.counters.iteration += 1
                self.counters.frames += batch.numel()
                row = self.make_row(batch, measured, learned, time.perf_counter() - started)
                self.move_anchor(batch, measured)
                improved = self.evaluate(row)
                record(row, self.pick_samples(batch))
                self.save(checkpoints, improved, stopping=stop.signum is not None)
                stop.obey()

    @abstractmethod
    def charge_kl(self, batch: TensorDictBase) -> dict[str, torch.Tensor]:
        """Charge KL(policy||reference) to the reward, once, and measure it by every estimator."""

    def learn(self, batch: TensorDictBase) -> Learned:
        """The update, with the coefficients as they are in this iteration."""
        progress = self.counters.frames / self.config.frames
        return self.learner.update(batch, progress, 0.0 if self.kl is None else self.kl.coef)

    def move_anchor(self, batch: TensorDictBase, measured: dict[str, torch.Tensor]) -> None:
        """The reference and its coefficient move once per iteration, for the next one."""
        if self.kl is None:
            return
        self.move_reference()
        self.kl.coef = self.controller.update(float(measured["exact"]), n=batch.numel())

    @abstractmethod
    def move_reference(self) -> None:
        """The reference for the next iteration."""

    def move_normalizer(self, batch: TensorDictBase) -> None:
        """Take the rollout into the observation statistics, after the update that used it."""
        return  # a subclass without statistics has nothing to move

    def evaluate(self, row: Row) -> bool:
        """Evaluate when it is due, add the result to the row; whether it is the best so far."""
        every, counters = self.config.eval.every, self.counters
        last = counters.iteration >= self.config.iterations
        if every == 0 or (counters.iteration % every and not last):
            return False
        row.update(self.evaluation())
        found = row["eval/return"]
        if counters.best_return is not None and found <= counters.best_return:
            return False
        counters.best_return = found
        return True

    @abstractmethod
    def evaluation(self) -> Row:
        """Play the policy as it is: ``eval/return``, ``eval/return_std``."""

    def pick_samples(self, batch: TensorDictBase) -> Sequence[Mapping[str, Any]]:
        """Entries of ``samples.jsonl``, when they are due; a control run has none."""
        return ()

    def save(self, checkpoints: Checkpoints, improved: bool, stopping: bool) -> None:
        """Write ``best`` when it improved, ``last`` when it is due or the run ends."""
        counters = self.counters
        about = {"iteration": counters.iteration, "best_return": counters.best_return}
        due = counters.iteration % self.config.checkpoint.every == 0
        if improved:
            checkpoints.save("best", counters.frames, about)
        if due or stopping or counters.iteration >= self.config.iterations:
            checkpoints.save("last", counters.frames, about)

    def make_row(
        self,
        batch: TensorDictBase,
        measured: dict[str, torch.Tensor],
        learned: Learned,
        seconds: float,
    ) -> Row:
        """One line of ``metrics.jsonl``, of the iteration that was just counted."""
        klpen = isinstance(self.config.loss, KLPENConfig)
        return self.row_of(self.counters, batch, self.kl, measured, learned, klpen, seconds)

    def take_up(self, checkpoints: Checkpoints) -> None:
        """Go on from ``last``: every component, then what depends on them."""
        checkpoints.load_last(self.device)
        if self.kl is not None:
            self.kl.coef = self.controller.coef

    def _say_where_it_starts(self, progress: Progress, resume: bool) -> None:
        if resume:
            progress.say(f"resumed at {self.counters.frames:,} {self.config.axis}")
        if self.kl is not None:
            kind, size = self.config.reference.kind, self.reference_bytes()
            progress.say(f"reference: {kind}, {size / 1e6:.2f} MB beside the policy")

    @abstractmethod
    def reference_bytes(self) -> int:
        """What the reference holds in memory beside the policy."""

    @abstractmethod
    def _make_rollout(self, say: Callable[[str], None] = print) -> Rollout: ...

    @abstractmethod
    def _checkpoints(self, files: RunFolder) -> Checkpoints: ...
