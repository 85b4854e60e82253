"""One run, from its settings to its folder; :meth:`Experiment.train` is the algorithm."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torchrl.envs import EnvBase

from klrl.advantage import make_advantage
from klrl.checkpoint import Checkpoints, Counters
from klrl.checks import to_config
from klrl.compiled import decide
from klrl.config import (
    CheckpointReferenceConfig,
    Config,
    KLPENConfig,
    LegacyKLConfig,
)
from klrl.envs import make_env
from klrl.errors import ConfigError, NonFiniteError
from klrl.evaluate import evaluate_policy
from klrl.interrupt import StopRequest
from klrl.kl.build import ReferenceKL, make_reference_kl
from klrl.kl.controllers import make_controller
from klrl.kl.measure import AnnotatedReference, annotate, measure_reference_kl
from klrl.kl.reference import freeze, make_reference_rule, memory_bytes
from klrl.learner import Learned, Learner
from klrl.load import load_agent, load_reference
from klrl.metrics import Row
from klrl.models import make_agent
from klrl.models.actor import device_of
from klrl.preflight import check_machine
from klrl.progress import Progress
from klrl.record import keep_status, make_row, recording
from klrl.rollout import Rollout, make_rollout
from klrl.run_folder import RunFolder, new_folder
from klrl.seeds import derived_seed


def run(
    config: Config | DictConfig,
    folder: str | Path | None = None,
    *,
    group: str | None = None,
    resume: bool = False,
) -> Path:
    """Train one policy and record the run.

    Args:
        config: the job, as composed by Hydra or typed.
        folder: the run folder; default a new one below ``outputs/``.
        group: the sweep that the job belongs to.
        resume: go on from the folder's last checkpoint.

    Returns:
        The run folder.

    Raises:
        ConfigError: the settings cannot be run; nothing was recorded.
        NonFiniteError: a value was NaN or infinite; the last good checkpoint is kept.
        Interrupted: Ctrl-C or SIGTERM came; the checkpoint is written.
    """
    config = to_config(config) if isinstance(config, DictConfig) else config
    check_machine(config, resumed=resume)
    torch.set_num_threads(config.threads)
    files = RunFolder(Path(folder)) if folder is not None else None
    if files is not None and files.exists and not resume:
        raise ConfigError(f"folder={folder}: holds a run already; give another, or resume it")
    before = files.manifest if files is not None and resume else None
    experiment = Experiment(config, before)
    files = files or RunFolder(new_folder())
    experiment.train(files, group=group, resume=resume)
    return files.path


class Experiment:
    """Everything that one run needs, built from its settings.

    Args:
        config: the job.
        before: on resume, the run's manifest: how its update was compiled, and what a reference
            from another run was. Weights will come from the run's own checkpoint, not
            ``actor.init``.

    Raises:
        ConfigError: an environment, a policy or a reference cannot be built.
    """

    def __init__(
        self,
        config: Config,
        before: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.device = device_of(config.device)
        self.counters = Counters()
        torch.manual_seed(derived_seed(config.seed, "torch"))
        env = make_env(config.env, seed=0, num_envs=1)
        self.agent = make_agent(
            config.actor,
            env,
            normalize=config.env.normalize_observation,
            separate=config.loss.separate_losses,
        )
        if config.actor.init is not None and before is None:
            load_agent(config.actor.init, self.agent)
        self.reference, self.described = self._make_reference(
            env, before.get("reference") if before else None
        )
        env.close()
        self.agent.modules.to(self.device)
        self.reference.to(self.device)
        self.kl = self._make_kl()
        self.estimate_advantage = make_advantage(
            config.advantage, self.agent.critic, config.env.reward_scale
        )
        self.reference_rule = make_reference_rule(config.reference)
        coef = config.kl.coef if isinstance(config.kl, LegacyKLConfig) else 0.0
        self.controller = make_controller(config.controller, coef, config.frames)
        estimator = None if self.kl is None else self.kl.loss_estimator
        # Kept on resume: with more frames, auto might choose another.
        mode = (before or {}).get("compile") or decide(config, self.device)
        self.learner = Learner(config, self.agent, estimator, mode)

    # ------------------------------------------------------------------------------- the loop

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
                record(row)
                self.save(checkpoints, improved, stopping=stop.signum is not None)
                stop.obey()

    def charge_kl(self, batch: TensorDictBase) -> dict[str, torch.Tensor]:
        """Charge KL(policy||reference) to the reward, once, and measure it by every estimator."""
        if self.kl is None:
            return {}
        annotate(batch, self.reference, self.agent.family)
        if self.kl.transform is not None and not self.kl.online:
            self.kl.transform(batch)
        measured = measure_reference_kl(batch, self.agent.family)
        for name, value in measured.items():
            if not torch.isfinite(value):
                raise NonFiniteError(
                    f"kl/ref/{name} is {float(value)}; raise kl.coef or lower optim.lr"
                )
        return measured

    def learn(self, batch: TensorDictBase) -> Learned:
        """The update, with the coefficients as they are in this iteration."""
        progress = self.counters.frames / self.config.frames
        return self.learner.update(batch, progress, 0.0 if self.kl is None else self.kl.coef)

    def move_anchor(self, batch: TensorDictBase, measured: dict[str, torch.Tensor]) -> None:
        """The reference and its coefficient move once per iteration, for the next one."""
        if self.kl is None:
            return
        self.reference_rule.update(self.reference, self.agent.actor, self.counters.iteration)
        self.kl.coef = self.controller.update(float(measured["exact"]), n=batch.numel())

    def move_normalizer(self, batch: TensorDictBase) -> None:
        """Take the rollout into the observation statistics, after the update that used it."""
        if self.agent.normalizer is not None:
            self.agent.normalizer.update(batch.get("observation"))

    def evaluate(self, row: Row) -> bool:
        """Evaluate when it is due, add the result to the row; whether it is the best so far."""
        every, counters = self.config.eval.every, self.counters
        last = counters.iteration >= self.config.iterations
        if every == 0 or (counters.iteration % every and not last):
            return False
        result = evaluate_policy(
            self.agent,
            self.config.env,
            episodes=self.config.eval.episodes,
            seed=derived_seed(self.config.seed, "eval"),
            device=self.device,
        )
        row["eval/return"], row["eval/return_std"] = result.mean, result.std
        if counters.best_return is not None and result.mean <= counters.best_return:
            return False
        counters.best_return = result.mean
        return True

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
        return make_row(self.counters, batch, self.kl, measured, learned, klpen, seconds)

    def _say_where_it_starts(self, progress: Progress, resume: bool) -> None:
        if resume:
            progress.say(f"resumed at {self.counters.frames:,} frames")
        if self.kl is not None:
            kind, size = self.config.reference.kind, memory_bytes(self.reference)
            progress.say(f"reference: {kind}, {size / 1e6:.2f} MB beside the policy")

    # --------------------------------------------------------------------------------- parts

    def _make_reference(
        self, env: EnvBase, described: Mapping[str, Any] | None
    ) -> tuple[ProbabilisticTensorDictSequential, Mapping[str, Any] | None]:
        """pi_ref, and how to build it again on resume: the policy as it is now needs no telling."""
        config = self.config.reference
        if isinstance(config, CheckpointReferenceConfig):
            return load_reference(config.path, config.which, self.agent, env, described)
        return freeze(self.agent.actor), None

    def _make_kl(self) -> ReferenceKL | None:
        kl = make_reference_kl(self.config.kl, self.agent.actor, AnnotatedReference(self.reference))
        return None if kl is None else kl.to(self.device)

    def _make_rollout(self, say: Callable[[str], None] = print) -> Rollout:
        seed = derived_seed(self.config.seed, "train", self.counters.iteration)
        online = (self.kl.transform,) if self.kl and self.kl.transform and self.kl.online else ()
        env = make_env(self.config.env, seed=seed, transforms=online)
        rollout, why = make_rollout(self.config.collector, env, self.agent, self.device)
        if why is not None:
            say(why)
        return rollout

    def _checkpoints(self, files: RunFolder) -> Checkpoints:
        components = {
            "agent": self.agent.modules,
            "optimizer": self.learner.optimizer,
            "counters": self.counters,
            "controller": self.controller,
            "beta": self.learner.beta_rule,
        }
        if self.kl is not None:
            components["reference"] = self.reference
        return Checkpoints(files.checkpoints, components)

    def take_up(self, checkpoints: Checkpoints) -> None:
        """Go on from ``last``: every component, then what depends on them."""
        checkpoints.load_last(self.device)
        if self.kl is not None:
            self.kl.coef = self.controller.coef
