"""The run that ``klrl export`` and ``klrl verify`` are given."""

from __future__ import annotations

from klrl.base.errors import ConfigError
from klrl.cli.wrapper import Parser
from klrl.config import LanguageConfig
from klrl.runs.find import find_run
from klrl.runs.machine import check_language_packages
from klrl.runs.resume import stored_config


def check_language_run(run: str) -> None:
    """Refuse a run of no language policy, before torch and transformers are imported."""
    config = stored_config(find_run(run, "RUN"))
    if not isinstance(config, LanguageConfig):
        raise ConfigError(f"RUN={run}: is a control run; give a language run")
    check_language_packages(config)


def add_model(parser: Parser) -> None:
    """The option ``--model``."""
    where = "where the run's base model is now, if it is not where it was (actor.model)"
    parser.add_argument("--model", metavar="FOLDER", help=where)
