"""Writes the text of ``--help``, and one-line messages for wrong settings.

Both list groups, choices and settings, by the schemas and the YAML files of klrl and
``--config-dir``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml
from hydra.errors import OverrideParseException

from klrl.base.errors import ConfigError
from klrl.base.files import SMALL
from klrl.base.text import nearest
from klrl.config import ALL_CHOICES, SWEEP_GROUPS, Ungrouped, conf_dir
from klrl.config.checks import REMEDIES, UnknownSettingError
from klrl.config.choices import ALL_GROUPS, SET_BY_KLRL
from klrl.config.fields import Settings
from klrl.config.given import Given
from klrl.config.objectives import PRESETS
from klrl.config.placement import OWN


@dataclass(frozen=True)
class KnownSetting:
    """A setting of the command line."""

    key: str  # such as ``kl.estimator``
    listed: bool  # whether its default is a list
    schemas: tuple[str, ...] = ()  # choices that have the setting; empty if it is in no group


def choice_files(group: str, config_dir: str | None = None) -> dict[str, Path]:
    """Map the names of a group's YAML files to paths; klrl's files override the user's."""
    folders = ([Path(config_dir) / group] if config_dir else []) + [conf_dir() / group]
    found = (path for folder in folders for path in folder.glob("*.yaml") if path.is_file())
    return {path.stem: path for path in found if path.stat().st_size <= SMALL}


def described(group: str, config_dir: str | None = None) -> dict[str, str]:
    """Map each name that ``group=`` accepts to its line in ``--help``."""
    found = {}
    for name, path in choice_files(group, config_dir).items():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        notes = (line[2:] for line in lines if line.startswith("# ") and line[2:3] != "@")
        found[name] = next(notes, "")
    found |= {name: each.what for name, each in ALL_CHOICES.get(group, {}).items()}
    found |= {name: each.what for name, each in PRESETS.get(group, {}).items()}
    return dict(sorted(found.items()))


def declared_in(group: str) -> list[str]:
    """List the files and folders of klrl that declare the choices of a group."""
    schemas = (each.schema.__module__ for each in ALL_CHOICES.get(group, {}).values())
    files = [f"{each.replace('.', '/')}.py" for each in dict.fromkeys(schemas)]
    return [*files, *["klrl/config/objectives.py"] * (group in PRESETS), f"conf/{group}"]


@cache
def settings() -> dict[str, KnownSetting]:
    """Return all settings that users can set, by key."""
    by_key: dict[str, KnownSetting] = {}
    for group, registered in ALL_CHOICES.items():
        for schema, choice in registered.items():
            for name, default in _defaults(choice.schema()):
                key = f"{group}.{name}"
                before = by_key[key].schemas if key in by_key else ()
                by_key[key] = KnownSetting(key, isinstance(default, list), (*before, schema))
    by_key |= {name: KnownSetting(name, False) for name, _ in _defaults(Ungrouped())}
    settable = (key for key in sorted(by_key) if key.rpartition(".")[2] not in SET_BY_KLRL)
    return {key: by_key[key] for key in settable}


