"""The config groups: their schemas, and where their YAML files lie."""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_store import ConfigStore

from klrl.config.control import ActorConfig, CollectorConfig, EnvConfig, GaussianActorConfig
from klrl.config.jobs import RootConfig
from klrl.config.kl import (
    AdaptiveControllerConfig,
    CheckpointReferenceConfig,
    ControllerConfig,
    DualControllerConfig,
    EMAReferenceConfig,
    KLConfig,
    LegacyKLConfig,
    PeriodicReferenceConfig,
    ReferenceConfig,
    RetrieveKLConfig,
    ScheduleControllerConfig,
)
from klrl.config.language import CausalLMConfig, SamplerConfig, SortDigitsConfig, TextConfig
from klrl.config.learning import (
    AdamWConfig,
    AdvantageConfig,
    ClipConfig,
    GroupConfig,
    KLPENConfig,
    LearnerConfig,
    OptimConfig,
)
from klrl.config.record import LoggerConfig, WandbConfig
from klrl.config.sweep import (
    JoblibConfig,
    LauncherConfig,
    OptunaConfig,
    RayLauncherConfig,
    SearchConfig,
    SubmititConfig,
    SweepRoot,
)

GROUPS = (
    "env",
    "actor",
    "reference",
    "kl",
    "controller",
    "advantage",
    "loss",
    "learner",
    "optim",
    "collector",
    "logger",
)

#: Of a sweep; no job reads them.
SWEEP_GROUPS = ("launcher", "search")

#: group -> schema name -> dataclass. A YAML names its schema in its defaults list.
SCHEMAS: dict[str, dict[str, type]] = {
    "env": {"gym": EnvConfig, "sort_digits": SortDigitsConfig, "text": TextConfig},
    "actor": {
        "mlp": ActorConfig,
        "gaussian": GaussianActorConfig,
        "causal_lm": CausalLMConfig,
    },
    "reference": {
        "initial": ReferenceConfig,
        "checkpoint": CheckpointReferenceConfig,
        "ema": EMAReferenceConfig,
        "periodic": PeriodicReferenceConfig,
    },
    "kl": {"none": KLConfig, "legacy": LegacyKLConfig, "retrieve": RetrieveKLConfig},
    "controller": {
        "fixed": ControllerConfig,
        "schedule": ScheduleControllerConfig,
        "adaptive": AdaptiveControllerConfig,
        "dual": DualControllerConfig,
    },
    "advantage": {"gae": AdvantageConfig, "group": GroupConfig},
    "loss": {"klpen": KLPENConfig, "clip": ClipConfig},
    "learner": {"ppo": LearnerConfig},
    "optim": {"adam": OptimConfig, "adamw": AdamWConfig},
    "collector": {"local": CollectorConfig, "sampler": SamplerConfig},
    "logger": {"wandb": WandbConfig, "none": LoggerConfig},
}

SWEEP_SCHEMAS: dict[str, dict[str, type]] = {
    "launcher": {
        "local": LauncherConfig,
        "joblib": JoblibConfig,
        "submitit": SubmititConfig,
        "ray": RayLauncherConfig,
    },
    "search": {"grid": SearchConfig, "optuna": OptunaConfig},
}

#: The setting that repeats a choice's name; it is set by choosing, never by hand.
DISCRIMINATORS = {
    "env": "task",
    "actor": "distribution",
    "reference": "kind",
    "kl": "mode",
    "controller": "kind",
    "loss": "name",
    "optim": "name",
    "collector": "name",
    "logger": "name",
}


def register_schemas() -> None:
    """Make the dataclasses known to Hydra, in a group of their own so that they are no choices."""
    store = ConfigStore.instance()
    store.store(group="schema", name="root", node=RootConfig)
    store.store(group="schema", name="sweep", node=SweepRoot)
    for group, schemas in (SCHEMAS | SWEEP_SCHEMAS).items():
        for name, node in schemas.items():
            store.store(group=f"schema/{group}", name=name, node=node)


def conf_dir() -> Path:
    """The folder of the YAML files: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).parent.parent
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"
