"""What the command line says: its help, and one line for each way to get a setting wrong."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from klrl.config import GROUPS, SCHEMAS, SWEEP_GROUPS, SWEEP_SCHEMAS, conf_dir
from klrl.errors import ConfigError

USAGE = """\
klrl: KL-regularised reinforcement learning on TorchRL

  python -m klrl env=pendulum kl.coef=0.1           train; writes a folder below outputs/
  python -m klrl -m kl=legacy,retrieve seed=0,1     a sweep: every combination, one folder each
  python -m klrl -m sweep=NAME ...                  ... in outputs/NAME; started again, it goes on
  python -m klrl experiment=sort_digits             a language policy
  python -m klrl resume=outputs/RUN                 go on where a run stopped

The same as klrl env=pendulum ..., where klrl is installed. Other commands, each with a --help:
  klrl evaluate outputs/RUN                         play the policy
  klrl ls                                           runs and sweeps, and how far they have come
  klrl report outputs/SWEEP                         compare runs in one offline page
  klrl diff outputs/RUN outputs/RUN                 two runs side by side
  klrl plan -m ...                                  what a sweep would cost
  klrl doctor                                       are this machine's KL numbers true?

Choose with GROUP=CHOICE, set with KEY=VALUE. All settings of a job with their values:
  python -m klrl env=hopper --cfg job               their comments stand in conf/GROUP/CHOICE.yaml
"""
FLAGS = """\
Flags: -m (--multirun) sweep; --cfg job print the settings; --config-dir DIR your own choices;
       --version; --hydra-help Hydra's own flags. HYDRA_FULL_ERROR=1 shows tracebacks.
