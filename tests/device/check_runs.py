"""Whole runs on the second device: the rows are the CPU's; resumed, they go on as they were."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import klrl
from klrl.__main__ import main
from klrl.base.errors import Interrupted
from klrl.runs.rows import read_rows
from tests.conftest import QUICK
from tests.device import standin
from tests.device.rows import assert_same
from tests.language.conftest import QUICK as QUICK_LANGUAGE
from tests.language.conftest import QUICK_MODEL

EAGER = "learner.compile=false"
OWN_ENV = ("env=gym", "env.id=bits:Bits-v0")
EVALUATED = ("eval.every=1", "eval.episodes=1")
CONTROL = {
    "main": (),
    "clip": (
        *(EAGER, "env=cartpole", "loss=clip", "kl=legacy", "reference=ema", "optim=adamw"),
        *("controller=schedule", *EVALUATED),
    ),
    "tanh": (
        *("actor=tanh_normal", "loss=klpen_held", "kl.placement=split", "kl.estimator=exact"),
        *("reference=periodic", "controller=adaptive"),
    ),
    "step": (EAGER, "collector=torchrl", "kl.apply=step", "controller=dual", "reference=ema"),
    "step_native": (EAGER, "kl.apply=step"),
    "step_legacy": (EAGER, "kl=legacy", "kl.apply=step"),
    "tanh_torchrl": (EAGER, "actor=tanh_normal", "collector=torchrl", "kl.placement=loss"),
    "pixels": (EAGER, "env=catch", "actor.hidden=[8]"),
    "discrete": (EAGER, *OWN_ENV, "loss.line_search=back"),
    "bits": (
        *(EAGER, *OWN_ENV, "+env.kwargs.bits=true", "kl.divergence=js"),
        *("kl.placement=split", "kl.estimator=exact"),
    ),
    "shared": (
        *(EAGER, "env=acrobot", "actor.share_trunk=true", "loss.separate_losses=true"),
        *("actor.activation=gelu", "kl.estimator=k3", "kl.allow_biased=true"),
    ),
    "free": (EAGER, "kl=none", "env.normalize_reward=true"),
    "trpo": ("loss=trpo", "kl.placement=split", "kl.estimator=exact"),
}
LANGUAGE = {
    "lm": ("eval.every=1", "eval.episodes=4"),
    "lm_gae": (
        *("advantage=gae", "loss=klpen_held", "kl.placement=split", "kl.estimator=exact"),
        *("reference=ema", "controller=dual"),
    ),
    "lm_lora": (
        *("actor.lora.r=2", "reference=adapter_off", "kl.placement=loss", "kl.estimator=k3"),
        "advantage.baseline=leave_one_out",
    ),
}
#: The second shows all that the first does, and what is done on the current device instead.
BOTH = ("main", "lm")
BITS = """
import gymnasium, numpy
class Bits(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    def __init__(self, bits=False):
        spaces = gymnasium.spaces
        self.action_space = spaces.MultiBinary(3) if bits else spaces.MultiDiscrete([3, 2])
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 8
        return self.np_random.uniform(-1, 1, 3).astype("float32"), {}
    def step(self, action):
        self.left -= 1
        seen = self.np_random.uniform(-1, 1, 3).astype("float32")
        return seen, float(numpy.sum(action)), self.left == 0, False, {}
if "Bits-v0" not in gymnasium.registry:
    gymnasium.register("Bits-v0", Bits)
"""


@pytest.fixture(autouse=True)
def _one_stream() -> Iterator[None]:
    """The devices' numbers are drawn from the CPU's generator: then they can be compared."""
    standin.one_stream(True)
    yield
    standin.one_stream(False)


def words_of(*words: str) -> list[str]:
    """A later word takes an earlier one's place, as for a choice of env, which comes first."""
    last = {word.split("=", 1)[0].lstrip("+"): word for word in words}
    return [*last.values()]


def runs(job: str, *words: str) -> tuple[klrl.Run, list[klrl.Run]]:
    """A run on the CPU, and its like on CUDA."""
    config, found = klrl.compose(*words_of(*words)), []
    for device in ("cpu", "cuda:1", "cuda:0")[: 3 if job in BOTH else 2]:
        here = copy.deepcopy(config)
        here.device = device
        found.append(klrl.run(here))
        assert found[-1].manifest["device"] == device
    return found[0], found[1:]


@pytest.mark.parametrize("job", CONTROL)
def test_the_rows_of_a_control_run_are_the_cpus(job: str, monkeypatch) -> None:
    Path("bits.py").write_text(BITS)
    monkeypatch.syspath_prepend(".")
    cpu, others = runs(job, *QUICK, *CONTROL[job])
    for run in others:
        assert_same(run.rows, cpu.rows)
        assert run.manifest["compile"] == ("false" if EAGER in CONTROL[job] else "jit")
    kl = [row["kl/ref/exact"] for row in cpu.rows if "kl/ref/exact" in row]
    assert job == "free" or kl[-1] > 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from benchmarks.sort_digits_base import build

    folder = tmp_path_factory.mktemp("model")
    build(QUICK_MODEL, folder)
    return str(folder)


@pytest.mark.parametrize("job", LANGUAGE)
def test_the_rows_of_a_language_run_are_the_cpus(job: str, model: str) -> None:
    cpu, others = runs(job, *QUICK_LANGUAGE, f"actor.model={model}", *LANGUAGE[job])
    for run in others:
        assert_same(run.rows, cpu.rows, rel=2e-3)  # attention's sums are in another order
    assert cpu.rows[-1]["kl/ref/exact"] > 0


# --------------------------------------------------------------------------------------- resuming


class Stops(klrl.Callback):
    """Ends a run after its first iteration."""

    def iterated(self, training, row, batch) -> None:
        training.stop()


#: The samples of its KL(old||new) are drawn from the device's generator.
DRAWS = ("loss.kl_old=sampled", EAGER)


def resumed(run: Path, *words: str) -> list[dict[str, float]]:
    with pytest.raises(SystemExit) as stop:
        main([f"resume={run}", *words])
    assert not stop.value.code
    return read_rows(run / "metrics.jsonl")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, float]], Path]:
    """The rows of a whole run on cuda:1, and a folder of the same one that was stopped in it."""
    standin.one_stream(False)
    folder = tmp_path_factory.mktemp("begun")
    words = words_of(*QUICK, *DRAWS, "frames=192", "device=cuda:1")
    whole = klrl.run(*words, folder=folder / "whole")
    with pytest.raises(Interrupted):
        klrl.run(*words, folder=folder / "stopped", callbacks=[Stops()])
    return whole.rows, folder / "stopped"


