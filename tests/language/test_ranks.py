"""One language run on several processes: rows, refusals, stops and resumes (docs/scaling.md)."""

import json
import math
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.sort_digits_base import build
from klrl.base.errors import ConfigError
from klrl.runs.folder import read_manifest
from klrl.runs.machine import check_ranks
from tests.language.conftest import QUICK, QUICK_MODEL
from tests.runs.commands import rows_of

pytestmark = pytest.mark.timeout(600)  # each process imports torch and transformers

#: Runs jobs one after another, each in its own folder, in the process of one rank.
WORKER = """
import json, sys
import klrl
from klrl.base import ranks
from klrl.runs.checkpoint import checksum
from klrl.train.callbacks import Callback

class Watch(Callback):
    def __init__(self, path):
        self.path = path
    def iterated(self, training, row, batch):
        with open(self.path, "a") as file:
            weights = training.parts.actor.state_dict()
            digests = {name: checksum(weight) for name, weight in weights.items()}
            seen = [batch["tokens", "response"].tolist(), digests]
            file.write(json.dumps(seen) + "\\n")

with ranks.joined():
    for name, words in json.loads(sys.argv[1]).items():
        klrl.run(*words, folder=name, callbacks=[Watch(f"{name}.{ranks.rank()}.watch")])
"""


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def launched(
    world: int, arguments: list[str], folder: Path, **more: str
) -> list[subprocess.Popen[str]]:
    """Start the processes as torchrun would, without its own process."""
    env = {
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "test"},
        **{"WORLD_SIZE": str(world), **more},
    }
    return [
        started([sys.executable, *arguments], folder, RANK=str(rank), LOCAL_RANK=str(rank), **env)
        for rank in range(world)
    ]


