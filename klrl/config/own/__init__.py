# ruff: noqa: F401 (these are the names of klrl.config.own)
"""Custom parts (docs/extending.md). No torch in here, but the user's module may import it."""

from klrl.config.own.find import PartError, config_errors, import_target, make_own
from klrl.config.own.parts import own_parts
from klrl.config.own.sources import (
    changed_sources,
    check_sources,
    complete,
    complete_part,
    manifest_entries,
)
from klrl.config.own.trial import changes_state, has_state_dict, try_part
