"""Forty run, sweep and model folders that are hostile, or damaged: no command obeys them.

No code of the folder runs, nothing of it is unpickled, the user's other files and the environment's
values stay where they are; klrl ends with 0 or 2 and a line or three.
"""

import dataclasses
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.reliability.ended import in_fork
from tests.reliability.small_run import import_all, make_model
from tests.reliability.small_run import klrl as give

pytestmark = [pytest.mark.integration, pytest.mark.slow]

#: A second's run, with a checkpoint and an evaluation in each iteration of :data:`FRAMES` frames.
WORDS = (
    *("env=pendulum", "env.num_envs=2", "env.normalize_observation=true", "collector.steps=32"),
    *("learner.minibatches=2", "learner.epochs=1", "learner.compile=false", "actor.hidden=[8]"),
    *("optim.lr_floor=0", "checkpoint.every=1", "eval.every=1", "eval.episodes=1"),
    *("device=cpu", "logger=none"),
)
FRAMES = 64
SHELL = 'echo ran >> "$KLRL_MARK"'
EVIL = """
import os
if os.environ.get("KLRL_MARK"):
    with open(os.environ["KLRL_MARK"], "a") as file:
        file.write("imported")
import gymnasium, torch
from gymnasium.envs.classic_control.pendulum import PendulumEnv
from klrl.kl.controllers import FixedKLController

gymnasium.register("Evil-v0", PendulumEnv, max_episode_steps=200)
def env(): return PendulumEnv()
def k3(log_ratio): return torch.expm1(-log_ratio) + log_ratio
def net(inputs, outputs): return torch.nn.Linear(inputs, outputs)
def score(prompts, responses, rows): return [0.5 for _ in responses]
class Controller(FixedKLController):
    def __init__(self, coef): super().__init__(coef)
"""
SECRET = "hunter2-of-the-user"
LANGUAGE = (
    *("experiment=sort_digits", "env.shortest=1", "env.longest=2", "env.reward=proxy"),
    *("actor.model=model", "collector.prompts=2", "collector.group_size=2"),
    *("collector.max_new_tokens=4", "learner.minibatches=1", "learner.epochs=1", "eval.every=0"),
    *("optim.lr_floor=0", "checkpoint.every=1", "device=cpu", "logger=none"),
)
#: Part -> the words that name one of EVIL.
PARTS = {
    "env": ("env=custom", "env.target=evil:env"),
    "actor": ("actor=custom", "actor.target=evil:net"),
    "kl": ("kl.placement=loss", "kl.estimator=custom", "kl.own_estimator.target=evil:k3"),
    "controller": ("controller=custom", "controller.target=evil:Controller"),
}
ENTRIES = "run/checkpoints/last/*"
MORE = f"frames={3 * FRAMES}"
COMMANDS = {
    "evaluate": ["evaluate", "run", "--episodes", "1"],
    "evaluate here": ["evaluate", ".", "--episodes", "1"],
    "resume": ["resume=run", MORE],
    "resume here": ["resume=.", MORE],
    "init": [*WORDS, f"frames={FRAMES}", "actor.init=run"],
    "reference": [*WORDS, f"frames={FRAMES}", "reference=checkpoint", "reference.path=run"],
    "ls": ["ls", "."],
    "report": ["report", "run", "other"],
    "diff": ["diff", "run", "other"],
    "lm": ["evaluate", "lm", "--episodes", "2"],
    "lm here": ["evaluate", ".", "--episodes", "2", "actor.model=../model"],
    "resume lm": ["resume=lm", "frames=12"],
    "sweep": ["-m", "sweep=sw", *WORDS, f"frames={FRAMES}", "seed=0,1"],
}