def started(command: list[str], folder: Path, **more: str) -> subprocess.Popen[str]:
    here = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **here, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def communicated(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    out, error = process.communicate(timeout=300)
    return process.returncode, out, error


def ended(processes: list[subprocess.Popen[str]]) -> None:
    """All end, and well."""
    try:
        said = [communicated(each) for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()
    assert [each[0] for each in said] == [0] * len(said), said


def watched(path: Path) -> list[list]:
    return [json.loads(line) for line in path.read_text().splitlines()]


JOBS = {
    "clip": (),
    "klpen": (
        "loss=klpen",
        "loss.dtarg=.01",
        "learner.epochs=2",
        "collector.prompts=8",
        "frames=96",
    ),
    "lora": ("actor.lora.r=2", "reference=adapter_off", "kl.estimator=exact", "kl.placement=loss"),
    "parts": ("learner.micro_batch=1", "learner.minibatches=1", "loss.normalize_advantage=true"),
    "cut": (
        "loss.mask_truncated=true",
        "loss.reduction=sequence",
        "kl.divergence=js",
        "kl.placement=split",
        "kl.estimator=exact",
    ),
    "stale": ("collector.staleness=1", "loss.sampler_weight=truncate", "loss.anchor=old"),
    "dppo": ("loss=dppo", "loss.measure=tv_exact", "kl=none"),
    "mixed": ("learner.dtype=mixed",),
}


#: A reward function that draws numbers from torch's generator, which also shuffles prompts.
DRAWN = """
import torch

def reward(prompts, responses, rows):
    return [len(each) + float(torch.rand(())) for each in responses]
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    rows = [{"prompt": f"{i}", "answer": f"{i * 7 % 90}"} for i in range(24)]
    path.write_text("\n".join(map(json.dumps, rows)))
    (path.parent / "drawn.py").write_text(DRAWN)
    build(replace(QUICK_MODEL, seed=1), path.parent / "teacher")
    return str(path)


def jobs_on(model: str, answers: str) -> dict[str, list[str]]:
    common = [*QUICK, f"actor.model={model}", "device=cpu", "frames=48"]
    words = {name: [*common, *more] for name, more in JOBS.items()}
    words["drawn"] = [
        *(word for word in common if not word.startswith("env.reward=")),
        *(f"env.reward='{Path(answers).parent}/drawn.py:reward'", "kl=none", "collector.prompts=8"),
        "frames=96",
    ]
    words["distill"] = [
        *("experiment=distill_text", *common[1:], "actor.dtype=float64"),  # a KL of .002 nats
        *("reference=model", f"reference.path={Path(answers).parent}/teacher"),
    ]
    words["sft"] = [
        *("experiment=sft", f"data={answers}", f"actor.model={model}", "frames=24", "device=cpu"),
        *("collector.prompts=8", "learner.minibatches=2", "collector.max_new_tokens=8"),
        *("logger=none", "optim.lr=.01", "eval.every=0"),
    ]
    return words


#: In these jobs a rank's gradient is a part of the minibatch's in every way that there is.
QUICKEST = ("parts", "stale", "drawn")


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, QUICKEST),
        pytest.param(2, (*JOBS, "drawn", "distill", "sft"), marks=pytest.mark.slow),
        pytest.param(4, (*JOBS, "drawn", "distill", "sft"), marks=pytest.mark.slow),
    ],
)
def test_rows_are_those_of_one_process(
    world: int, names: tuple[str, ...], model: str, answers: str, tmp_path: Path
) -> None:
    jobs = {name: words for name, words in jobs_on(model, answers).items() if name in names}
    for words in jobs.values() if world == 4 else ():
        words.append("learner.minibatches=1")
    alone = {f"{name}-1": words for name, words in jobs.items()}
    ended(launched(1, ["-c", WORKER, json.dumps(alone)], tmp_path))
    ended(launched(world, ["-c", WORKER, json.dumps(jobs)], tmp_path))
    for name in jobs:
        ranks = [watched(tmp_path / f"{name}.{rank}.watch") for rank in range(world)]
        assert all(each == ranks[0] for each in ranks)  # weights and tokens, to the bit
        one, rows = rows_of(tmp_path / f"{name}-1"), rows_of(tmp_path / name)
        tokens = [each[0] for each in watched(tmp_path / f"{name}-1.0.watch")]
        # Until rounding changes a sampled token, which bfloat16 does soon.
        pairs = zip(ranks[0], tokens, strict=True)
        same = next((i for i, (each, alone) in enumerate(pairs) if each[0] != alone), len(tokens))
        assert same >= (1 if name == "mixed" else 3), (name, same)
        for before, after in zip(one[:same], rows[:same], strict=True):
            assert_near(before, after, 1e-2 if name == "mixed" else 1e-5)


def assert_near(before: dict, after: dict, relative: float) -> None:
    """Metrics differ by rounding; those of rounding itself may differ by their own size."""
    for metric in before.keys() - {"run", "kl/ref/floor", "policy/gap", "kl/sampler/max"}:
        if not metric.startswith("time/"):
            close = max(relative, 1e-4 * metric.endswith("_se"))
            # k1 is a signed mean, whose terms cancel.
            least = 1e-6 if metric.startswith("kl/ref/k1") else 1e-7
            least = max(least, 1e-3 * (relative > 1e-3))
            assert math.isclose(after[metric], before[metric], rel_tol=close, abs_tol=least), metric


def of_klrl(words: list[str]) -> list[str]:
    return ["-m", "klrl", *words]


@pytest.mark.slow
def test_worlds_of_2_1_and_4_go_on_from_one_another(
    model: str, answers: str, tmp_path: Path
) -> None:
    words = [*jobs_on(model, answers)["clip"], "learner.minibatches=1", "hydra.run.dir=run"]
    ended(launched(1, of_klrl([*words, "frames=96", "hydra.run.dir=whole"]), tmp_path))
    ended(launched(2, of_klrl([*words, "frames=32"]), tmp_path))
    ended(launched(1, of_klrl(["resume=run", "frames=64"]), tmp_path))
    ended(launched(4, of_klrl(["resume=run", "frames=96"]), tmp_path))
    rows, whole = rows_of(tmp_path / "run"), rows_of(tmp_path / "whole")
    assert read_manifest(tmp_path / "run")["ranks"] == [2, 1, 4]
    assert len(rows) == len(whole) == 6
    for before, after in zip(whole, rows, strict=True):
        assert_near(before | {"learner/lr": 0}, after | {"learner/lr": 0}, 1e-5)


#: A callback of each rank that does something to itself after its second iteration.
TROUBLED = """
import os, signal, sys, time
import klrl
from klrl.base import ranks
from klrl.base.errors import Interrupted
from klrl.train.callbacks import Callback

class Trouble(Callback):
    def iterated(self, training, row, batch):
        if training.counters.iteration != 2 or ranks.rank() != 1:
            return
        if sys.argv[1] == "changed":
            next(training.parts.actor.parameters()).data.view(-1)[0] += 1e-6
        elif sys.argv[1] == "hangs":
            time.sleep(100)
        else:
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))

