"""``klrl export RUN PLACE``: writes a policy as an ONNX file, or in Hugging Face's format."""

from __future__ import annotations

from klrl.base.errors import ConfigError
from klrl.base.files import expanded
from klrl.cli.wrapper import Parser
from klrl.config import LanguageConfig
from klrl.domains import domain_of
from klrl.runs.find import find_run
from klrl.runs.machine import check_language_packages, require
from klrl.runs.resume import stored_config


def export_command(argv: list[str]) -> int:
    """Write a run's policy to a file or a folder; return the exit code."""
    args = parser().parse_args(argv)
    config = stored_config(find_run(args.run, "RUN"))
    how = {"merge": args.merge, "model": args.model}
    if isinstance(config, LanguageConfig):
        check_language_packages(config)
    else:
        for option in (key for key, value in how.items() if value):
            raise ConfigError(f"--{option}: RUN={args.run} is a control run; drop --{option}")
        for package in ("onnx", "onnxscript", "onnxruntime"):
            require(package, f"FILE={args.place}", "pip install 'klrl[onnx]'")
        how = {}
    export = domain_of(config).function("export")
    print(export(args.run, expanded(args.place), which=args.which, **how))
    return 0


def parser() -> Parser:
    """Return the command's argument parser."""
    parser = Parser(
        prog="klrl export",
        description="Write a policy. Of a control run: an ONNX file that maps the environment's "
        "observations to its actions. Of a language run: a folder as save_pretrained makes it, "
        "with all weights or, with LoRA, the adapters; with the tokenizer, and the author's "
        "config and generation config.",
    )
    parser.add_argument("run", metavar="RUN", help="the run folder, such as outputs/NAME")
    where = "where to write; it must not exist: FILE.onnx for control, a folder for language"
    parser.add_argument("place", metavar="PLACE", help=where)
    parser.add_flag("--merge", "language: add the adapters to the weights")
    parser.add_argument("--which", choices=("last", "best"), default="last", help="the checkpoint")
    add_model(parser)
    return parser


def add_model(parser: Parser) -> None:
    """Add the option ``--model``."""
    where = "the folder of the run's base model (actor.model), if it was moved"
    parser.add_argument("--model", metavar="FOLDER", help=where)
