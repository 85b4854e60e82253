"""``klrl completion bash|zsh``: a script that completes klrl's command line in a shell.

The script runs ``klrl completion query -- WORDS...`` at each <TAB>, so nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module, resources
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.base.files import expanded
from klrl.cli.main import COMMANDS
from klrl.cli.wrapper import Parser

SHELLS = ("bash", "zsh")

_HELP = """\
A script that completes klrl's commands, flags, settings, values and run folders.

  eval "$(klrl completion bash)"       in ~/.bashrc
  eval "$(klrl completion zsh)"        in ~/.zshrc, after compinit
"""

#: Flags of ``run`` and ``plan``, and the values that follow them.
_RUN_FLAGS: dict[str, tuple[str, ...]] = {
    "--cfg": ("job", "hydra", "all"),
    "--config-dir": (),
    "--help": (),
    "--hydra-help": (),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--multirun": (),
    "--package": (),
    "--resolve": (),
    "--version": (),
    "-m": (),
}
#: Settings whose value is a run folder, and settings whose value is any path.
_RUNS = ("resume", "actor.init", "reference.path")
_PATHS = ("env.data", "env.eval_data", "actor.model", "hydra.run.dir", "hydra.sweep.dir")
#: Usual values of settings without a closed list.
_USUAL = {"device": ("auto", "cpu", "cuda")}


def completion_command(argv: list[str]) -> int:
    """Print a shell's script, or the completions of a query.

    Raises:
        ConfigError: the shell is neither bash nor zsh.
    """
    if argv[:1] == ["query"]:
        words = argv[2:] if argv[1:2] == ["--"] else argv[1:]
        print("\n".join(candidates(words or [""])))
        return 0
    if argv in (["--help"], ["-h"]):
        print(_HELP)
        return 0
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise ConfigError(f"{' '.join(argv) or 'no shell'}: give bash or zsh")
    script = resources.files("klrl.cli").joinpath(f"completion.{argv[0]}")
    print(script.read_text(encoding="utf-8"), end="")
    return 0


def candidates(words: Sequence[str]) -> list[str]:
    """The completions of the last word.

    Args:
        words: those behind ``klrl``, up to the cursor.

    Returns:
        Whole words, sorted. One that ends in ``=``, ``.``, ``/`` or ``,`` can be completed further.
    """
    *before, current = words
    if before and before[0] in COMMANDS:
        command, before = before[0], before[1:]
        listed = _of_command(command, before, current)
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
        usual = _USUAL.get(last.dest, ())
        return list(last.choices or usual) or (paths(current) if last.type is None else [])
    if current.startswith("-"):
        return flags
    arguments = [word for word in before if not word.startswith("-")]
    if command == "export" and arguments:
        return paths(current, folders_only=True) if len(arguments) == 1 else ()
    if command == "evaluate" and arguments:
        return [word for word in _settings(before, current) if word.startswith("env.")]
    return run_folders(current) if command != "doctor" else ()


# --------------------------------------------------------------------------- overrides of a job


def _of_run(before: Sequence[str], current: str) -> Iterable[str]:
    """Flags, groups with their choices, settings with their values."""
    last = before[-1] if before else ""
    if last == "--config-dir":
        return paths(current, folders_only=True)
    if _RUN_FLAGS.get(last):
        return _RUN_FLAGS[last]
    if current.startswith("-"):
        return _RUN_FLAGS
    return _settings(before, current)


def _settings(before: Sequence[str], current: str) -> Iterable[str]:
    signs = current[: len(current) - len(current.lstrip("+~"))]
    key, given, value = current[len(signs) :].partition("=")
    config_dir = _after("--config-dir", before)
    if given:
        return [f"{signs}{key}={value}" for value in _values(key, value, before, config_dir)]
    return [signs + word for word in _keys(key, before, config_dir)]


def _keys(key: str, before: Sequence[str], config_dir: str | None) -> list[str]:
    """Groups and settings; a group's settings only once its dot is typed."""
    from klrl.config import SWEEP_GROUPS
    from klrl.config.catalogue import ALL_GROUPS, chosen, schema_of, settings

    sweep = {"-m", "--multirun"} & set(before)
    groups = [group for group in ALL_GROUPS if sweep or group not in SWEEP_GROUPS]
    known = [s for s in settings().values() if sweep or s.group not in SWEEP_GROUPS]
    if "." not in key:
        heads = {f"{setting.group}." if setting.group else f"{setting.key}=" for setting in known}
        return [*(f"{group}=" for group in groups), *heads, *(["sweep="] if sweep else [])]
    group = key.partition(".")[0]
    below = [setting for setting in known if setting.group == group]
    schema = schema_of(group, chosen(group, before, config_dir), config_dir)
    read = [setting for setting in below if not setting.schemas or schema in setting.schemas]
    # Settings of other choices are offered where the chosen one has none that fit.
    fitting = [s for s in read if s.key.startswith(key)] or below
    return [f"{s.key}." if s.key == "env.kwargs" else f"{s.key}=" for s in fitting]


def _values(key: str, value: str, before: Sequence[str], config_dir: str | None) -> Iterable[str]:
    """Values of a closed list, or paths; in a sweep also those after a comma."""
    from klrl.config.catalogue import ALL_GROUPS, choices, settings

    if key in _RUNS:
        return run_folders(value)
    if key in _PATHS:
        return paths(value)
    if key == "sweep":
        return [path.parent.name for path in Path("outputs").glob("*/sweep.json")]
    known = settings()
    if key in ALL_GROUPS:
        listed: Sequence[str] = choices(key, config_dir)
    else:
        listed = known[key].allowed if key in known else ()
    listed = listed or _USUAL.get(key, ())
    sweep = {"-m", "--multirun"} & set(before)
    head = value.rpartition(",")[0] + "," if sweep and "," in value else ""
    used = head.split(",")
    return [head + each for each in listed if each not in used]


def _after(flag: str, words: Sequence[str]) -> str | None:
    """The word behind a flag."""
    places = [i for i, word in enumerate(words[:-1]) if word == flag]
    return words[places[-1] + 1] if places else None


# ---------------------------------------------------------------------------------------- paths


def run_folders(current: str) -> list[str]:
    """Run folders, and other folders with a slash; below ``outputs`` if nothing is typed."""
    if not current and Path("outputs").is_dir():
        current = "outputs/"
    return _paths(
        current, lambda entry: entry.is_dir(), lambda path: (path / "manifest.json").is_file()
    )


def paths(current: str, *, folders_only: bool = False) -> list[str]:
    """Files, and folders with a slash behind them."""
    return _paths(current, lambda entry: entry.is_dir() or not folders_only, Path.is_file)


def _paths(
    current: str, wanted: Callable[[os.DirEntry[str]], bool], last: Callable[[Path], bool]
) -> list[str]:
    """The completions of a path's last part.

    Args:
        current: the path so far.
        wanted: whether an entry is listed.
        last: whether a path is complete; others end in a slash.
    """
    head, _, tail = current.rpartition("/")
    shown = f"{head}/" if "/" in current else ""
    try:
        with os.scandir(expanded(shown or ".")) as scanned:
            names = [
                entry.name
                for entry in scanned
                if entry.name.startswith(tail)
                and (tail.startswith(".") or not entry.name.startswith("."))
                and wanted(entry)
            ]
    except OSError:
        return []
    root = expanded(shown or ".")
    return [f"{shown}{name}" + ("" if last(root / name) else "/") for name in names]
