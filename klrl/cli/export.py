"""``klrl export RUN FOLDER``: a language run's policy in Hugging Face's format."""

from __future__ import annotations

from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.cli.wrapper import Parser


def export_command(argv: list[str]) -> int:
    """Write a policy; returns the exit code.

    Raises:
        ConfigError: no such run or checkpoint, a control run, or a folder that exists.
        OSError: the folder cannot be written.
    """
    args = parser().parse_args(argv)
    check_language_run(args.run)

    from klrl.language.export import export_run

    print(export_run(args.run, Path(args.folder).expanduser(), which=args.which, merge=args.merge))
    return 0


def check_language_run(run: str) -> None:
    """Refuse a run of no language policy, before torch and transformers are imported.

    Raises:
        ConfigError: no such run, a control run, or the extra ``language`` is not installed.
    """
    from klrl.config import LanguageConfig
    from klrl.runs.find import find_run
    from klrl.runs.machine import check_language_packages
    from klrl.runs.resume import stored_config

    config = stored_config(find_run(run, "RUN"))
    if not isinstance(config, LanguageConfig):
        raise ConfigError(f"RUN={run}: is a control run; give a language run")
    check_language_packages(config)


def parser() -> Parser:
    """The argument list."""
    parser = Parser(
        prog="klrl export",
        description="Write a language run's policy as save_pretrained does: all weights, or with "
        "LoRA the adapters; with the tokenizer, and the author's config and generation config.",
    )
    parser.add_argument("run", metavar="RUN", help="the run folder, as outputs/NAME")
    parser.add_argument("folder", metavar="FOLDER", help="where to write; it must not exist")
    parser.add_argument("--merge", action="store_true", help="add the adapters to the weights")
    parser.add_argument("--which", choices=("last", "best"), default="last", help="the checkpoint")
    return parser
