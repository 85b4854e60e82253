"""Honest runs, a sweep and a model, made once; hostile ones are made of copies of them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.reliability.ended import Ended, in_fork
from benchmarks.reliability.hostile_watch import TAG
from benchmarks.reliability.small_run import FRAMES, WORDS, make_model, stand_in
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

#: The module of all parts that run: whoever imports it leaves a mark.
EVIL = Path(__file__).with_name("evil.txt").read_text(encoding="utf-8").replace("TAG", TAG, 1)


@cache
def table() -> dict[str, Any]:
    """What hostile.yaml holds."""
    return yaml.safe_load(Path(__file__).with_name("hostile.yaml").read_text(encoding="utf-8"))


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
                shutil.rmtree(each, onerror=_gone)
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
        self._must(lambda: make_model(Path("model")), "a model")
        self._klrl(*WORDS, f"frames={2 * FRAMES}", "hydra.run.dir=run")
        self._klrl(*WORDS, f"frames={2 * FRAMES}", "hydra.run.dir=other", "seed=1")
        self._klrl(*LANGUAGE, f"frames={2 * SAMPLES}", "hydra.run.dir=lm")
        self._klrl("-m", "sweep=sw", *SWEEP)
        own = EVIL.replace(TAG, "of the user").replace("KLRL_MARK", "KLRL_NO_MARK")
        (self.work / "lab.py").write_text(own)
        mine = [word.replace("evil:", "lab:") for word in table()["parts"]["env"]]
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

    def fork(
        self, function: Callable[[], Any], cwd: str = ".", limit: float = 120.0, drawn: bool = False
    ) -> Ended:
        """Call a function in a fork, as the user; pictures are drawn only where they are asked."""

        def go() -> None:
            import tempfile

            from matplotlib.figure import Figure

            os.environ.clear()
            os.environ.update(self.environment())
            tempfile.tempdir = None
            if not drawn:
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
        for part, words in table()["parts"].items():
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
    import klrl.language.run.export
    import klrl.language.run.parts
    import klrl.language.run.verify
    import klrl.report.diff
    import klrl.sweep.plan
    import klrl.sweep.run
    import klrl.sweep.search  # noqa: F401


def _gone(function: object, path: str, error: Any) -> None:
    """A process that a command left behind may remove a file first."""
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def _removable(folder: Path) -> None:
    folder.chmod(0o700)
    for name, below, _ in os.walk(folder):
        for each in below:
            path = Path(name) / each
            if not path.is_symlink():
                path.chmod(0o700)
