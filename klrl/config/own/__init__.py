# ruff: noqa: F401 (these are the names of klrl.config.own)
"""Finds, calls and checks custom parts: the user's classes and functions (docs/extending.md).

Importing this package does not import torch, but the user's modules may.
"""

from klrl.config.own.find import (
    PartError,
    config_errors,
    import_target,
    make_own,
    typed_args,
)
from klrl.config.own.parts import own_parts
from klrl.config.own.sources import changed_sources, check_sources, complete
from klrl.config.own.trial import has_state_dict, try_part
