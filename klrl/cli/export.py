"""``klrl export RUN FOLDER``: writes a language run's policy in Hugging Face's format."""

from __future__ import annotations

from klrl.base.errors import ConfigError
from klrl.base.files import expanded
from klrl.cli.wrapper import Parser
from klrl.config import LanguageConfig
from klrl.runs.find import find_run
from klrl.runs.machine import check_language_packages
from klrl.runs.resume import stored_config


def export_command(argv: list[str]) -> int:
    """Write a run's policy to a folder; return the exit code."""
    args = parser().parse_args(argv)
    check_language_run(args.run)

    from klrl.language.run.export import export_run

    folder = expanded(args.folder)
    print(export_run(args.run, folder, which=args.which, merge=args.merge, model=args.model))
    return 0


def parser() -> Parser:
    """Return the command's argument parser."""
    parser = Parser(
        prog="klrl export",
        description="Write a language run's policy as save_pretrained does: all weights, or with "
        "LoRA the adapters; with the tokenizer, and the author's config and generation config.",
    )
    parser.add_argument("run", metavar="RUN", help="the run folder, as outputs/NAME")
    parser.add_argument("folder", metavar="FOLDER", help="where to write; it must not exist")
    parser.add_flag("--merge", "add the adapters to the weights")
    parser.add_argument("--which", choices=("last", "best"), default="last", help="the checkpoint")
    add_model(parser)
    return parser


def check_language_run(run: str) -> None:
    """Refuse a control run, or missing language packages, before torch is imported."""
    config = stored_config(find_run(run, "RUN"))
    if not isinstance(config, LanguageConfig):
        raise ConfigError(f"RUN={run}: this is a control run; give a language run")
    check_language_packages(config)


def add_model(parser: Parser) -> None:
    """Add the option ``--model``."""
    where = "the folder of the run's base model (actor.model), if it was moved"
    parser.add_argument("--model", metavar="FOLDER", help=where)
