# ruff: noqa: F401, F403 (these are the names of klrl.config)
"""Declares and checks all settings. To add a choice or a setting, see ``schemas/``.

Importing this package imports neither torch nor gymnasium, so that ``--help`` and config errors
print at once.
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
from klrl.config.schemas.root import Ungrouped
from klrl.config.sweep import *