try:
    klrl.run(*sys.argv[2:], folder="run", callbacks=[Trouble()])
except Interrupted as stop:
    sys.exit(128 + stop.signum)
except RuntimeError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "codes", "told"),
    [
        ("SIGTERM", [143, 143], ""),
        ("SIGKILL", [1, -9], "another process has ended"),
        ("changed", [1, 1], "rank 1: its weights differ from those of the other processes, first"),
        ("hangs", [1, None], "does not answer"),
    ],
)
def test_trouble_in_one_rank_ends_all(
    trouble: str, codes: list, told: str, model: str, answers: str, tmp_path: Path
) -> None:
    words = [*jobs_on(model, answers)["clip"], "frames=96", "rank_timeout=15"]
    processes = launched(2, ["-c", TROUBLED, trouble, *words], tmp_path)
    code, _, error = communicated(processes[0])
    assert code == codes[0], error
    assert told in error
    processes[1].kill() if trouble == "hangs" else None
    other = communicated(processes[1])
    assert codes[1] in (other[0], None)
    # The last checkpoint is whole: the run goes on.
    ended(launched(1, of_klrl(["resume=run"]), tmp_path))
    assert [row["iteration"] for row in rows_of(tmp_path / "run")] == list(range(1, 7))


REFUSED = {
    ("learner.minibatches=4",): "torchrun: 2 processes do not divide the 1 prompts of a minibatch",
    ("advantage=gae", "loss.normalize_advantage=true"): "advantage=gae: its critic learns in one",
    ("device=cuda:1",): "device=cuda:1: each process takes its own GPU; use cuda",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_job_that_processes_cannot_share_is_refused(
    words: tuple[str, ...], job, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=re.escape(REFUSED[words])):
        check_ranks(job(*words))


@pytest.mark.slow
def test_torchrun_itself(model: str, answers: str, tmp_path: Path) -> None:
    words = [*jobs_on(model, answers)["clip"], "hydra.run.dir=run"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "klrl"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*command, *words], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished 48 samples") == 1
    done = subprocess.run(
        [*command, *words, "-m", "seed=0,1"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode
    assert done.stderr.count("-m: torchrun starts one run") == 1
    for again in ((), ("sedd=0",)):  # a folder that has a run, which rank 0 alone sees; a typo
        done = subprocess.run(
            [*command, *words, *again], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        said = [line for line in done.stderr.splitlines() if line.startswith("klrl: ")]
        assert len(said) == 1
        assert "sedd" in said[0] if again else "already has a run" in said[0]


def torchrun(machines: int) -> list[str]:
    """The command of docs/scaling.md for each of some machines; this host has all of them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(machines)]
    rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    return [*command, *rendezvous, "--nproc_per_node", "1", "--local_addr", "127.0.0.1"]


def check_machines(words: list[str], folder: Path) -> None:
    """The run in ``run`` equals that of one process."""
    ended(launched(1, of_klrl([*words, "hydra.run.dir=alone"]), folder))
    rows, alone = rows_of(folder / "run"), rows_of(folder / "alone")
    assert len(rows) == len(alone) == 3
    for before, after in zip(alone, rows, strict=True):
        assert_near(before, after, 1e-5)


@pytest.mark.slow
def test_three_machines_are_one_process(model: str, answers: str, tmp_path: Path) -> None:
    words = [*jobs_on(model, answers)["clip"], "collector.prompts=6", "frames=72"]
    command = [*torchrun(3), *of_klrl([*words, "hydra.run.dir=run"])]
    ended([started(command, tmp_path) for _ in range(3)])
    assert read_manifest(tmp_path / "run")["ranks"] == [3]
    check_machines(words, tmp_path)


@pytest.mark.skipif("KLRL_SLURM" not in os.environ, reason="make test-slurm runs it")
def test_srun_starts_a_torchrun_for_each_task(model: str, answers: str, tmp_path: Path) -> None:
    words = jobs_on(model, answers)["clip"]
    command = ["srun", "--ntasks", "2", *torchrun(2), *of_klrl([*words, "hydra.run.dir=run"])]
    ended([started(command, tmp_path)])
    assert read_manifest(tmp_path / "run")["ranks"] == [2]
    check_machines(words, tmp_path)
