"""The config groups: their schemas, and where their YAML files lie."""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_store import ConfigStore

from klrl.config import control, kl, language, learning, record, sweep
from klrl.config.jobs import RootConfig

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
    "env": {
        "gym": control.EnvConfig,
        "sort_digits": language.SortDigitsConfig,
        "text": language.TextConfig,
    },
    "actor": {
        "mlp": control.ActorConfig,
        "gaussian": control.GaussianActorConfig,
        "causal_lm": language.CausalLMConfig,
    },
    "reference": {
        "initial": kl.ReferenceConfig,
        "checkpoint": kl.CheckpointReferenceConfig,
        "ema": kl.EMAReferenceConfig,
        "periodic": kl.PeriodicReferenceConfig,
    },
    "kl": {"none": kl.KLConfig, "legacy": kl.LegacyKLConfig, "retrieve": kl.RetrieveKLConfig},
    "controller": {
        "fixed": kl.ControllerConfig,
        "schedule": kl.ScheduleControllerConfig,
        "adaptive": kl.AdaptiveControllerConfig,
        "dual": kl.DualControllerConfig,
    },
    "advantage": {"gae": learning.AdvantageConfig, "group": learning.GroupConfig},
    "loss": {"klpen": learning.KLPENConfig, "clip": learning.ClipConfig},
    "learner": {"ppo": learning.LearnerConfig},
    "optim": {"adam": learning.OptimConfig, "adamw": learning.AdamWConfig},
    "collector": {
        "local": control.CollectorConfig,
        "ray": control.RayCollectorConfig,
        "sampler": language.SamplerConfig,
    },
    "logger": {"wandb": record.WandbConfig, "none": record.LoggerConfig},
}

SWEEP_SCHEMAS: dict[str, dict[str, type]] = {
    "launcher": {
        "local": sweep.LauncherConfig,
        "joblib": sweep.JoblibConfig,
        "submitit": sweep.SubmititConfig,
        "ray": sweep.RayLauncherConfig,
    },
    "search": {"grid": sweep.SearchConfig, "optuna": sweep.OptunaConfig},
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
    store.store(group="schema", name="sweep", node=sweep.SweepRoot)
    for group, schemas in (SCHEMAS | SWEEP_SCHEMAS).items():
        for name, node in schemas.items():
            store.store(group=f"schema/{group}", name=name, node=node)


def conf_dir() -> Path:
    """The folder of the YAML files: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).parent.parent
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"
