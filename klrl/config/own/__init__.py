# ruff: noqa: F401 (these are the names of klrl.config.own)
"""Custom parts (docs/extending.md). No torch in here, but the user's module may import it."""

from klrl.config.own.find import Unfit, errors_of, find_target, make_own
from klrl.config.own.parts import own_parts
from klrl.config.own.sources import (
    changed_sources,
    check_sources,
    complete,
    complete_part,
    manifest_of,
)
from klrl.config.own.trial import make_tried, moved_by, saves
