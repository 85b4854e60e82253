"""The schema of every setting; ``combinations`` checks settings against each other.

Values are in ``conf/`` (one YAML per choice); types and ranges are here. Nothing in here imports
torch or gymnasium, so that ``--help`` and config errors print at once.

To add a setting: a field in the dataclass of its group (``control``, ``language``, ``kl``,
``learning``, ``record``, ``sweep``; outside any group ``jobs.RootConfig``), and a commented line in
the YAML of each choice that has it. To add a choice: a line in ``choices.py``, and where it has
settings of its own a dataclass there and among the names below.
"""

from klrl.config.choices import (
    ALL_CHOICES,
    CHOICES,
    CONTROL,
    GROUPS,
    LANGUAGE,
    SWEEP,
    SWEEP_GROUPS,
    choice_of,
    choices_for,
    factory,
)
from klrl.config.control import (
    ActorConfig,
    CollectorConfig,
    EnvConfig,
    GaussianActorConfig,
    RayCollectorConfig,
)
from klrl.config.fields import ChoiceConfig, choice, number
from klrl.config.groups import conf_dir, register_schemas
from klrl.config.jobs import JOBS, Config, JobConfig, LanguageConfig, RootConfig
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
from klrl.config.language import (
    CausalLMConfig,
    LanguageEnvConfig,
    LoraConfig,
    SamplerConfig,
    SortDigitsConfig,
    TextConfig,
)
from klrl.config.learning import (
    AdamWConfig,
    AdvantageConfig,
    ClipConfig,
    GroupConfig,
    KLPENConfig,
    LearnerConfig,
    LossConfig,
    OptimConfig,
)
from klrl.config.record import CheckpointConfig, EvalConfig, LoggerConfig, WandbConfig
from klrl.config.sweep import (
    JoblibConfig,
    LauncherConfig,
    OptunaConfig,
    RayLauncherConfig,
    SearchConfig,
    SubmititConfig,
)

__all__ = [
    "ALL_CHOICES",
    "CHOICES",
    "CONTROL",
    "GROUPS",
    "JOBS",
    "LANGUAGE",
    "SWEEP",
    "SWEEP_GROUPS",
    "ActorConfig",
    "AdamWConfig",
    "AdaptiveControllerConfig",
    "AdvantageConfig",
    "CausalLMConfig",
    "CheckpointConfig",
    "CheckpointReferenceConfig",
    "ChoiceConfig",
    "ClipConfig",
    "CollectorConfig",
    "Config",
    "ControllerConfig",
    "DualControllerConfig",
    "EMAReferenceConfig",
    "EnvConfig",
    "EvalConfig",
    "GaussianActorConfig",
    "GroupConfig",
    "JobConfig",
    "JoblibConfig",
    "KLConfig",
    "KLPENConfig",
    "LanguageConfig",
    "LanguageEnvConfig",
    "LauncherConfig",
    "LearnerConfig",
    "LegacyKLConfig",
    "LoggerConfig",
    "LoraConfig",
    "LossConfig",
    "OptimConfig",
    "OptunaConfig",
    "PeriodicReferenceConfig",
    "RayCollectorConfig",
    "RayLauncherConfig",
    "ReferenceConfig",
    "RetrieveKLConfig",
    "RootConfig",
    "SamplerConfig",
    "ScheduleControllerConfig",
    "SearchConfig",
    "SortDigitsConfig",
    "SubmititConfig",
    "TextConfig",
    "WandbConfig",
    "choice",
    "choice_of",
    "choices_for",
    "conf_dir",
    "factory",
    "number",
    "register_schemas",
]
