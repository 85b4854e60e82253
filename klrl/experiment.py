"""One run, from its settings to its folder; and the parts of a control run.

The algorithm is :meth:`klrl.training.Training.train`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from klrl.config import (
    CheckpointReferenceConfig,
    Config,
    LanguageConfig,
    LegacyKLConfig,
    RayCollectorConfig,
)
from klrl.envs import make_env
from klrl.errors import ConfigError, NonFiniteError
from klrl.evaluate import evaluate_policy
from klrl.kl.build import ReferenceKL, make_reference_kl
from klrl.kl.controllers import make_controller
from klrl.kl.measure import AnnotatedReference, annotate, measure_reference_kl
from klrl.kl.reference import freeze, make_reference_rule, memory_bytes
from klrl.learner import Learner
from klrl.load import load_agent, load_reference
from klrl.metrics import Row
from klrl.models import make_agent
from klrl.models.actor import device_of
from klrl.preflight import check_machine
from klrl.record import make_row
from klrl.rollout import Rollout, make_rollout
from klrl.run_folder import RunFolder, new_folder
from klrl.seeds import derived_seed
from klrl.training import Training


def run(
    config: Config | LanguageConfig | DictConfig,
    folder: str | Path | None = None,
    *,
    group: str | None = None,
    resume: bool = False,
    words: Sequence[str] | None = None,
) -> Path:
    """Train one policy and record the run.

    Args:
        config: the job, as composed by Hydra or typed.
        folder: the run folder; default a new one below ``outputs/``.
        group: the sweep that the job belongs to.
        resume: go on from the folder's last checkpoint.
        words: the job's own, for its manifest; default this process's command line.

    Returns:
        The run folder.

    Raises:
        ConfigError: the settings cannot be run; nothing was recorded.
        RewardError: a reward function failed; the last good checkpoint is kept.
        NonFiniteError: a value was NaN or infinite; the last good checkpoint is kept.
        Interrupted: Ctrl-C or SIGTERM came; the checkpoint is written.
    """
    config = to_config(config) if isinstance(config, DictConfig) else config
    check_machine(config, resumed=resume)
    torch.set_num_threads(config.threads)
    files = RunFolder(Path(folder), words) if folder is not None else None
    if files is not None and files.exists and not resume:
        raise ConfigError(f"folder={folder}: holds a run already; give another, or resume it")
    before = files.manifest if files is not None and resume else None
    experiment = make_experiment(config, before)
    files = files or RunFolder(new_folder())
    experiment.train(files, group=group, resume=resume)
    return files.path


def make_experiment(
    config: Config | LanguageConfig, before: Mapping[str, Any] | None = None
) -> Training:
    """The run of a job, built; arguments as :class:`Experiment`."""
    if isinstance(config, LanguageConfig):
        from klrl.language.experiment import LanguageExperiment  # transformers only for language

        return LanguageExperiment(config, before)
    return Experiment(config, before)


class Experiment(Training):
    """Everything that one control run needs, built from its settings.

    Args:
        config: the job.
        before: on resume, the run's manifest: how its update was compiled, and what a reference
            from another run was. Weights will come from the run's own checkpoint, not
            ``actor.init``.

    Raises:
        ConfigError: an environment, a policy or a reference cannot be built.
    """

    config: Config
    row_of = staticmethod(make_row)

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
        # Kept on resume: with more frames, or another cache, auto might choose another.
        mode = (before or {}).get("compile") or config.learner.compile
        self.learner = Learner(config, self.agent, estimator, mode)

    # ------------------------------------------------------------------------------ the steps

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

    def move_reference(self) -> None:
        """The anchor after this iteration, by its rule."""
        self.reference_rule.update(self.reference, self.agent.actor, self.counters.iteration)

    def move_normalizer(self, batch: TensorDictBase) -> None:
        """Take the rollout into the observation statistics, after the update that used it."""
        if self.agent.normalizer is not None:
            self.agent.normalizer.update(batch.get("observation"))

    def evaluation(self) -> Row:
        """Deterministic episodes in fresh environments."""
        result = evaluate_policy(
            self.agent,
            self.config.env,
            episodes=self.config.eval.episodes,
            seed=derived_seed(self.config.seed, "eval"),
            device=self.device,
        )
        return {"eval/return": result.mean, "eval/return_std": result.std}

    def reference_bytes(self) -> int:
        """A copy of the policy: its parameters and normaliser."""
        return memory_bytes(self.reference)

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
        if isinstance(self.config.collector, RayCollectorConfig):
            from klrl.rollout.ray import RayRollout  # Ray only where it is chosen

            return RayRollout(
                self.config.collector, self.config.env, self.agent, self.device, seed, say
            )
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