def the_parts(stored: dict) -> None:
    """Settings as a run with each part of EVIL stores them."""
    from klrl.api import compose
    from klrl.config.own import complete

    for part, words in PARTS.items():
        dropped = {"env": "env=pendulum", "actor": "actor.hidden=[8]"}.get(part)
        config = compose(*(word for word in WORDS if word != dropped), *words)
        complete(config)
        stored[part] = dataclasses.asdict(config)


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Path:
    """Honest runs of control and language, a sweep, a model; settings with EVIL's parts."""
    import peft  # noqa: F401

    import klrl.cli.export
    import klrl.language.run.parts
    import klrl.sweep.run  # noqa: F401

    import_all()
    work = tmp_path_factory.mktemp("honest").resolve()
    assert in_fork(lambda: make_model(Path("model")), work).code == 0
    for words in (
        (*WORDS, f"frames={2 * FRAMES}", "hydra.run.dir=run"),
        (*WORDS, f"frames={2 * FRAMES}", "hydra.run.dir=other", "seed=1"),
        (*LANGUAGE, "frames=8", "hydra.run.dir=lm"),
        COMMANDS["sweep"],
    ):
        ended = give(words, work)
        assert ended.code == 0, ended.err

    def store() -> None:
        stored: dict = {}
        Path("evil.py").write_text(EVIL)
        sys.path.append(".")
        the_parts(stored)
        Path("evil.py").unlink()
        Path("stored.json").write_text(json.dumps(stored))

    assert in_fork(store, work).err == ""
    return work


# ------------------------------------------------------------------------------ what is done to it


def settings(run: str, **dotted: object) -> Callable[[Path], None]:
    def change(work: Path) -> None:
        path = work / run / ".hydra" / "config.yaml"
        whole = yaml.safe_load(path.read_text())
        for key, value in dotted.items():
            *groups, last = key.split("__")
            node = whole
            for group in groups:
                node = node[group]
            node[last] = value
        path.write_text(yaml.safe_dump(whole, sort_keys=False))

    return change


def part(name: str, target: str = "", path: bool = True) -> Callable[[Path], None]:
    """A part of EVIL, planted in the run; or another target, called with a shell's words."""

    def change(work: Path) -> None:
        stored = json.loads((work / "stored.json").read_text())[name]
        text = json.dumps(stored)
        if target:
            call = {"target": target, "args": {"args": SHELL, "shell": True}, "path": None}
            stored[name] |= {**call, "source": None, "version": None}
            text = json.dumps(stored)
        elif path:
            text = text.replace(str(work), str(work / "run"))
        whole = json.loads(text)
        (work / "run" / ".hydra" / "config.yaml").write_text(yaml.safe_dump(whole))
        (work / "run" / "evil.py").write_text(EVIL)

    return change


def reward(value: object) -> Callable[[Path], None]:
    def change(work: Path) -> None:
        for place in (work / "lm/evil.py", work / "evil_above.py"):
            place.write_text(EVIL)
        settings("lm", env__reward=value, env__reward_weights=None)(work)

    return change


class Bomb:
    """Unpickled, it runs a command."""

    def __reduce__(self) -> tuple:
        return os.system, (SHELL,)


def bomb(pattern: str, name: str) -> Callable[[Path], None]:
    """A pickle in each folder of a pattern."""

    def change(work: Path) -> None:
        for folder in work.glob(pattern):
            (folder / name).write_bytes(pickle.dumps(("success", Bomb())))

    return change


def write(path: str, text: str) -> Callable[[Path], None]:
    def change(work: Path) -> None:
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_text(text)

    return change


def link(path: str, hard: bool = False) -> Callable[[Path], None]:
    """A link in the place of a file or folder, to one of the user's."""

    def change(work: Path) -> None:
        place, target = work / path, work.parent / "victim" / "away"
        shutil.move(place, target)
        os.link(target, place) if hard else place.symlink_to(target)

    return change


def kind(path: str, what: str) -> Callable[[Path], None]:
    def change(work: Path) -> None:
        place = work / path
        place.unlink(missing_ok=True)
        if what == "pipe":
            os.mkfifo(place)
        elif what == "folder":
            place.mkdir()
        else:
            place.symlink_to("/dev/zero")

    return change


def flip(pattern: str, place: float) -> Callable[[Path], None]:
    """One bit of a file."""

    def change(work: Path) -> None:
        path = sorted(work.glob(pattern))[-1]
        content = bytearray(path.read_bytes())
        content[int(place * len(content))] ^= 4
        path.write_bytes(content)

    return change


def code_in_model(work: Path) -> None:
    path = work / "model/config.json"
    autos = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "evil_model.E")
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": autos}))
    (work / "model/evil_model.py").write_text(EVIL)


def job_elsewhere(work: Path) -> None:
    """A job that never began is to begin among the user's files."""
    path = work / "outputs/sw/sweep.json"
    record = json.loads(path.read_text())
    record["jobs"][0] |= {"name": "../../../victim/new", "status": "waiting"}
    path.write_text(json.dumps(record))
    shutil.rmtree(work / "outputs/sw/seed=0")


