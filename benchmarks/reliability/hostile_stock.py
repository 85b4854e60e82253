"""Honest runs, a sweep and a model, made once; hostile ones are made of copies of them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.reliability.ended import Ended, in_fork
from benchmarks.reliability.hostile_watch import TAG
from benchmarks.reliability.small_run import FRAMES, WORDS, stand_in
from benchmarks.reliability.small_run import import_all as import_commands

#: What no file may hold, and nothing may print: a text and a number of the user's environment.
SECRETS = {"KLRL_SECRET": "hunter2-of-the-user", "KLRL_PIN": "9.8765432109"}
LANGUAGE = (
    *("experiment=sort_digits", "env.shortest=1", "env.longest=2", "env.reward=proxy"),
    *("actor.model=model", "collector.prompts=2", "collector.group_size=2"),
    *("collector.max_new_tokens=4", "collector.samples_every=1", "learner.minibatches=1"),
    *("learner.epochs=1", "optim.lr_floor=0", "eval.every=0", "checkpoint.every=1"),
    *("kl.placement=loss", "kl.estimator=k3", "device=cpu", "logger=none"),
)
SAMPLES = 4
SWEEP = (*WORDS, f"frames={FRAMES}", "seed=0,1")

#: Parts that run; whoever imports them leaves a mark.
EVIL = '''\
"""TAG"""
import os
if os.environ.get("KLRL_MARK"):
    with open(os.environ["KLRL_MARK"], "a") as _file:
        _file.write(__name__ + " was imported\\n")
import gymnasium, torch
from gymnasium.envs.classic_control.pendulum import PendulumEnv
from klrl.config.own.parts import GIVEN
from klrl.kl.controllers import FixedKLController
from klrl.losses.beta import BetaRule
from klrl.losses.policy import PolicyLoss

gymnasium.register("Evil-v0", PendulumEnv, max_episode_steps=200)
def env(): return PendulumEnv()
def score(prompts, responses, rows): return [0.5 for _ in responses]
def k3(log_ratio): return torch.expm1(-log_ratio) + log_ratio
def forward(log_ratio): return -torch.exp(-log_ratio) * log_ratio
def net(inputs, outputs): return torch.nn.Linear(inputs, outputs)
def critic(inputs): return torch.nn.Linear(inputs, 1)
class Wrapper(gymnasium.Wrapper): pass
class Controller(FixedKLController):
    def __init__(self, coef): super().__init__(coef)
class Rule(BetaRule):
    def update(self, kl): return self.beta
class Loss(PolicyLoss):
    def __init__(self, **given): super().__init__(**given)
    def gain(self, scored, advantage, beta):
        return (scored.log_prob - scored.old_log_prob).exp() * advantage
class Advantage:
    def __init__(self, config, critic): self.critic = critic
    def __call__(self, batch):
        batch["state_value"] = value = self.critic.module(batch["observation"])
        batch["advantage"], batch["value_target"] = torch.ones_like(value), value
class Log:
    def log(self, row): pass
'''.replace("TAG", TAG, 1)
#: Setting of a part -> the words that name one of ``evil``.
PARTS: dict[str, tuple[str, ...]] = {
    "env": ("env=custom", "env.target=evil:env"),
    "env.wrappers": ("env.wrappers=[{target: evil:Wrapper}]",),
    "actor": ("actor=custom", "actor.target=evil:net"),
    "actor.own_critic": (
        *("actor=custom", "actor.target=evil:net"),
        "actor.own_critic.target=evil:critic",
    ),
    "kl.own_estimator": (
        *("kl.placement=loss", "kl.estimator=custom"),
        "kl.own_estimator.target=evil:k3",
    ),
    "kl.own_divergence": (
        *("kl.placement=split", "kl.estimator=exact", "kl.divergence=custom"),
        "kl.own_divergence.target=evil:forward",
    ),
    "controller": ("controller=custom", "controller.target=evil:Controller"),
    "logger": ("logger=custom", "logger.target=evil:Log"),
    "advantage": ("advantage=custom", "advantage.target=evil:Advantage"),
    "loss": ("loss=custom", "loss.target=evil:Loss"),
    "loss.own_beta_rule": (*("loss.beta_rule=custom", "loss.own_beta_rule.target=evil:Rule"),),
}


class Stock:
    """The user's ``home`` and ``tmp``; ``work``, with what honest commands made; ``victim``."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.work, self.victim = base / "work", base / "victim"
        self.home, self.tmp, self.mark = base / "home", base / "tmp", base / "mark"
        self._kept = base.with_name(f"{base.name}-kept")
        for folder in (self.work, self.victim, self.home, self.tmp):
            folder.mkdir(parents=True)
        self.stored: dict[str, dict[str, Any]] = {}
        self._make()
        shutil.copytree(base, self._kept, symlinks=True)

    def restore(self) -> None:
        """All as it was made, at the same path."""
        for each in self.base.iterdir():
            if each.is_dir() and not each.is_symlink():
                _removable(each)
                shutil.rmtree(each)
            else:
                each.unlink()
        shutil.copytree(self._kept, self.base, symlinks=True, dirs_exist_ok=True)

    def environment(self) -> dict[str, str]:
        """Of a user whose home this is."""
        mine = {"HOME": str(self.home), "TMPDIR": str(self.tmp), "KLRL_MARK": str(self.mark)}
        dropped = ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
        kept = {key: value for key, value in os.environ.items() if key not in dropped}
        # Where matplotlib keeps its fonts is not klrl's to choose.
        fonts = {"MPLCONFIGDIR": os.environ.get("MPLCONFIGDIR", str(self.tmp / "fonts"))}
        return {**kept, **mine, **SECRETS, **fonts, "WANDB_MODE": "offline", "COLUMNS": "120"}

    # --------------------------------------------------------------------------------- the runs

    def _make(self) -> None:
        for name in ("file.txt", "metrics.jsonl", "notes.json"):
            (self.victim / name).write_text(f"the user's {name}\n")
        self._must(_make_model, "a model")
        self._klrl(*WORDS, f"frames={2 * FRAMES}", "hydra.run.dir=run")
        self._klrl(*WORDS, f"frames={2 * FRAMES}", "hydra.run.dir=other", "seed=1")
        self._klrl(*LANGUAGE, f"frames={2 * SAMPLES}", "hydra.run.dir=lm")
        self._klrl("-m", "sweep=sw", *SWEEP)
        own = EVIL.replace(TAG, "of the user").replace("KLRL_MARK", "KLRL_NO_MARK")
        (self.work / "lab.py").write_text(own)
        mine = [word.replace("evil:", "lab:") for word in PARTS["env"]]
        words = [word for word in WORDS if word != "env=pendulum"]
        self._klrl(*mine, *words, f"frames={2 * FRAMES}", "hydra.run.dir=mine")
        self._must(self._store_parts, "settings with parts")
        self.stored = json.loads((self.base / "stored.json").read_text())
        for each in (self.mark, self.base / "stored.json"):
            each.unlink(missing_ok=True)

    def _klrl(self, *words: str) -> None:
        from klrl.cli.main import main

        self._must(lambda: main(words), " ".join(words))

    def _must(self, function: Callable[[], Any], what: str) -> None:
        ended = self.fork(function)
        if ended.code:
            raise SystemExit(f"{what}: fails where all is honest:\n{ended.out}{ended.err}")

    def fork(self, function: Callable[[], Any], cwd: str = ".", limit: float = 120.0) -> Ended:
        """Call a function in a fork, as the user."""

        def go() -> None:
            import tempfile

            from matplotlib.figure import Figure

            os.environ.clear()
            os.environ.update(self.environment())
            tempfile.tempdir = None
            Figure.savefig = stand_in  # type: ignore[assignment, method-assign]
            function()

        return in_fork(go, self.work / cwd, limit)

    def _store_parts(self) -> None:
        """Settings as a run with each part of ``evil`` stores them."""
        from klrl.api import compose
        from klrl.config.own import complete

        folder = self.base / "evil"
        folder.mkdir()
        (folder / "evil.py").write_text(EVIL)
        sys.path.append(str(folder))
        stored = {}
        for part, words in PARTS.items():
            base = [word for word in WORDS if not (part == "env" and word == "env=pendulum")]
            if "actor=custom" in words:
                base.remove("actor.hidden=[8]")
            config = compose(*base, *words, f"frames={2 * FRAMES}")
            complete(config)
            stored[part] = dataclasses.asdict(config)
        (self.base / "stored.json").write_text(json.dumps(stored))
        shutil.rmtree(folder)


def import_all() -> None:
    """What the commands import, so that no fork has to."""
    import_commands()
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import klrl.api
    import klrl.cli.export
    import klrl.cli.plan
    import klrl.cli.verify
    import klrl.language.export
    import klrl.language.parts
    import klrl.language.verify
    import klrl.report.bits
    import klrl.sweep.plan
    import klrl.sweep.run
    import klrl.sweep.search  # noqa: F401


def _make_model() -> None:
    from klrl.language.base_model import Recipe, build

    small = Recipe(
        hidden=16, layers=1, heads=2, batch=8, measure_every=4, measure_on=8, target=0.0, context=64
    )
    build(small, Path("model"))


def _removable(folder: Path) -> None:
    folder.chmod(0o700)
    for name, below, _ in os.walk(folder):
        for each in below:
            path = Path(name) / each
            if not path.is_symlink():
                path.chmod(0o700)


@contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """The working folder, for a while."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def words_of(*words: str) -> Sequence[str]:
    """A command line."""
    return words
