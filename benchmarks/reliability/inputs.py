"""Inputs of ``make fuzz``: command lines and YAMLs, most of them wrong."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.reliability.small_run import TEXT, text_files
from benchmarks.small_jobs import CONTROL, JOBS, LANGUAGE


@dataclasses.dataclass(frozen=True)
class Input:
    """One input of the fuzzer."""

    kind: str  # for the counts
    words: tuple[str, ...]  # the command line
    valid: bool | None  # True: must be accepted; False: must be refused; None: either, but cleanly
    names: tuple[str, ...] = ()  # texts that the refusal must hold
    prepare: Callable[[Path], None] = text_files  # writes what it needs into an empty folder


@cache
def texts(name: str) -> tuple[str, ...]:
    """A table of fuzz.yaml; a text is given as its parts, some of them [text, times]."""
    table = yaml.safe_load(Path(__file__).with_name("fuzz.yaml").read_text(encoding="utf-8"))
    return tuple(map(_joined, table[name]))


def _joined(told: str | Sequence[Any]) -> str:
    parts = [told] if isinstance(told, str) else told
    return "".join(part if isinstance(part, str) else part[0] * part[1] for part in parts)


# ---------------------------------------------------------------------------------- command lines

#: Valid jobs that need no other run.
_CONTROL = tuple(job.words for job in JOBS if CONTROL in job.words and not job.after)
#: Settings that every job reads, and values that fit whatever else it says.
_CHANGES = {
    "frames": ("2000", "1e6", "1_000"),
    "eval.episodes": ("1", "99"),
    "checkpoint.every": ("1", "'9'"),
    "optim.eps": ("1e-8", "0.001", '"1e-5"'),
    "learner.epochs": ("1", "9"),
    "device": ("cpu", "auto"),
}


def valid(r: random.Random) -> Input:
    """A job, three of its settings changed, its words in any order."""
    base = f"{TEXT} kl=none {LANGUAGE}" if r.random() < 0.15 else r.choice(_CONTROL)
    chosen = r.sample(sorted(_CHANGES), 3)
    words = [word for word in base.split() if word.split("=")[0] not in chosen]
    words += [f"{r.choice(['', '', '++'])}{key}={r.choice(_CHANGES[key])}" for key in chosen]
    r.shuffle(words)
    flags = r.choice([(), (), (), ("--cfg", "job"), ("-m", "sweep=s", "seed=1,2")])
    return Input("words", (*flags, *words), True)


@cache
def _settings(words: str) -> Mapping[str, Mapping[str, Any]]:
    """Key -> rule (range, or closed list) of the settings that a valid job reads."""
    from klrl.config.compose import job_config

    return dict(_rules("", job_config(words.split())))


def _rules(prefix: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for each in dataclasses.fields(value):
        held = getattr(value, each.name)
        if dataclasses.is_dataclass(held):
            yield from _rules(f"{prefix}{each.name}.", held)
        elif {"ge", "allowed"} & set(each.metadata):
            yield f"{prefix}{each.name}", each.metadata


def out_of_range(r: random.Random) -> Input:
    """A setting of the registry with a value that its rule refuses."""
    base = r.choice(_CONTROL)
    key, rule = r.choice(sorted(_settings(base).items(), key=lambda each: each[0]))
    values = ["nope", "[]", "{a: 1}"]
    if "allowed" not in rule:
        values += ["nan", "-inf", "1e999", "1.2.3"]
        values += [str(rule["ge"] - 1)] if rule["ge"] is not None else []
        values += [str(rule["gt"])] if rule["gt"] is not None else []
        values += [str(rule["le"] + 1)] if rule["le"] is not None else []
    return _with(base, f"{key}={r.choice(values)}", r, (key,))


def misspelt(r: random.Random) -> Input:
    """A key or a choice with a typo."""
    from klrl.config.choices import GROUPS
    from klrl.config.explain import described, settings

    base, group = r.choice(_CONTROL), r.choice(GROUPS)
    key = typo(r, r.choice(sorted(_settings(base))))
    known = {*settings(), *GROUPS, "experiment", "resume", "sweep"}
    if r.random() < 0.5 and key not in known and key.replace(".", "").replace("_", "").isalnum():
        return _with(base, f"{key}=1", r, (key,))
    choice = typo(r, r.choice(list(described(group))))
    if choice in described(group) or not choice:
        return misspelt(r)
    return _with(base, f"{group}={choice}", r, (group, choice))


def _with(base: str, word: str, r: random.Random, names: tuple[str, ...]) -> Input:
    words = [each for each in base.split() if each.split("=")[0] != word.split("=")[0]]
    words.insert(r.randint(0, len(words)), word)
    return Input("words", tuple(words), False, names)


def odd_value(r: random.Random) -> Input:
    """Any setting, any group or nothing at all, with an odd value."""
    from klrl.config.choices import GROUPS
    from klrl.config.explain import settings

    keys = [*settings(), *GROUPS, "env.kwargs.g", "", "hydra.run.dir", "sweep", "nope", "é"]
    word = f"{r.choice(['', '', '+', '++', '~'])}{r.choice(keys)}={r.choice(texts('odd'))}"
    flags = r.choice([(), (), ("-m",), ("--cfg", "job")])
    return Input("words", (*flags, *r.choice(_CONTROL).split(), word), None)


def typo(r: random.Random, text: str) -> str:
    """One letter dropped, doubled, or another."""
    at = r.randrange(len(text) or 1)
    other = r.choice("axz019_.-=,[]{}'\"$@")
    return text[:at] + r.choice(["", text[at : at + 1] * 2, other]) + text[at + 1 :]


# ------------------------------------------------------------------------------------------ YAMLs


def yamls(r: random.Random) -> Input:
    """A choice of the user's own, below ``--config-dir``."""
    group, start, setting = r.choice(
        [("kl", "retrieve", "coef: 0.2"), ("optim", "adam", "lr: 0.001"), ("learner", "ppo", "")]
    )
    text = f"defaults:\n  - {start}\n  - _self_\n\n{setting}\n"
    odd = r.choice(texts("yaml"))
    text = r.choice([text, typo(r, text), text + odd, odd])

    def prepare(folder: Path) -> None:
        (folder / "conf" / group).mkdir(parents=True)
        (folder / "conf" / group / "mine.yaml").write_text(text, encoding="utf-8")

    words = ("--config-dir", "conf", f"{group}=mine", "learner.compile=false", "logger=none")
    return Input("yaml", words, None, (), prepare)