def test_a_run_goes_on_on_its_device(begun, tmp_path: Path) -> None:
    """To the bit, with the generator of its device, which is not the CPU's here."""
    whole, stopped = begun
    standin.one_stream(False)
    shutil.copytree(stopped, tmp_path / "run")
    torch.manual_seed(99)
    found = resumed(tmp_path / "run")
    assert_same(found, whole)
    assert found[-1]["kl/ref/exact"] == whole[-1]["kl/ref/exact"]


def test_a_run_goes_on_on_the_cpu(begun, tmp_path: Path, monkeypatch) -> None:
    """Where there is no other device; what its generator drew is another's."""
    whole, stopped = begun
    standin.one_stream(False)
    shutil.copytree(stopped, tmp_path / "run")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    found = resumed(tmp_path / "run", "device=cpu")
    assert_same(found[:1], whole[:1])
    assert [row["frames"] for row in found] == [row["frames"] for row in whole]
    assert found[-1]["kl/ref/exact"] > 0


def test_a_run_of_two_devices_goes_on_with_one(begun, tmp_path: Path, monkeypatch, capsys) -> None:
    whole, stopped = begun
    standin.one_stream(False)
    shutil.copytree(stopped, tmp_path / "run")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.default_generators", torch.cuda.default_generators[:1])
    with pytest.raises(SystemExit) as stop:
        main([f"resume={tmp_path / 'run'}"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "device=cuda:1: torch sees 1 CUDA device here, the last is cuda:0; choose" in said
    assert_same(resumed(tmp_path / "run", "device=cuda:0"), whole)
