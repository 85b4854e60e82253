"""``klrl verify`` of records that someone changed: each is found."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import klrl
from benchmarks.reliability.ended import in_fork
from klrl.config import JobConfig
from klrl.language.run.verify import verify_run
from klrl.train.verify import Record, verify_record
from tests.conftest import QUICK as CONTROL
from tests.conftest import marked
from tests.language.conftest import QUICK
from tests.runs.commands import exits as run_klrl

pytestmark = pytest.mark.integration

Lines = list[dict[str, Any]]
Change = Callable[[Path], None]


def edited(name: str, change: Callable[[Lines], Lines | None]) -> Change:
    """Change the lines of a file: in place, or to those that come back."""

    def changed(run: Path) -> None:
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        found = change(lines)
        lines = lines if found is None else found
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    return changed


def each(name: str, key: str, value: Callable[[Any], Any], where=lambda line: True) -> Change:
    """A new value of a key on each line that has it."""

    def change(lines: Lines) -> None:
        for line in lines:
            if key in line and where(line):
                line[key] = value(line[key])

    return edited(name, change)


def row(key: str, value: Callable[[Any], Any]) -> Change:
    return each("metrics.jsonl", key, value)


def sample(key: str, value: Callable[[Any], Any], **how) -> Change:
    return each("samples.jsonl", key, value, **how)


def no_kl(lines: Lines) -> None:
    for line in lines:
        line.update({key: 0.0 for key in line if key.startswith("kl/ref/")})


def first_changed(values: list) -> list:
    return [values[0] + 0.01, *values[1:]]


def other(prompt: Any) -> Any:
    return [{"role": "user", "content": "4321"}]


def last_draw(line: dict) -> bool:
    return "reward" not in line


def rewarded(lines: Lines) -> None:
    for line in lines:
        line.setdefault("reward", 1.0)


def best(lines: Lines) -> Lines:
    return sorted(lines, key=lambda line: -line.get("reward", 0))[:5]


def scored(lines: Lines) -> Lines:
    return [line for line in lines if not last_draw(line)]


def text(name: str, old: str, new: str) -> Change:
    def change(run: Path) -> None:
        content = (run / name).read_text()
        assert old in content
        (run / name).write_text(content.replace(old, new))

    return change


def byte(pattern: str) -> Change:
    def change(run: Path) -> None:
        (file,) = sorted(run.glob(pattern))[:1]
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    return change


def resigned(change: Change, run: Path) -> None:
    """Change rows, with digests that fit."""
    before = (run / "metrics.jsonl").read_bytes()
    change(run)
    after = (run / "metrics.jsonl").read_bytes()
    for manifest in run.glob("checkpoints/*/*/manifest.json"):
        content = manifest.read_text()
        told = json.loads(content)
        mark = told["metadata"]["rows"]["metrics.jsonl"]
        lines = before[: mark["bytes"]].count(b"\n")
        mine = b"".join(after.splitlines(keepends=True)[:lines])
        digest = hashlib.sha256(mine).hexdigest()
        content = content.replace(f'"bytes": {mark["bytes"]}', f'"bytes": {len(mine)}', 1)
        content = content.replace(mark["sha256"], digest, 1).replace(told["sha256"], "0" * 64)
        manifest.write_text(content.replace("0" * 64, hashlib.sha256(content.encode()).hexdigest()))


def forged(run: Path) -> None:
    """The evaluation, with digests that fit."""
    resigned(row("eval/return", lambda value: value + 5), run)


def from_elsewhere(run: Path) -> None:
    """The same with errors that allow it, where another host's allow anything."""
    text("manifest.json", '"host": "', '"host": "not-')(run)

    def change(run: Path) -> None:
        row("eval/return", lambda value: value + 1000)(run)
        row("eval/return_se", lambda value: 1000.0)(run)

    resigned(change, run)


def without(key: str) -> Change:
    return edited(
        "metrics.jsonl", lambda lines: [{k: line[k] for k in line if k != key} for line in lines]
    )


def invented(lines: Lines) -> Lines:
    before, last = lines[-2:]
    more = {key: 2 * last[key] - before[key] for key in ("iteration", "frames")}
    return [*lines, {**last, **more, "eval/return": 99.0}]


#: Changes of the rows that fit digests which were made anew -> where the problem is.
RESIGNED: dict[str, tuple[Change, str]] = {
    "an error halved": (row("eval/return_se", lambda value: value / 2), "eval/return_se: "),
    "more episodes": (row("eval/episodes", lambda value: value * 10), "eval/episodes: "),
    "no KL of the evaluation": (without("eval/kl_ref"), "eval/kl_ref: not recorded"),
    "a row gone": (
        edited("metrics.jsonl", lambda lines: [lines[0], *lines[2:]]),
        "metrics.jsonl: ",
    ),
    "other frames": (row("frames", lambda value: value + 64), "metrics.jsonl: iteration"),
}


