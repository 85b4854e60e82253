"""A script that completes klrl's commands, flags, settings and values, or files and folders.

    eval "$(klrl completion bash)"       in ~/.bashrc
    eval "$(klrl completion zsh)"        in ~/.zshrc, after compinit

At each <TAB> it runs klrl completion query -- WORDS...
"""

# Nothing here imports torch, since a completion must be fast.
from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module, resources
from itertools import pairwise

from klrl.base.errors import ConfigError
from klrl.cli.main import COMMANDS
from klrl.cli.wrapper import Parser

SHELLS = ("bash", "zsh")

#: Flags of ``run`` and ``plan``.
_FLAGS = (
    *("--cfg", "--config-dir", "--help", "--hydra-help", "--info", "--multirun", "--package"),
    *("--resolve", "--version", "-m"),
)
#: Usual values of settings that accept others too.
_USUAL = {"device": ("auto", "cpu", "cuda")}


def completion_command(argv: list[str]) -> int:
    """Print a shell's script, or the completions of a query."""
    if argv[:1] == ["query"]:
        words = argv[2:] if argv[1:2] == ["--"] else argv[1:]
        print("\n".join(candidates(words or [""])))
        return 0
    if argv in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise ConfigError(f"{' '.join(argv) or 'no shell'}: give bash or zsh")
    script = resources.files("klrl.cli").joinpath(f"completion.{argv[0]}")
    print(script.read_text(encoding="utf-8"), end="")
    return 0


def candidates(words: Sequence[str]) -> list[str]:
    """Return the sorted completions of the last of the words after ``klrl``.

    A completion that ends in ``=`` or ``.`` can be completed further. If there are none, the shell
    offers files.
    """
    *before, current = words
    if before and before[0] in COMMANDS:
        listed = _of_command(before[0], before[1:], current)
    else:
        listed = [*(COMMANDS if not before else ()), *_of_run(before, current)]
    return sorted({word for word in listed if word.startswith(current) and word != current})


def _of_command(command: str, before: Sequence[str], current: str) -> Iterable[str]:
    if command in ("run", "plan"):
        return _of_run(before, current)
    if command == "completion":
        return SHELLS if not before else ()
    parser: Parser = import_module(f"klrl.cli.{command}").parser()
    # argparse has no public list of its flags.
    flags = parser._option_string_actions
    last = flags.get(before[-1]) if before else None
    if last is not None and last.nargs != 0:
        return list(last.choices) if last.choices else _USUAL.get(last.dest, ())
    if current.startswith("-"):
        return flags
    settings = _of_run(before, current) if command == "evaluate" and before else ()
    return [word for word in settings if word.startswith("env.")]


def _of_run(before: Sequence[str], current: str) -> Iterable[str]:
    """Yield flags, groups with their choices, and settings with their values."""
    from klrl.config import SWEEP_GROUPS
    from klrl.config.catalogue import choices, chosen, may_have, settings
    from klrl.config.choices import ALL_GROUPS

    signs = current[: len(current) - len(current.lstrip("+~"))]
    key, given, _ = current[len(signs) :].partition("=")
    folder = next((after for flag, after in pairwise(before) if flag == "--config-dir"), None)
    sweep = {"-m", "--multirun"} & set(before)
    known = {k: s for k, s in settings().items() if sweep or s.group not in SWEEP_GROUPS}
    if current.startswith("-") or before[-1:] == ["--config-dir"]:
        return _FLAGS
    if given:
        of_key: Sequence[str] = known[key].allowed if key in known else ()
        values = choices(key, folder) if key in ALL_GROUPS else of_key or _USUAL.get(key, ())
        return [f"{signs}{key}={value}" for value in values]
    if "." not in key:
        groups = [f"{each}=" for each in ALL_GROUPS if sweep or each not in SWEEP_GROUPS]
        heads = (f"{s.group}." if s.group else f"{s.key}=" for s in known.values())
        return [signs + word for word in (*groups, *heads, *["sweep="] * bool(sweep))]
    group = key.partition(".")[0]
    below = [setting for setting in known.values() if setting.group == group]
    current = chosen(group, before, folder)
    read = [s for s in below if may_have(s, current) and s.key.startswith(key)]
    # If no setting of the chosen presets fits, offer those of other choices.
    fitting = read or below
    return [f"{signs}{s.key}" + ("." if s.key == "env.kwargs" else "=") for s in fitting]
