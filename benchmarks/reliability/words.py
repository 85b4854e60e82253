"""Command lines for ``make fuzz``: valid ones, ones with one wrong word, ones beyond grammar."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.small_jobs import CONTROL, FILES, JOBS, LANGUAGE

TEXT = "experiment=text env.data=prompts.jsonl env.reward=rewards:score actor.model=model"


@cache
def texts(name: str) -> tuple[Any, ...]:
    """A table of fuzz.yaml."""
    table = yaml.safe_load(Path(__file__).with_name("fuzz.yaml").read_text(encoding="utf-8"))
    return tuple(row if name == "conflicts" else joined(row) for row in table[name])


def joined(told: str | Sequence[Any]) -> str:
    """A text from its parts, some of them [text, times]."""
    parts = [told] if isinstance(told, str) else told
    return "".join(part if isinstance(part, str) else part[0] * part[1] for part in parts)


def nothing(folder: Path) -> None:
    """No file is needed."""


def text_files(folder: Path) -> None:
    """The prompts, the reward function and the model of :data:`TEXT`; that one is made before."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "model").symlink_to("../stock/model")


@dataclass(frozen=True)
class Input:
    """One input of the fuzzer."""

    kind: str  # for the counts
    words: tuple[str, ...]  # the command line
    valid: bool | None  # True: must be accepted; False: must be refused; None: either, but cleanly
    names: tuple[str, ...] = ()  # texts that the refusal must hold
    prepare: Callable[[Path], None] = nothing  # writes the files that it needs into an empty folder


# ------------------------------------------------------------------------------------ valid ones

#: Valid jobs that need no other run, by the benchmark that covers every choice.
_CONTROL = tuple(job.words for job in JOBS if CONTROL in job.words and not job.after)
_LANGUAGE = tuple(
    f"{TEXT} {words} {LANGUAGE}"
    for words in (
        "kl=none",
        "kl=legacy loss=klpen loss.reduction=token",
        "kl.placement=split kl.estimator=exact reference=ema reference.decay=0.8",
        "advantage=gae loss=klpen_held loss.reduction=sequence controller=adaptive",
        "actor.lora.r=2 reference=adapter_off kl.placement=loss kl.estimator=k3",
    )
)


def _number(random: random.Random, low: float, high: float) -> str:
    """A number between two, in one of the ways in which it is written."""
    value = float(f"{random.uniform(low, high):.3g}")
    return random.choice([str(value), f"{value:e}", f"{value:.6f}", f"'{value}'", f'"{value}"'])


def _whole(random: random.Random, low: int, high: int) -> str:
    value = random.randint(low, high)
    return random.choice([str(value), str(value), f"{value}.0", f"{value:_}"])


#: Settings that every job of the domain reads, and that fit whatever else it says.
_ANY: dict[str, Callable[[random.Random], str]] = {
    "seed": lambda r: str(r.randint(0, 2**31)),
    "frames": lambda r: r.choice(["2000", "1e6", "100000", "1_000"]),
    "threads": lambda r: str(r.randint(1, 4)),
    "eval.episodes": lambda r: str(r.randint(1, 99)),
    "eval.every": lambda r: str(r.randint(1, 9)),
    "checkpoint.every": lambda r: str(r.randint(1, 9)),
    "optim.lr": lambda r: _number(r, 0.02, 0.9),
    "optim.eps": lambda r: _number(r, 1e-8, 1e-3),
    "optim.max_grad_norm": lambda r: _number(r, 0.1, 9),
    "learner.epochs": lambda r: str(r.randint(1, 9)),
    "device": lambda r: r.choice(["cpu", "auto"]),
    "loss.critic_coeff": lambda r: _number(r, 0, 2),
}
_OF_CONTROL: dict[str, Callable[[random.Random], str]] = {
    "env.num_envs": lambda r: str(4 * r.randint(1, 4)),
    "env.reward_scale": lambda r: _number(r, 0.01, 9),
    "env.normalize_observation": lambda r: r.choice(["true", "false", "True"]),
    "collector.steps": lambda r: str(32 * r.randint(1, 4)),
    "advantage.gamma": lambda r: _number(r, 0, 1),
    "advantage.lmbda": lambda r: _number(r, 0, 1),
    "actor.hidden": lambda r: r.choice(["[4]", "[4,5]", "[ 4, 5, 6 ]"]),
}


def valid(r: random.Random) -> Input:
    """A job, some of its settings changed, its words in any order."""
    language = r.random() < 0.15
    base = r.choice(_LANGUAGE if language else _CONTROL).split()
    changes = [f"{key}={make(r)}" for key, make in r.sample(sorted(_changes(language)), 3)]
    words = [*base, *(f"++{each}" if r.random() < 0.1 else each for each in changes)]
    r.shuffle(words)
    words = _changes_last(words, changes)
    if r.random() < 0.15:
        words = ["-m", *words, f"seed={r.randint(0, 5)},7", f"sweep=s{r.randint(0, 9)}"]
    elif r.random() < 0.1:
        words = ["--cfg", "job", *words]
    return Input("words", tuple(words), True, (), text_files if language else nothing)


def _changes(language: bool) -> list[tuple[str, Callable[[random.Random], str]]]:
    # Without a critic, or with a class of losses that has none, a word on it would be unread.
    unread = {"loss.critic_coeff", "optim.lr"} if language else set()
    settings = _ANY if language else {**_ANY, **_OF_CONTROL}
    return [(key, make) for key, make in settings.items() if key not in unread]


