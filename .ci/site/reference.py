"""The pages of the site that follow from klrl's declarations: settings, metrics, commands, Python.

Each function returns the Markdown of a page. ``klrl --help`` and ``--cfg job`` read the same
declarations, so nothing is said twice.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types
from omegaconf import MISSING

from klrl.base.errors import ConfigError
from klrl.cli.main import COMMANDS
from klrl.cli.wrapper import run_command
from klrl.config import ALL_CHOICES, SWEEP_GROUPS, Ungrouped, fields
from klrl.config.choices import ALL_GROUPS, SET_BY_KLRL, Choice
from klrl.config.explain import defaults, described
from klrl.config.fields import nested_schema
from klrl.config.nodes import notes_of
from klrl.domains import CONTROL, LANGUAGE
from klrl.runs.metrics import METRICS, fill

#: The packages whose ``__all__`` is documented.
PACKAGES = {
    "klrl": "Train, load, compare",
    "klrl.kl": "KL estimators, references, controllers",
    "klrl.envs.transforms": "TorchRL transforms for control",
    "klrl.envs.llm.transforms": "TorchRL transforms for language",
    "klrl.losses": "Losses; as `klrl.objectives` in TorchRL's layout",
}
#: The types of klrl/config/fields.py whose name says more than their parts.
_WORDS = {
    "Values": "names and values",
    "Words": "a name or a list",
    "Place": "a path",
    "Part": "a custom part, or null",
    "Wrapper": "a Gymnasium wrapper or a custom part",
    "Compile": "auto, false, jit, aot",
}
_SIMPLE = {float: "number", int: "whole number", bool: "true or false", str: "text", Any: "any"}


def cell(text: str) -> str:
    """Text in a cell of a table."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines) + "\n"


def kind(hint: object) -> str:
    """The words for a setting's type and range."""
    for name, said in _WORDS.items():
        if hint == getattr(fields, name):
            return said
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return kind(args[0]) + _range(hint)
    if origin is Literal:
        return ", ".join(map(str, args))
    if origin in (Union, UnionType):
        return " or ".join("null" if each is type(None) else kind(each) for each in args)
    if origin is list:
        return f"list of: {kind(args[0])}"
    if origin is dict:
        return "names and values"
    return _SIMPLE.get(hint, getattr(hint, "__name__", str(hint)))  # type: ignore[arg-type,call-overload]


def _range(hint: object) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = []
    for mark in getattr(hint, "__metadata__", ()):
        for each in getattr(mark, "metadata", [mark]):
            for name, sign in signs.items():
                limit = getattr(each, name, None)
                if isinstance(each, annotated_types.BaseMetadata) and limit is not None:
                    found += [f"{sign} {limit:g}"] if limit < 2**60 else []
    return " " + ", ".join(found) if found else ""


def value(default: object) -> str:
    """A default as the command line takes it."""
    if default == MISSING:
        return "required"
    if default is None or isinstance(default, bool):
        return f"`{ {None: 'null', True: 'true', False: 'false'}[default] }`"
    if isinstance(default, float):
        return f"`{default:g}`"
    return f"`{default}`" if default not in ("", [], {}) else "empty"


def settings_of(schema: type, prefix: str, values: Mapping[str, object]) -> list[tuple[str, ...]]:
    """Rows of a schema's settings, nested ones included: name, type, default, comment."""
    notes, hints = notes_of(schema), get_type_hints(schema, include_extras=True)
    rows: list[tuple[str, ...]] = []
    made = schema()
    for each in dataclasses.fields(schema):
        if each.name in SET_BY_KLRL:
            continue
        if nested := nested_schema(each):
            inner = dict(values.get(each.name) or dataclasses.asdict(getattr(made, each.name)))
            rows += settings_of(nested, f"{prefix}{each.name}.", inner)
        else:
            default = values.get(each.name, getattr(made, each.name))
            name, note = f"`{prefix}{each.name}`", notes.get(each.name, "")
            rows.append((name, kind(hints[each.name]), value(default), note))
    return rows


def _choice(group: str, name: str, choice: Choice) -> str:
    rows = settings_of(choice.schema, f"{group}.", dict(choice.values))
    domains = "" if group in SWEEP_GROUPS else f" ({', '.join(choice.domains)})"
    star = " The default." if defaults().get(group) == name else ""
    said = choice.what[:1].upper() + choice.what[1:]
    shown = table(("setting", "type", "default", "meaning"), rows) if rows else "No settings.\n"
    return f"### `{group}={name}`{domains}\n\n{said.rstrip('.')}.{star}\n\n{shown}"


