"""The evaluations of a run: their rows, the best policy, resuming, and what they leave alone."""

import json
import re
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import klrl
from klrl.base.errors import EnvError, Interrupted
from klrl.control.run.evaluate import evaluate_policy
from klrl.control.run.load import trained_agent, trained_reference
from klrl.control.run.parts import ControlParts
from klrl.domains import CONTROL
from klrl.runs.metrics import TIMES, Row
from klrl.runs.rows import read_rows
from klrl.train.callbacks import Callback
from klrl.train.scores import CLOSING, IN_RUN, Evaluation, EvaluationPlan, Size
from tests.conftest import QUICK, marked
from tests.runs.commands import exits, manifest_of

pytestmark = pytest.mark.integration

#: Six iterations of 64 frames, evaluated before the first, after the third and after the last; an
#: episode has 20 steps.
WORDS = (
    *(word for word in QUICK if word != "eval.every=0"),
    *("frames=384", "env.kwargs={max_episode_steps:20}", "checkpoint.every=1", "optim.lr=0.01"),
    *("eval.evaluations=3", "eval.episodes=4", "eval.share=1", "eval.final=6"),
)
OFF = (*(word for word in WORDS if not word.startswith("eval.")), "eval.every=0")


def rows_of(run: str) -> list[Row]:
    rows = read_rows(Path(run) / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def evals(row: Row) -> Row:
    return {name: value for name, value in row.items() if name.startswith("eval/")}


def without(rows: list[Row]) -> list[Row]:
    """Rows less their evaluations; a row that has nothing else is none."""
    rest = [{k: v for k, v in row.items() if k not in evals(row)} for row in rows]
    return [row for row in rest if row["iteration"]]


def played(run: str, which: str, starts, count: int) -> Row:
    """An evaluation of a checkpoint."""
    config, agent = klrl.load_run(run).config, trained_agent(Path(run), which)
    plan = EvaluationPlan(starts, Size(count), False, torch.device("cpu"))
    reference = trained_reference(Path(run), which, "cpu").policy_net
    return evaluate_policy(agent, config.env, plan, reference).row


def test_rows_hold_an_evaluation_of_the_start_and_the_closing_one(capsys) -> None:
    assert exits(*WORDS, "hydra.run.dir=run") == 0
    told = capsys.readouterr().out
    rows = rows_of("run")
    assert [row["frames"] for row in rows] == [0, 64, 128, 192, 256, 320, 384]
    assert [row["iteration"] for row in rows if evals(row)] == [0, 3, 6]
    assert rows[0].keys() - evals(rows[0]).keys() == {"iteration", "frames"}
    assert [rows[i]["eval/episodes"] for i in (0, 3, 6)] == [4, 4, 6]
    last = evals(rows[-1])
    assert {k: last[k] for k in last if "best" not in k} == played("run", "last", CLOSING, 6)
    assert "evaluations: 3 during the run (4 episodes each), then 6 episodes at the end" in told
    mean, error = re.search(r"return (\S+) \+- (\S+) \(standard error over 6", told).groups()
    decimals = len(mean.partition(".")[2])
    assert decimals == len(error.partition(".")[2])
    for text, name in ((mean, "eval/return"), (error, "eval/return_se")):
        assert float(text) == pytest.approx(last[name], abs=0.5001 * 10.0**-decimals)
    assert "(standard error over 6 episodes, deterministic, " in told
    assert manifest_of(Path("run"))["evaluation"] == "deterministic"
    assert klrl.load_run("run").summary["return"] == last["eval/return"]


class Spoil(Callback):
    """Makes a cartpole policy worse after the fifth iteration: it pushes to one side."""

    def iterated(self, training, row, batch) -> None:
        if training.counters.iteration == 5:
            with torch.no_grad():
                training.parts.agent.policy_net.head.bias.copy_(torch.tensor([99.0, -99.0]))


class Clock(Callback):
    """Times each evaluation, and keeps what the progress line calls its time."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.phases: set[str] = set()

    def started(self, training) -> None:
        parts, evaluate = training.parts, training.parts.evaluation

        def timed(*args):
            began = time.perf_counter()
            result = evaluate(*args)
            self.seconds.append(time.perf_counter() - began)
            self.phases.add(parts.phase.name)
            return result

        parts.evaluation = timed


def test_the_best_is_chosen_in_the_run_and_told_from_other_start_states() -> None:
    clock = Clock()
    klrl.run(*WORDS, "env=cartpole", folder="run", callbacks=[Spoil(), clock])
    rows = rows_of("run")
    assert clock.phases == {"evaluation"}, "the first one too, before any row"
    # Three of them in the last iteration: in place, closing, and of the best.
    seconds = read_rows(Path("run/metrics.jsonl"))[-1]["time/evaluation"]
    assert seconds == pytest.approx(sum(clock.seconds[-3:]), rel=0.05, abs=0.1)
    best = max(rows[i]["eval/return"] for i in (0, 3))
    assert played("run", "best", IN_RUN, 4)["eval/return"] == best
    closing = played("run", "best", CLOSING, 6)
    last = rows[-1]
    assert last["eval/best_return"] == closing["eval/return"] != last["eval/return"]
    assert last["eval/best_return_se"] == closing["eval/return_se"]
    # Playing the best left the last policy as it was.
    assert played("run", "last", CLOSING, 6)["eval/return"] == last["eval/return"]


def returning(patch: pytest.MonkeyPatch, returns: Iterable[float], closing: float) -> None:
    """Let the evaluations during a run have these returns, and those at its end another."""
    values = iter(returns)

    def play(agent, config, plan, reference) -> Evaluation:
        value = float(next(values)) if plan.starts == IN_RUN else closing
        return Evaluation([value] * 4, CONTROL, "deterministic")

    patch.setattr("klrl.control.run.evaluate.evaluate_policy", play)


def test_the_closing_evaluation_chooses_nothing(monkeypatch) -> None:
    """Its start states say that the last policy is the best; those of the run, the first."""
    returning(monkeypatch, (-1, -2, -3), closing=100.0)
    assert exits(*WORDS, "hydra.run.dir=run") == 0
    assert best_of("run") == (0, -1.0)


@pytest.mark.parametrize("more", [("eval.sampled=true",), ("env=cartpole",)], ids=str)
def test_training_is_the_same_with_and_without_evaluations(more) -> None:
    words = [word for word in more if not word.startswith("eval.")]
    assert exits(*WORDS, *more, "hydra.run.dir=on") == 0
    assert exits(*OFF, *words, "hydra.run.dir=off") == 0
    assert without(rows_of("on")) == rows_of("off")


class StopAfter(Callback):
    """Ends a run in good order."""

    def __init__(self, iteration: int) -> None:
        self._iteration = iteration

    def iterated(self, training, row, batch) -> None:
        if training.counters.iteration == self._iteration:
            training.stop()


@pytest.mark.parametrize("iteration", marked("slow", (1, 3, 5), 3))
def test_a_resumed_run_has_the_same_evaluations(iteration: int) -> None:
    assert exits(*WORDS, "hydra.run.dir=whole") == 0
    with pytest.raises(Interrupted):
        klrl.run(*WORDS, folder="halves", callbacks=[StopAfter(iteration)])
    before = rows_of("halves")
    assert not any("eval/best_return" in row for row in before)
    assert exits("resume=halves") == 0
    rows, whole = rows_of("halves"), rows_of("whole")
    # Its environments start anew, so that later rows have other numbers.
    assert rows[: iteration + 1] == before == whole[: iteration + 1]
    assert [evals(row).keys() for row in rows] == [evals(row).keys() for row in whole]
    last = evals(rows[-1])
    assert {k: last[k] for k in last if "best" not in k} == played("halves", "last", CLOSING, 6)
    assert last["eval/best_return"] == played("halves", "best", CLOSING, 6)["eval/return"]


def best_of(run: str) -> tuple[int, float]:
    """Frames and return of the best checkpoint."""
    (entry,) = Path(run, "checkpoints/best").iterdir()
    manifest = json.loads((entry / "manifest.json").read_text())
    return manifest["frames"], manifest["metadata"]["best_return"]


@pytest.mark.parametrize(
    ("words", "returns", "best"),
    [
        # Of 128 frames, before ``last``; then of 256, after it, so that the row of 256 is cut off.
        ([], (1, 2, 0), (128, 2)),
        ([], (1, 2, 0, 5), (320, 0.5)),
        # Sampled and deterministic returns have different means; 0.5 > 0 of the same kind.
        (["eval.sampled=true"], (1, 2, 0), (320, 0.5)),
        (["eval.episodes=3"], (1, 2, 0), (320, 0.5)),
    ],
)
def test_the_best_of_a_resumed_run_is_that_of_its_rows(words, returns, best, monkeypatch) -> None:
    """Whatever was after the checkpoint ``last``, at 192 frames, did not happen."""

    class Killed(Callback):
        def iterated(self, training, row, batch) -> None:
            if training.counters.iteration == len(returns) + 1:
                raise KeyError("killed")

    returning(monkeypatch, [*returns, -1], closing=-9.0)
    every = (*OFF[:-1], "eval.every=1", "eval.episodes=4", "eval.final=6", "checkpoint.every=3")
    with pytest.raises(KeyError):
        klrl.run(*every, folder="run", callbacks=[Killed()])
    returning(monkeypatch, [0, 0.5, -1], closing=-9.0)
    assert exits("resume=run", *words) == 0
    rows = {row["frames"]: row for row in rows_of("run")}
    assert [rows[64 * i]["eval/return"] for i in (4, 5)] == [0, 0.5]
    assert best_of("run") == best
    assert rows[best[0]]["eval/return"] == best[1]


def test_a_run_resumed_from_its_very_beginning_keeps_the_row_of_the_start() -> None:
    class Broken(Callback):
        def iterated(self, training, row, batch) -> None:
            raise KeyError("mine")

    assert exits(*WORDS, "hydra.run.dir=whole") == 0
    with pytest.raises(KeyError):
        klrl.run(*WORDS, folder="run", callbacks=[Broken()])
    assert [row["iteration"] for row in rows_of("run")] == [0]
    assert exits("resume=run") == 0
    assert rows_of("run") == rows_of("whole")


def test_a_best_checkpoint_that_cannot_be_read_costs_its_line_only(capsys) -> None:
    class Lose(Spoil):
        def iterated(self, training, row, batch) -> None:
            super().iterated(training, row, batch)
            if training.counters.iteration == 5:
                for file in Path("run/checkpoints/best").rglob("*.safetensors"):
                    file.write_bytes(b"broken")

    klrl.run(*WORDS, "env=cartpole", folder="run", callbacks=[Lose()])
    last = rows_of("run")[-1]
    assert "eval/return" in last
    assert "eval/best_return" not in last
    assert "best checkpoint: " in capsys.readouterr().err
    assert manifest_of(Path("run"))["status"] == "finished"
    assert played("run", "last", CLOSING, 6)["eval/return"] == last["eval/return"]


def test_a_closing_evaluation_that_fails_costs_no_finished_run(monkeypatch, capsys) -> None:
    play = ControlParts.evaluation

    def broken(self, starts, size):
        if starts == CLOSING:
            raise EnvError("the simulator is gone")
        return play(self, starts, size)

    monkeypatch.setattr(ControlParts, "evaluation", broken)
    assert exits(*WORDS, "hydra.run.dir=run") == 0
    last = rows_of("run")[-1]
    assert last["eval/episodes"] == 4, "that of the run stays"
    told = capsys.readouterr().err.splitlines()
    line = (
        "klrl: closing evaluation: EnvError: the simulator is gone; the run is complete without it"
    )
    assert told == [line]
    assert manifest_of(Path("run"))["status"] == "finished"


def test_no_closing_evaluation_and_none_at_all() -> None:
    assert exits(*WORDS, "eval.final=0", "hydra.run.dir=run") == 0
    last = rows_of("run")[-1]
    assert last["eval/episodes"] == 4
    assert "eval/best_return" not in last
    assert exits(*OFF, "hydra.run.dir=off") == 0
    assert not any(evals(row) for row in rows_of("off"))
    assert "evaluation" not in {p.name for p in Path("off/checkpoints").iterdir()}
    assert {p.name for p in Path("off/checkpoints").iterdir()} == {"last"}


def test_an_environment_that_never_ends_has_no_return_and_no_best(capsys) -> None:
    words = ("env.kwargs={max_episode_steps:-1}", "eval.share=60", "hydra.run.dir=run")
    assert exits(*WORDS, *words) == 0
    rows = rows_of("run")
    told = {name: value for name, value in rows[0].items() if not name.startswith("eval/kl_ref")}
    assert told == {"iteration": 0, "frames": 0, "eval/episodes": 0, "eval/cut": 4}
    assert not any("eval/return" in row for row in rows)
    assert {p.name for p in Path("run/checkpoints").iterdir()} == {"last"}
    said = capsys.readouterr().out
    assert (
        "no return: none of 6 episodes ended (deterministic); episodes that never end need" in said
    )
    (limit,) = {word for word in said.split("'") if word.startswith("env.wrappers=")}
    assert exits(*WORDS, *words[:2], limit.replace("1000", "9"), "hydra.run.dir=limited") == 0
    assert any("eval/return" in row for row in rows_of("limited"))


@pytest.mark.usefixtures("without_charts")
def test_readers_take_a_row_without_an_iteration(capsys) -> None:
    assert exits(*WORDS, "hydra.run.dir=outputs/a") == 0
    assert exits(*WORDS, "seed=1", "hydra.run.dir=outputs/b") == 0
    for words in (["ls"], ["diff", "outputs/a", "outputs/b"], ["report", "outputs"]):
        assert exits(*words) == 0, words
    assert klrl.load_run("outputs/a").figure().axes[0].get_lines()[-1].get_xdata()[0] == 0