def _defaults(made: Settings, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted name and the default of each setting in a schema, nested ones included."""
    for name, value in vars(made).items():
        if isinstance(value, Settings):
            yield from _defaults(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@cache
def defaults() -> dict[str, str]:
    """Map each group to its default choice, if it has one."""
    texts = [(conf_dir() / f"{name}.yaml").read_text("utf-8") for name in ("config", "sweep")]
    return {
        group: name
        for text in texts
        for group, name in re.findall(r"^  - (\w+): (\w+)", text, re.MULTILINE)
        if name != "null"
    }


def chosen(group: str, given: Sequence[Given], config_dir: str | None = None) -> str:
    """Return a group's choice: of the overrides, else of the experiment, the env or the default.

    An experiment or env has the choices of the YAML that it is based on.
    """
    found = {each.key: each.value for each in given}
    for preset in ("experiment", "env"):
        files = choice_files(preset, config_dir)
        name = found.get(preset, defaults().get(preset, ""))
        while path := files.pop(name, None):
            entries = (yaml.safe_load(path.read_text("utf-8")) or {}).get("defaults", [])
            for each in entries:
                if isinstance(each, dict):
                    ((key, value),) = each.items()
                    found.setdefault(key.removeprefix("override /"), value)
            name = next((each for each in map(str, entries) if each in files), "")
    return found.get(group, defaults().get(group, "?"))


def help_text(config_dir: str | None = None) -> str:
    """Return the text of ``--help``: usage, then every group with its choices, one per line."""
    lines = []
    default = defaults()
    found = {group: described(group, config_dir) for group in ALL_GROUPS}
    width = max(len(name) for names in found.values() for name in names)
    for group in ALL_GROUPS:
        lines.append(f"{group}{' (of a sweep)' * (group in SWEEP_GROUPS)}")
        for name in sorted(found[group], key=lambda name: name != default.get(group)):
            mark = "*" if name == default.get(group) else " "
            lines.append(f"  {mark} {name:<{width}}  {found[group][name]}")
    return Path(__file__).with_name("usage.txt").read_text("utf-8").format(groups="\n".join(lines))


def explain(error: Exception, given: Sequence[Given], config_dir: str | None) -> ConfigError:
    """Turn an exception of ``hydra.compose`` into a one-line error with a remedy."""
    if isinstance(error, UnknownSettingError):  # of a YAML, or given with ++
        return _of_yaml(error.key, given, config_dir) or wrong_key(error.key, given, config_dir)
    text = str(error)
    if match := re.search(r"In '(\w+)/(\w+)': Could not load '(\w+)/(\w+)'", text):
        meant = nearest(match[4], described(match[3], config_dir)) or "; name another"
        return ConfigError(
            f"{match[1]}={match[2]}: starts from {match[3]}={match[4]}, which does not exist{meant}"
        )
    if match := re.search(r"Could not find '(\w+)/([^']*)'", text):
        return _wrong_choice(match[1], match[2], config_dir)
    if match := re.search(r"Could not override '([^']+)'", text):
        return wrong_key(match[1], given, config_dir)
    if match := re.search(r"Error merging override \+*(\S+?)=(.*)", text):  # of list and dictionary
        remedy = REMEDIES["dict" if match[2].startswith("[") else "list"]
        return ConfigError(f"{match[1]}={match[2]}: {remedy.format(key=match[1], value=match[2])}")
    if match := re.search(r"force-add of config groups is not supported: '\++([^']+)'", text):
        return ConfigError(f"++{match[1]}: this is a choice; write {match[1]}")
    if match := re.search(r"An item is already at '([^']+)'", text):
        return ConfigError(f"+{match[1]}: the setting exists already; drop the +")
    if "Config group override must be" in text:  # the value is null or a number
        for each in given:
            if each.key in ALL_GROUPS and each.value not in described(each.key, config_dir):
                return _wrong_choice(each.key, each.value, config_dir)
    if "Ambiguous value" in text:
        match = re.search(r"argument '([^']+)'", text)
        override = match[1] if match else "a list of values"
        key, _, value = override.partition("=")
        if key in settings() and settings()[key].listed:
            return ConfigError(f"{override}: give a list, as in {key}=[{value}]")
        return ConfigError(f"{override}: several values are a sweep; add -m, or quote one string")
    if isinstance(error, OverrideParseException):
        wrong = Given(error.override)
        if wrong.key in ALL_GROUPS:
            return _wrong_choice(wrong.key, wrong.value, config_dir)
        remedy = f"a text needs quotes, as in {wrong.partition('=')[0]}='\"...\"'"
        return ConfigError(f"{' '.join(wrong.split())}: Hydra cannot read this value; {remedy}")
    message = " ".join(text.split("\nSee ")[0].split())
    words = " ".join(" ".join(given).split())
    return ConfigError(f"{words}: {message}" if words else message)


_NO_MEMORY = (
    "; klrl has no recurrent policy: let it see several observations at once, with "
    "'env.wrappers=[{target: FrameStackObservation, args: {stack_size: 4}}]'"
)
_WHOLE = "; klrl samples from the whole policy, since it measures its KL: see collector.temperature"
#: A name in other libraries, or a setting that takes no list -> what to use in klrl.
_ANSWERS = {
    "learning_rate": "; did you mean optim.lr?",
    "total_timesteps": "; did you mean frames?",
    "warmup": "; the learning rate falls from optim.lr to optim.lr_floor, without a warm-up",
    "stop": "; a response ends with an EOS of the model, or after collector.max_new_tokens",
    "sampler": "; klrl's own loop samples; with kl.apply=step TorchRL's wrapper calls it",
    "beta": "; did you mean kl.coef, the coefficient of KL(policy||reference), or loss.beta?",
    "num_generations": "; did you mean collector.group_size?",
    "max_completion_length": "; did you mean collector.max_new_tokens?",
    "gspo": "; klrl has no ratio per response: see loss=grpo, or loss.sampler_weight=mask_response",
    "ppo": "; PPO's loss is loss=clip, or loss=klpen with a KL penalty",
    **dict.fromkeys(("top_p", "top_k"), _WHOLE),
    **dict.fromkeys(("gru", "lstm", "rnn"), _NO_MEMORY),
}


def _of_yaml(key: str, given: Sequence[Given], config_dir: str | None) -> ConfigError | None:
    """Make the error for a key that a YAML sets and the choice's schema lacks."""
    group, _, name = key.partition(".")
    named = {each.key for each in given}
    for kind in () if key in named or not name else (group, "experiment", "env"):
        path = choice_files(kind, config_dir).get(here := chosen(kind, given, config_dir))
        if path is None or not re.search(rf"\b{name}:", path.read_text("utf-8")):
            continue
        known = [each.partition(".")[2] for each in settings() if each.startswith(f"{group}.")]
        of = chosen(group, given, config_dir)
        remedy = nearest(name, known) if kind == group else "; drop one of the two"
        told = f"its YAML sets {key}, which {group}={of} does not have{remedy or '; drop it'}"
        return ConfigError(f"{kind}={here}: {told}")
    return None


def _wrong_choice(group: str, name: str, config_dir: str | None) -> ConfigError:
    if name in _ANSWERS:
        return ConfigError(f"{group}={name}: no such choice{_ANSWERS[name]}")
    known = described(group, config_dir)
    meant = _meant(name, config_dir) or nearest(name, known) or ";"
    told = f"{', '.join(known)} (declared in {', '.join(declared_in(group))})"
    return ConfigError(f"{group}={name}: no such choice{meant} choices: {told}")


def not_an_override(argument: str, config_dir: str | None) -> ConfigError:
    """Make the error for an argument without ``=``; it may be a choice without its group."""
    hint = _meant(argument, config_dir) or "; write KEY=VALUE or GROUP=CHOICE, see --help"
    return ConfigError(f"{argument}: not a setting{hint}")


def _meant(name: str, config_dir: str | None) -> str:
    """Suggest choices of this name, or of this id of Gymnasium; empty if there are none."""
    meant = [f"{group}={name}" for group in ALL_GROUPS if name in described(group, config_dir)]
    if name in PRESETS["loss"]:
        meant = [f"loss={name} advantage={name} (language, such as experiment=text)"]
    if re.fullmatch(r"[\w.:/-]+-v\d+", name, re.ASCII):
        of_id = re.compile(rf"^  id: (\w+:)?{re.escape(name)}\b", re.I | re.M)
        files = choice_files("env", config_dir).items()
        meant = [f"env={env}" for env, path in files if of_id.search(path.read_text("utf-8"))]
        meant.append(f"env=gym env.id={name}")
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def wrong_key(key: str, given: Sequence[Given], config_dir: str | None) -> ConfigError:
    """Make the error for an unknown key: a setting of a different choice or group, or a typo."""
    value = next((each.lstrip("+~") for each in given if each.key == key), key)
    known = settings()
    group = key.partition(".")[0]
    current = chosen(group, given, config_dir)
    if key in known and (having := sorted(known[key].schemas)):
        they = " and ".join(f"{group}={name}" for name in having)
        they += " does" if len(having) == 1 else " do"
        return ConfigError(
            f"{value}: {group}={current} never reads it; only {they}; drop it or change the choice"
        )
    hint = _ANSWERS.get(key.rpartition(".")[2].removesuffix("_steps"), "")
    hint = hint or _elsewhere(key)
    rest = key.partition(".")[2]
    if current == OWN and rest.isidentifier() and not hint:
        names = [each.partition(".")[2] for each in known if each.startswith(f"{group}.")]
        close = difflib.get_close_matches(rest, names, n=1, cutoff=0.8)
        hint = f"; did you mean {group}.{close[0] if close else f'args.{rest}'}?"
    hint = hint or nearest(key, [*ALL_GROUPS, "sweep", *known])
    hint = hint or nearest(group, [*ALL_GROUPS, *(k for k in known if "." not in k)])
    return ConfigError(f"{value}: no such setting{hint or '; see --help'}")


def _elsewhere(key: str) -> str:
    """Suggest settings of the same name in other groups; empty if there are none."""
    end = f".{key.partition('.')[2] or key}"
    known = [each.key for each in settings().values() if each.schemas != (OWN,)]
    same = sorted((each for each in known if f".{each}".endswith(end)), key=len)
    close = difflib.get_close_matches(key, same, n=1, cutoff=0.8)
    return f"; did you mean {', or '.join(close or same)}?" if same else ""