#: What was done -> how.
TAMPERED: dict[str, Change] = {
    "every KL is 0": edited("metrics.jsonl", no_kl),
    "a KL is halved": row("kl/ref/exact", lambda value: value / 2),
    "rewards raised": row("reward/episode", lambda value: value + 5),
    "a coefficient": row("kl/ref/coef", lambda value: 2 * value),
    "a loss": row("loss/objective", lambda value: value - 1),
    "the evaluation raised": row("eval/return", lambda value: value + 5),
    "the best raised": row("eval/best_return", lambda value: value + 5),
    "a time": row("time/iteration", lambda value: value / 2),
    "the first row gone": edited("metrics.jsonl", lambda lines: lines[1:]),
    "a row gone": edited("metrics.jsonl", lambda lines: lines[:2] + lines[3:]),
    "the last row gone": edited("metrics.jsonl", lambda lines: lines[:-1]),
    "a row twice": edited("metrics.jsonl", lambda lines: [*lines[:2], *lines[1:]]),
    "no iterations": without("iteration"),
    "no rows": lambda run: (run / "metrics.jsonl").unlink(),
    "no samples": lambda run: (run / "samples.jsonl").unlink(),
    "an evaluation with digests that fit": forged,
    "scores raised": sample("reward", lambda value: value + 5),
    "prompts replaced": sample("prompt", other),
    "prompts of the last draw": sample("prompt", other, where=last_draw),
    "prompt ids": sample("prompt_ids", lambda ids: ids[::-1]),
    "prompt ids of the last draw": sample("prompt_ids", lambda ids: ids[::-1], where=last_draw),
    "the best kept": edited("samples.jsonl", best),
    "the last draw gone": edited(
        "samples.jsonl", lambda lines: [x for x in lines if "reward" in x]
    ),
    "a sample gone": edited("samples.jsonl", lambda lines: lines[1:]),
    "truncated inverted": sample("truncated", lambda value: not value),
    "truncated of the last draw": sample("truncated", lambda value: not value, where=last_draw),
    "tokens": sample("tokens", lambda value: [*value[::-1], "x"]),
    "tokens of the last draw": sample("tokens", lambda value: [*value, "x"], where=last_draw),
    "responses": sample("response", lambda value: value + "!"),
    "response ids": sample("response_ids", lambda ids: [ids[0] ^ 1, *ids[1:]]),
    "a log-prob": sample("log_probs", first_changed),
    "a log-prob of the last draw": sample("log_probs", first_changed, where=last_draw),
    "a log-prob of the reference": sample("ref_log_probs", first_changed, where=last_draw),
    "a KL of a sample": sample("kl", first_changed, where=last_draw),
    "a reward of the last draw": edited("samples.jsonl", rewarded),
    "another iteration": sample("iteration", lambda value: value + 1),
    "samples in another order": edited("samples.jsonl", lambda lines: [*lines[1::-1], *lines[2:]]),
    "settings": text(".hydra/config.yaml", "coef: 0.1", "coef: 0.3"),
    "weights": byte("checkpoints/last/*/agent.safetensors"),
    "a checkpoint's manifest": byte("checkpoints/last/*/manifest.json"),
}


@pytest.fixture(scope="module")
def record(model, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("record") / "run"
    words = ("eval.every=null", "eval.evaluations=2", "eval.final=12", "eval.share=0.5")
    assert run_klrl(*QUICK, *words, f"actor.model={model}", f"hydra.run.dir={run}") == 0
    return run


def test_a_true_record_passes(record) -> None:
    found = verify_run(record)
    assert found.problems == []
    assert found.ok
    looked = "; ".join(found.looked)
    for what in ("eval/return", "eval/kl_ref", "rewards of", "prompts, ids, tokens"):
        assert what in looked
    assert found.lines[-1].startswith("not checked: ")


#: One of each kind of check.
QUICKLY = (
    *("every KL is 0", "an evaluation with digests that fit", "a coefficient"),
    *("prompts of the last draw", "prompt ids of the last draw", "scores raised"),
    *("the last draw gone", "truncated of the last draw"),
    *(
        "no iterations",
        "tokens of the last draw",
        "a log-prob of the last draw",
        "settings",
        "weights",
    ),
)


@pytest.mark.parametrize("what", marked("slow", TAMPERED, *QUICKLY))
def test_what_was_changed_is_found(what, record, tmp_path) -> None:
    copy = shutil.copytree(record, tmp_path / "copy")
    TAMPERED[what](copy)
    assert not verify_run(copy).ok


def problems_of(run: Path, config: JobConfig) -> list[str]:
    """Of a control run."""
    record = Record()
    verify_record(run, config, "cpu", record)
    return record.problems


def test_a_control_run_is_verified(tmp_path) -> None:
    words = ("eval.every=null", "eval.evaluations=2", "eval.episodes=2", "eval.final=3")
    assert run_klrl(*CONTROL, *words, "eval.share=9", "hydra.run.dir=run") == 0
    run = Path("run")
    assert run_klrl("verify", "run") == 0
    config = klrl.load_run(run).config
    assert problems_of(run, config) == []
    for change, words in RESIGNED.values():
        copy = shutil.copytree(run, tmp_path / "copy")
        resigned(change, copy)
        assert problems_of(copy, config)[0].startswith(words)
        shutil.rmtree(copy)
    copy = shutil.copytree(run, tmp_path / "copy")
    from_elsewhere(copy)
    problems = problems_of(copy, config)
    assert [problem.split(":")[0] for problem in problems] == ["eval/return", "eval/return_se"]
    edited("metrics.jsonl", invented)(run)
    assert "ends with iteration" in problems_of(run, config)[0]
    assert run_klrl("verify", "run") == 1


class Kill(klrl.Callback):
    """Ends a run in its third iteration as a kill does."""

    def iterated(self, training: Any, row: Any, batch: Any) -> None:
        if training.counters.iteration == 3:
            os._exit(9)


def test_a_run_that_went_on_from_before_its_best_is_true() -> None:
    """The best checkpoint is later than the last."""
    words = (*CONTROL, "frames=384", "eval.every=1", "eval.episodes=2", "eval.final=2")
    words = (*words, "checkpoint.every=10", "optim.lr=0.01")
    killed = partial(klrl.run, *words, folder="run", callbacks=[Kill()])
    assert in_fork(killed, Path()).code == 9
    assert not list(Path("run/checkpoints/last").glob("frames-*64"))
    assert run_klrl("resume=run") == 0
    assert problems_of(Path("run"), klrl.load_run("run").config) == []