def renamed(name: str) -> Callable[[Path], None]:
    return lambda work: (work / "run").rename(work / name) and None


JINJA = "{{ cycler.__init__.__globals__.os.system('SHELL') }}".replace(
    "SHELL", SHELL.replace('"', '\\"')
)
OBJECT = f"x: !!python/object/apply:os.system ['{SHELL}']\n"
CALLED = ("env", "actor", "controller")


class Given(NamedTuple):
    name: str
    change: Callable[[Path], None]
    command: str
    cwd: str = "."


INPUTS = [
    *(Given(f"{p} is a shell", part(p, "subprocess:Popen"), "evaluate") for p in CALLED),
    *(Given(f"{p} of the run", part(p), c) for p in PARTS for c in ("evaluate", "resume")),
    Given("env of the run as a reference", part("env"), "reference"),
    Given("env named, given in the run", part("env", path=False), "evaluate here", "run"),
    Given("an id of the run", settings("run", env__id="evil:Evil-v0"), "resume here", "run"),
    Given("a reward above", reward("evil_above:score"), "lm"),
    Given("a reward in a file", reward("lm/evil.py:score"), "resume lm"),
    Given("a reward of os", reward("os:system"), "lm"),
    Given("a reward, given in the run", reward("evil:score"), "lm here", "lm"),
    Given("a secret as id", settings("run", env__id="${oc.env:KLRL_SECRET}"), "evaluate"),
    Given("a secret as init", settings("run", actor__init="${oc.env:KLRL_SECRET}"), "resume"),
    Given("a pickle in an entry", bomb(ENTRIES, "agent.pt"), "evaluate"),
    Given("weights are a pickle", bomb("lm/checkpoints/*/*", "state.safetensors"), "resume lm"),
    Given("a pickle beside a model", bomb("model", "pytorch_model.bin"), "lm"),
    Given("code of a model", code_in_model, "lm"),
    Given("a template that calls os", write("model/chat_template.jinja", JINJA), "lm"),
    Given("metrics are a link", link("run/metrics.jsonl"), "resume"),
    Given("the manifest is a hard link", link("run/manifest.json", hard=True), "resume"),
    Given("settings are a link", link("run/.hydra"), "resume"),
    Given("a sweep's record is a link", link("outputs/sw/sweep.json"), "sweep"),
    Given("a sweep's job is to begin elsewhere", job_elsewhere, "sweep"),
    Given("settings are a pipe", kind("run/.hydra/config.yaml", "pipe"), "evaluate"),
    Given("the owner is a device", kind("run/owner.json", "device"), "resume"),
    Given("rows are a folder", kind("run/metrics.jsonl", "folder"), "ls"),
    Given("an object", write("run/.hydra/config.yaml", OBJECT), "report"),
    Given("a deep list", write("run/.hydra/config.yaml", "[" * 20000), "evaluate"),
    Given("a deep manifest", write("run/manifest.json", '{"status": ' + "[" * 100000), "ls"),
    Given("a folder's name", renamed("a\x1b]0;pwned\x07\x1b[2J"), "ls"),
    Given("a bit of the weights", flip(f"{ENTRIES}/state.safetensors", 0.7), "evaluate"),
    Given("a bit of a state", flip(f"{ENTRIES}/state.json", 0.5), "resume"),
    Given("a bit of the rows", flip("run/metrics.jsonl", 0.5), "diff"),
]  # fmt: skip


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("given", INPUTS, ids=lambda given: f"{given.name}, {given.command}")
def test_no_command_obeys_it(given, stock, tmp_path, monkeypatch) -> None:
    work, victim, mark = tmp_path / "work", tmp_path / "victim", tmp_path / "mark"
    shutil.copytree(stock, work)
    stored = (work / "stored.json").read_text().replace(str(stock), str(work))
    (work / "stored.json").write_text(stored)
    victim.mkdir()
    (victim / "file.txt").write_text("the user's\n")
    given.change(work)
    before = content_of(victim)
    monkeypatch.setenv("KLRL_MARK", str(mark))
    monkeypatch.setenv("KLRL_SECRET", SECRET)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    ended = give(COMMANDS[given.command], work / given.cwd)
    assert ended.faults([0, 2], most_lines=3) == []
    assert not mark.exists(), f"it ran: {mark.read_text()}"
    assert content_of(victim) == before
    assert SECRET not in ended.out + ended.err
    assert "\x1b" not in ended.out + ended.err
