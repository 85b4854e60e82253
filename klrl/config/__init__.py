# ruff: noqa: F401, F403 (these are the names of klrl.config)
"""Declares every setting with its schema; ``rules`` checks settings against each other.

No file in here imports torch or gymnasium, so that ``--help`` and config errors print at once. To
add a choice or a setting, see ``schemas/``.
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
    conf_dir,
    factory,
)
from klrl.config.fields import ChoiceConfig, OwnPart
from klrl.config.jobs import JOBS, Config, JobConfig, LanguageConfig
from klrl.config.nodes import register_schemas
from klrl.config.schemas.control import *
from klrl.config.schemas.language import *
from klrl.config.schemas.learning import *
from klrl.config.schemas.penalty import *
from klrl.config.schemas.record import *
from klrl.config.schemas.root import RootConfig, Ungrouped
from klrl.config.sweep import *