"""


def help_text(config_dir: str | None = None) -> str:
    """The answer to ``--help``: usage, then every group with its choices and what they are."""
    lines = [USAGE]
    default = _defaults()
    for group in (*GROUPS, "experiment", *SWEEP_GROUPS):
        lines.append(f"{group}{' (of a sweep)' * (group in SWEEP_GROUPS)}")
        files = sorted(_choice_files(group, config_dir).items())
        files.sort(key=lambda item: item[0] != default.get(group))
        for name, path in files:
            mark = "*" if name == default.get(group) else " "
            lines.append(f"  {mark} {name:<15} {_summary(path)}")
    return "\n".join([*lines, "", "* the default", "", FLAGS])


def choices(group: str, config_dir: str | None = None) -> list[str]:
    """The names that ``group=`` accepts."""
    return sorted(_choice_files(group, config_dir))


def _choice_files(group: str, config_dir: str | None) -> dict[str, Path]:
    folders = [conf_dir() / group] + ([Path(config_dir) / group] if config_dir else [])
    return {path.stem: path for folder in folders for path in folder.glob("*.yaml")}


def _summary(path: Path) -> str:
    comments = (
        line[2:]
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("# ") and not line.startswith("# @")
    )
    return next(comments, "")


def _defaults() -> dict[str, str]:
    files = (conf_dir() / "config.yaml", conf_dir() / "sweep.yaml")
    entries = [entry for file in files for entry in OmegaConf.load(file).defaults]
    pairs = (next(iter(e.items())) for e in entries if OmegaConf.is_dict(e))
    return {str(group): str(name) for group, name in pairs if name is not None}


def explain(error: Exception, overrides: Sequence[str], config_dir: str | None) -> ConfigError:
    """Turn what Hydra or OmegaConf raised into a setting, its value and the remedy.

    Args:
        error: the exception of ``hydra.compose``.
        overrides: the command line's ``key=value`` words.
        config_dir: the user's own ``--config-dir``, if any.
    """
    text = str(error)
    if found := re.search(r"Could not find '([\w/]+)/([^/']+)'", text):
        return _wrong_choice(found[1], found[2], config_dir)
    if found := re.search(r"Could not override '([^']+)'", text):
        return _wrong_key(found[1], overrides, config_dir)
    if found := re.search(r"In '(\w+)/(\w+)'.*full_key: (\w+)\.(\w+)", text, re.DOTALL):
        return _preset_against_choice((found[1], found[2]), (found[3], found[4]), overrides)
    if found := re.search(r"Error merging override (\S+?)=(.*)", text, re.DOTALL):
        return ConfigError(f"{found[1]}={(found[2].splitlines() or [''])[0]}: {_wanted(error)}")
    if "Config group override must be" in text:
        nulled = next(o for o in overrides if o.endswith("=null"))
        return _wrong_choice(nulled.split("=")[0], "null", config_dir)
    if "Ambiguous value" in text:
        word = re.search(r"argument '([^']+)'", text)
        named = word[1] if word else "a list of values"
        return ConfigError(f"{named}: several values are a sweep; add -m, or quote one string")
    first = " ".join(text.split("\nSee ")[0].split())
    return ConfigError(f"{' '.join(overrides)}: {first}")


def _preset_against_choice(
    preset: tuple[str, str], setting: tuple[str, str], overrides: Sequence[str]
) -> ConfigError:
    """A preset sets what a choice has not, as in ``experiment=sort_digits collector=vector``."""
    (kind, name), (group, key) = preset, setting
    given = [word.split("=", 1)[1] for word in overrides if word.startswith(f"{group}=")]
    chosen = f"{group}={given[-1]}" if given else f"the chosen {group}"
    larger = [word for word in overrides if word.startswith("experiment=")]
    if larger and not given and kind != "experiment":
        chosen = f"{larger[-1]}'s {group}"
    return ConfigError(
        f"{kind}={name}: sets {group}.{key}, which {chosen} has not; drop one of the two"
    )


def _wanted(error: Exception) -> str:
    cause = str(error.__cause__ or error)
    kinds = {"Float": "a number", "Integer": "a whole number", "Boolean": "true or false"}
    if found := re.search(r"could not be converted to (\w+)", cause):
        return f"give {kinds.get(found[1], 'a ' + found[1].lower())}"
    return " ".join(cause.split("\n")[0].split())


def _wrong_choice(group: str, name: str, config_dir: str | None) -> ConfigError:
    if group.startswith("hydra/"):
        kind = group.removeprefix("hydra/")
        return ConfigError(
            f"{group}={name}: no such {kind} is installed; pip install hydra-{name}-{kind}"
        )
    known = choices(group, config_dir)
    return ConfigError(
        f"{group}={name}: no such choice{_nearest(name, known)}; choices: {', '.join(known)}"
    )


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _wrong_key(key: str, overrides: Sequence[str], config_dir: str | None) -> ConfigError:
    """An unknown key: one that another choice of the group reads, or a typo."""
    value = next((o.lstrip("+~") for o in overrides if o.lstrip("+~").split("=")[0] == key), key)
    group, _, rest = key.partition(".")
    readers = _readers(group, rest, config_dir)
    current = _chosen(group, overrides)
    if readers and current not in readers:
        return ConfigError(
            f"{value}: {group}={current} never reads it; {_listed(group, readers)} "
            f"{'does' if len(readers) == 1 else 'do'}; drop it or choose so"
        )
    known = _all_keys(config_dir)
    hint = _nearest(key, known) or _nearest(group, [k for k in known if "." not in k])
    return ConfigError(f"{value}: no such setting{hint or '; see --help'}")


def _listed(group: str, names: Sequence[str]) -> str:
    return " and ".join(f"{group}={name}" for name in names)


def _readers(group: str, name: str, config_dir: str | None) -> list[str]:
    """The choices of a group whose schema has a field of this name."""
    schemas = (SCHEMAS | SWEEP_SCHEMAS).get(group, {})
    having = {s for s, node in schemas.items() if name in {f.name for f in fields(node)}}
    readers = []
    for name_of_choice, path in sorted(_choice_files(group, config_dir).items()):
        found = re.search(rf"/schema/{group}/(\w+)@", path.read_text(encoding="utf-8"))
        if found and found[1] in having:
            readers.append(name_of_choice)
    return readers


def _chosen(group: str, overrides: Sequence[str]) -> str:
    given = [o.split("=", 1)[1] for o in overrides if o.startswith(f"{group}=")]
    return given[-1] if given else _of_experiment(overrides).get(group, _defaults().get(group, "?"))


def _of_experiment(overrides: Sequence[str]) -> dict[str, str]:
    """The choices that ``experiment=NAME`` makes."""
    names = [o.split("=", 1)[1] for o in overrides if o.startswith("experiment=")]
    path = conf_dir() / "experiment" / f"{names[-1]}.yaml" if names else None
    if path is None or not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8")
    return dict(re.findall(r"- override /(\w+): (\w+)", text))


def _all_keys(config_dir: str | None) -> list[str]:
    keys = [*GROUPS, *SWEEP_GROUPS, "experiment", "sweep"]
    for group, schemas in (SCHEMAS | SWEEP_SCHEMAS).items():
        keys += [f"{group}.{f.name}" for node in schemas.values() for f in fields(node)]
    root = OmegaConf.load(conf_dir() / "config.yaml")
    assert isinstance(root, DictConfig)
    for name in map(str, root):
        if name in ("defaults", "hydra"):
            continue
        value = root[name]
        nested = [f"{name}.{key}" for key in map(str, value)] if OmegaConf.is_dict(value) else []
        keys += nested or [name]
    return sorted(set(keys))
