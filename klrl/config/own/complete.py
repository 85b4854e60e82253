"""A job's custom parts, made complete: found, their args typed, their sources noted."""

from __future__ import annotations

from klrl.config.fields import OwnPart
from klrl.config.jobs import JobConfig
from klrl.config.own.args import typed_args
from klrl.config.own.find import named
from klrl.config.own.parts import own_parts
from klrl.config.own.sources import named_sources, own_source
from klrl.config.own.trust import name_code


def complete(config: JobConfig) -> None:
    """Find the custom parts of a job, in place: type their args, note their sources."""
    for setting, part in own_parts(config):
        complete_part(setting, part)
        source = own_source(named(setting, part), str(part.target))
        part.path, part.source, part.version = source.folder, source.digest, source.version
        if setting == "env":
            config.env.id = part.target  # the task's name
    config.env.sources = named_sources(config.env)
    name_code(config)


def complete_part(setting: str, part: OwnPart) -> None:
    """Type the args of one part, in place; its source stays."""
    part.args = typed_args(setting, part)