def _changes_last(words: list[str], changes: list[str]) -> list[str]:
    """A key that is given twice counts as it is given last."""
    keys = {each.split("=")[0] for each in changes}
    changed = [each for each in words if each.lstrip("+") in changes]
    return [each for each in words if each.split("=")[0].lstrip("+") not in keys] + changed


# ---------------------------------------------------------------------------------- one wrong word


@cache
def _settings(words: str) -> Mapping[str, Mapping[str, Any]]:
    """Key -> rule (range, or closed list) of the settings that a valid job reads."""
    from klrl.config.compose import job_config

    config = job_config(words.split())
    return dict(_rules("", config))


def _rules(prefix: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for each in dataclasses.fields(value):
        held = getattr(value, each.name)
        if dataclasses.is_dataclass(held):
            yield from _rules(f"{prefix}{each.name}.", held)
        elif {"ge", "allowed"} & set(each.metadata):
            yield f"{prefix}{each.name}", each.metadata


def _outside(r: random.Random, rule: Mapping[str, Any]) -> str:
    """A value that a rule refuses."""
    if "allowed" in rule:
        return r.choice(["nope", "12", "[]", f"{rule['allowed'][0]}x", "{a: 1}"])
    values = ["abc", "nan", "[1]", "{a: 1}", "inf", "-inf", "1e999", "1.2.3", "'one'"]
    if rule["ge"] is not None:
        values += [str(rule["ge"] - 1), f"{rule['ge'] - 1e9:.0f}"]
    if rule["gt"] is not None:
        values += [str(rule["gt"]), str(rule["gt"] - 1)]
    if rule["le"] is not None:
        values += [str(rule["le"] + 1), "1e300"]
    return r.choice(values)


def out_of_range(r: random.Random) -> Input:
    """A setting of the registry with a value that its rule refuses."""
    base = r.choice(_CONTROL)
    key, rule = r.choice(sorted(_settings(base).items(), key=lambda each: each[0]))
    return _with(base, f"{key}={_outside(r, rule)}", r, (key,))


def misspelt(r: random.Random) -> Input:
    """A key, a group or a choice with a typo."""
    from klrl.config.catalogue import described, settings
    from klrl.config.choices import GROUPS

    base = r.choice(_CONTROL)
    if r.random() < 0.5:
        key = typo(r, r.choice(sorted(_settings(base))))
        known = {*settings(), *GROUPS, "experiment", "resume", "sweep"}
        if key in known or not key.replace(".", "").replace("_", "").isalnum():
            return misspelt(r)
        return _with(base, f"{key}=1", r, (key,))
    group = r.choice(GROUPS)
    choice = typo(r, r.choice(list(described(group))))
    if choice in described(group) or not choice:
        return misspelt(r)
    return _with(base, f"{group}={choice}", r, (group, choice))


def conflicting(r: random.Random) -> Input:
    """Words that no job can have together."""
    words, name = r.choice(texts("conflicts"))
    return Input("words", ("env=pendulum", *words.split()), False, (name,))


def _with(base: str, word: str, r: random.Random, names: tuple[str, ...]) -> Input:
    words = base.split()
    key = word.split("=")[0]
    words = [each for each in words if each.split("=")[0] != key]
    words.insert(r.randint(0, len(words)), word)
    return Input("words", tuple(words), False, names)


# ------------------------------------------------------------------------- beyond any one's intent


def odd_value(r: random.Random) -> Input:
    """Any setting, any group or nothing at all, with an odd value."""
    from klrl.config.catalogue import settings
    from klrl.config.choices import GROUPS

    base = r.choice(_CONTROL)
    keys = [
        *_settings(base),
        *GROUPS,
        *settings(),
        *("env.id", "env.kwargs.g", "env.kwargs", "resume"),
    ]
    key = r.choice([*keys, "", "hydra", "hydra.run.dir", "sweep", "hydra/launcher", "nope", "é"])
    sign = r.choice(["", "", "", "+", "++", "~"])
    flags = r.choice([(), (), (), ("-m",), ("--cfg", "job")])
    return Input("words", (*flags, *base.split(), f"{sign}{key}={r.choice(texts('odd'))}"), None)


def garbled(r: random.Random) -> Input:
    """A valid line with one to three words changed by a letter, repeated, dropped or swapped."""
    words = list(valid(r).words)
    for _ in range(r.randint(1, 3)):
        at = r.randrange(len(words))
        change = r.randrange(4)
        if change == 0:
            words[at] = typo(r, words[at])
        elif change == 1:
            words.append(words[at])
        elif change == 2:
            words[at] = words[at] + r.choice(texts("odd"))
        else:
            key, _, value = words[at].partition("=")
            words[at] = f"{value}={key}"
    return Input("words", tuple(words), None, (), text_files)


def typo(r: random.Random, text: str) -> str:
    """One letter dropped, doubled, swapped with the next, or another."""
    if not text:
        return "x"
    at = r.randrange(len(text))
    return r.choice(
        [
            text[:at] + text[at + 1 :],
            text[:at] + text[at] + text[at:],
            text[:at] + text[at : at + 2][::-1] + text[at + 2 :],
            text[:at] + r.choice("abcxyz019_.-=,[]{}'\"$@") + text[at + 1 :],
        ]
    )