def settings_page() -> str:
    """Every setting, from the schemas in klrl/config."""
    parts = [
        "# Settings\n\nGenerated from the declarations in `klrl/config`. `klrl env=hopper --cfg "
        "job` prints the settings of one job with the values of its presets; [how settings "
        "work](../settings.md).\n",
        "## Outside the groups\n\n"
        + table(("setting", "type", "default", "meaning"), settings_of(Ungrouped, "", _root())),
    ]
    for group in ALL_GROUPS:
        choices = ALL_CHOICES.get(group, {})
        presets = {k: v for k, v in described(group).items() if k not in choices}
        parts.append(f"## {group}{' (of a sweep)' * (group in SWEEP_GROUPS)}\n")
        if presets:
            rows = [(f"`{group}={name}`", what) for name, what in presets.items()]
            parts.append(table(("preset", "what it is"), rows))
        parts += [_choice(group, name, choice) for name, choice in choices.items()]
    return "\n".join(parts)


@cache
def _root() -> dict[str, object]:
    from klrl.config.compose import compose

    composed = compose([], None)
    return {each.name: composed[each.name] for each in dataclasses.fields(Ungrouped)}


def metrics_page() -> str:
    """Every metric, from klrl/runs/metrics.yaml."""
    parts = [
        "# Metrics\n\nGenerated from `klrl/runs/metrics.yaml`. A row of `metrics.jsonl` is one "
        "iteration; KLs are in nats. A metric that a job does not compute is missing in its "
        "rows.\n"
    ]
    for domain in (CONTROL, LANGUAGE):
        rows = [
            (f"`{metric.name}`", fill(metric.what, domain), fill(metric.unit, domain))
            for metric in METRICS.values()
            if metric.domain in (None, domain.name)
        ]
        heads = ("metric", "meaning", "unit")
        parts.append(f"## {domain.name.capitalize()}\n\n{table(heads, rows)}")
    return "\n".join(parts)


def help_of(command: str) -> str:
    """What ``klrl COMMAND --help`` prints."""
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit, ConfigError):
        run_command(command, ["--help"])
    return printed.getvalue()


def command_line_page() -> str:
    """The help text of every command."""
    parts = ["# Command line\n\nWhat `klrl COMMAND --help` prints. [Examples](../commands.md).\n"]
    for command, what in COMMANDS.items():
        words = "" if command == "run" else f" {command}"
        parts.append(f"## klrl{words}\n\n{what[:1].upper() + what[1:]}\n")
        parts.append(f"```text\n{help_of(command).rstrip()}\n```\n")
    return "\n".join(parts)


def home_of(package: str, name: str) -> str:
    """The dotted path where a public name is defined."""
    module = import_module(package)
    where = {**getattr(module, "WHERE", {}), **getattr(module, "_WHERE", {})}
    if package == "klrl.envs.llm.transforms":
        return home_of(f"{package}.kl", name)
    if name in where:
        return f"{where[name]}.{name}"
    source = Path(str(module.__file__)).read_text("utf-8")
    found = re.search(rf"^from ([\w.]+) import .*\b{name}\b", source, re.MULTILINE)
    return f"{found[1] if found else package}.{name}"


def python_page(package: str) -> str:
    """The names of a package, each an instruction for mkdocstrings."""
    what, parts = PACKAGES[package], []
    for name in sorted(import_module(package).__all__, key=str.lower):
        home = home_of(package, name)
        if name != "__version__" and home not in PACKAGES and _page_of(home) in (None, package):
            parts.append(f"::: {home}\n")
    links = ""
    if package == "klrl.kl":
        others = (f"[{each}]({each}.md)" for each in PACKAGES if each.startswith("klrl.envs"))
        links = f" It has the transforms of {' and '.join(others)}, too."
    return f"# {package}\n\n{what}. `from {package} import ...`{links}\n\n" + "\n".join(parts)


def _page_of(home: str) -> str | None:
    """The page of a name that is defined in klrl.envs; other packages export it too."""
    return next((each for each in PACKAGES if "envs" in each and home.startswith(each)), None)


def pages() -> dict[str, str]:
    """Map the path of each generated page to its Markdown."""
    made = {
        "reference/settings.md": settings_page(),
        "reference/metrics.md": metrics_page(),
        "reference/command_line.md": command_line_page(),
    }
    return made | {f"reference/{each}.md": python_page(each) for each in PACKAGES}
