"""``klrl verify`` of control runs: true records pass, and each fault of a record is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import klrl
from klrl.train.loop import Training
from klrl.train.verify import Record, verify_record
from tests.conftest import QUICK, marked
from tests.runs.commands import exits, last_choices, said

pytestmark = pytest.mark.integration

#: The policy moves away from its reference by 1.5 nats per frame.
WORDS = (
    *(word for word in QUICK if word != "eval.every=0"),
    *("frames=2048", "env.num_envs=8", "env.kwargs={max_episode_steps:20}", "optim.lr=0.1"),
    *("kl.coef=0.001", "loss.beta=0.01"),
    *("eval.evaluations=2", "eval.episodes=2", "eval.share=1", "eval.final=4"),
)

Rows = list[dict[str, float]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return klrl.run(*WORDS, folder=tmp_path_factory.mktemp("finished") / "run").folder


@pytest.fixture
def run(finished: Path) -> Path:
    return Path(shutil.copytree(finished, "run"))


def verified(run: Path) -> Record:
    verify_record(run, klrl.load_run(str(run)).config, "cpu", record := Record())
    return record


def write(run: Path, rows: Rows) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    "words",
    marked(
        "slow",
        [
            "kl.placement=loss kl.estimator=exact",
            "kl.placement=split kl.estimator=exact",
            "kl.placement=split kl.estimator=exact kl.divergence=js",
            "kl.estimator=k3 kl.allow_biased=true controller=adaptive controller.target=0.1",
            "kl=legacy kl.apply=step",
            "kl=none",
            "env=cartpole env.kwargs={} reference=ema",
        ],
    ),
)
def test_a_true_record_passes(words: str) -> None:
    common = [word for word in WORDS if "kl=none" not in words or "kl.coef" not in word]
    assert (
        verified(klrl.run(*last_choices([*common, *words.split()]), folder="run").folder).problems
        == []
    )


def each(name: str, new: Callable[[float], float]) -> Callable[[Rows], None]:
    """A new value of a metric in each row that has it."""

    def change(rows: Rows) -> None:
        for row in rows:
            if name in row:
                row[name] = new(row[name])

    return change


def half_charged(rows: Rows) -> None:
    for row in rows[1:]:
        row["kl/ref/penalty"] /= 2
        row["reward/shaped"] = row["reward/raw"] - row["kl/ref/penalty"]


#: A fault -> its effect on the rows, and how ``klrl verify`` names it.
FAULTS: dict[str, tuple[Callable[[Rows], None], str]] = {
    "no exact KL": (each("kl/ref/exact", lambda x: 0.0), "over all frames kl/ref/exact sums to 0"),
    "half the KL": (each("kl/ref/exact", lambda x: x / 2), "over all frames kl/ref/exact"),
    "twice the KL": (each("kl/ref/exact", lambda x: x * 2), "over all frames kl/ref/exact"),
    "a negative KL": (
        lambda rows: rows[-1].update({"kl/ref/exact": -1e-3}),
        "iteration 8: kl/ref/exact is -0.001, but a KL is at least 0",
    ),
    "a penalty unpaid": (
        lambda rows: rows[-1].update({"reward/shaped": rows[-1]["reward/raw"]}),
        "iteration 8: reward/shaped is",
    ),
    "half the penalty": (half_charged, "iteration 3: kl/ref/penalty is"),
    "an evaluation": (each("eval/return", lambda x: x + 5), "eval/return: recorded"),
    "a lost row": (lambda rows: rows.remove(rows[3]), "its iterations are not 1, 2, 3"),
    "a lost end": (lambda rows: rows.remove(rows[-1]), "finished, but no row has frames=2048"),
    "the best": (each("eval/best_return", lambda x: x + 5), "eval/best_return: recorded"),
}


def test_the_faults_of_rows_are_named(run: Path) -> None:
    assert verified(run).problems == []
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    missed = {}
    for fault, (change, words) in FAULTS.items():
        changed = [dict(row) for row in rows]
        change(changed)
        write(run, changed)
        problems = verified(run).problems
        if not any(words in problem for problem in problems):
            missed[fault] = problems
    assert missed == {}


def test_a_damaged_checkpoint_is_named(run: Path, capsys) -> None:
    (file,) = run.glob("checkpoints/last/*2048/state.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    shutil.rmtree(run / "checkpoints/best")
    code, out, _ = said(capsys, "verify", "run")
    assert code == 1
    assert "checkpoint last/frames-000000002048 is damaged (state.safetensors: " in out
    assert "not checked: evaluation of the best checkpoint (" in out


def keep_the_initial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every checkpoint holds the policy of the first, with true digests."""
    save, first = Training._save, {}

    def saved(training: Training, *where: object) -> None:
        agent = training.parts.components()["agent"]
        now = {name: each.clone() for name, each in agent.state_dict().items()}
        first.update({} if first else now)
        agent.load_state_dict(first)
        save(training, *where)
        agent.load_state_dict(now)

    monkeypatch.setattr(Training, "_save", saved)


def test_a_checkpoint_of_the_initial_policy_is_named(monkeypatch) -> None:
    """Its rows are true: only its evaluation differs, whose KL is 0."""
    keep_the_initial(monkeypatch)
    found = verified(klrl.run(*WORDS, folder="run").folder)
    (line,) = (line for line in found.problems if line.startswith("eval/kl_ref: "))
    assert line.endswith("but the last checkpoint has 0")
    assert all(" checkpoint has " in line for line in found.problems)


def test_a_number_of_a_task_that_does_not_repeat_itself_is_not_called_wrong() -> None:
    task = ("env=custom", "env.target=tests.control.toys:Unseeded")
    words = (*(word for word in WORDS if not word.startswith("env")), *task)
    found = verified(klrl.run(*words, folder="run").folder)
    assert found.problems == []
    assert "closing evaluations: the manifest says repeatable: no" in found.unseen
    assert exits("verify", "run") == 0
