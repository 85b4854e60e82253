"""Checkpoints of klrl 0.1.0 are read as TorchRL reads them, but never unpickled, never changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torchrl.checkpoint import Checkpoint, GlobalRNGState

from klrl.base.errors import ConfigError
from klrl.cli.evaluate import main as evaluate_main
from klrl.runs.checkpoint import Checkpoints, load_component
from klrl.train.evaluate import evaluate_run
from tests.runs.saves import DAMAGES, Held, Payload, assert_same, snapshot, steps

FIXTURES = Path(__file__).parents[1] / "fixtures" / "v0_1_0"
RUN = Path("run")
ENTRY = RUN / "checkpoints/last/frames-000000000384"
AGENT = ENTRY / "components/0000-agent"
CPU = torch.device("cpu")
FILES = sorted(
    path.relative_to(FIXTURES / ENTRY).as_posix()
    for path in (FIXTURES / ENTRY).rglob("*")
    if path.is_file()
)


@pytest.fixture(autouse=True)
def _a_copy(_own_folder) -> None:
    shutil.copytree(FIXTURES / "run", RUN)


def load(*names: str) -> dict[str, Any]:
    parts = {name: Held() for name in names or ("agent", "optimizer", "counters", "reference")}
    Checkpoints(RUN / "checkpoints", parts).load_last(CPU)
    return {name: part.state for name, part in parts.items()}


@pytest.mark.parametrize("run", ["run", "klpen_held", "language/run"])
def test_every_component_is_read_as_torchrl_reads_it(run) -> None:
    folder = FIXTURES / run / "checkpoints"
    (entry,) = (folder / "last").iterdir()
    names = set(json.loads((entry / "manifest.json").read_text())["components"]) - {"rng"}
    assert {"agent", "optimizer", "counters", "controller", "beta"} <= names
    mine, theirs = ({name: Held() for name in names} for _ in range(2))
    Checkpoints(folder, mine).load_last(CPU)
    generators = torch.random.get_rng_state()
    torch.manual_seed(1)
    Checkpoint(**theirs, rng=GlobalRNGState()).load(entry)
    assert torch.equal(torch.random.get_rng_state(), generators)
    for name in names:
        assert_same(mine[name].state, theirs[name].state)


def test_every_kind_of_tensor_is_read_as_it_was_written() -> None:
    kinds = {
        "bfloat16": torch.tensor([0x7FC1, 1], dtype=torch.int16).view(torch.bfloat16),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(5),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "flags": torch.tensor([True, False]),
    }
    shutil.rmtree(ENTRY)
    Checkpoint(agent=Held(kinds)).save(ENTRY, metadata={"frames": 384})
    part = Held()
    assert load_component(RUN, "last", "agent", part, CPU) == 384
    assert_same(part.state, kinds)


# ------------------------------------------------------------------------------------- pickles


def in_the_tensors() -> str:
    """What tensordict itself writes where a value is no tensor, and unpickles."""
    state = TensorDict.load(AGENT / "state").clone().to_tensordict()
    shutil.rmtree(AGENT / "state")
    state["x"] = NonTensorData(Payload())
    state.memmap(AGENT / "state")
    return "state/x/other.pickle"


def as_torch_saves() -> str:
    torch.save({"x": torch.zeros(1)}, AGENT / "state.pt")
    return "state.pt"


def as_an_archive() -> str:
    shutil.copy(AGENT / "state.json", AGENT / "state.tdz")
    return "state.tdz"


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("hide", [in_the_tensors, as_torch_saves, as_an_archive])
@pytest.mark.filterwarnings("ignore:TensorDict.load_memmap is loading a pickled:FutureWarning")
def test_a_pickle_is_refused_by_name_and_never_run(hide: Callable[[], str], listed, capsys) -> None:
    name = hide()
    assert (AGENT / name).is_file()
    if listed:
        manifest = json.loads((ENTRY / "manifest.json").read_text())
        here = [p.relative_to(AGENT).as_posix() for p in AGENT.rglob("*") if p.is_file()]
        manifest["components"]["agent"]["files"] = here
        (ENTRY / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError) as refused:
        load()
    assert f"components/0000-agent/{name}: is " in str(refused.value)
    with pytest.raises(SystemExit, match="2"):
        evaluate_main(["run", "--episodes", "1"])
    assert f"components/0000-agent/{name}: is " in capsys.readouterr().err
    assert not Path("pwned").exists()


def test_tensors_of_another_class_are_refused() -> None:
    meta = AGENT / "state/meta.json"
    told = json.loads(meta.read_text())
    meta.write_text(json.dumps(told | {"_type": "<class 'tensordict.tensorclass.NonTensorData'>"}))
    with pytest.raises(ConfigError, match="0000-agent/state/meta.json: it is no plain TensorDict"):
        load()


@pytest.mark.parametrize("path", ["../../../../..", "/tmp", "components/../.."])
def test_a_manifest_cannot_point_elsewhere(path) -> None:
    manifest = json.loads((ENTRY / "manifest.json").read_text())
    manifest["components"]["agent"]["path"] = path
    (ENTRY / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="is not in its manifest|is no file that klrl writes"):
        load()


# ------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("damage", DAMAGES[:2])
@pytest.mark.parametrize("file", FILES)
def test_a_file_of_another_length_is_refused_and_not_lengthened(file, damage, capsys) -> None:
    path = ENTRY / file
    path.write_bytes(damage(path.read_bytes().rstrip()))
    before = snapshot(RUN)
    with pytest.raises(ConfigError) as refused:
        load()
    assert file in str(refused.value)
    assert "\n" not in str(refused.value)
    assert snapshot(RUN) == before


def test_reading_changes_nothing() -> None:
    before = snapshot(RUN)
    load()
    load_component(RUN, "last", "agent", Held(), CPU)
    assert snapshot(RUN) == before


def test_the_run_that_goes_on_writes_format_2_and_drops_the_old_entry() -> None:
    parts = {name: Held() for name in ("agent", "counters")}
    checkpoints = Checkpoints(RUN / "checkpoints", parts)
    checkpoints.load_last(CPU)
    for step in (448, 512):
        checkpoints.save("last", step, {})
        assert 384 in steps() or step == 512
    assert steps() == [448, 512]


# ------------------------------------------------------------------------- read-only run folders


@pytest.mark.integration
@pytest.mark.parametrize("run", [pytest.param("run", marks=pytest.mark.slow), "new"])
def test_a_read_only_run_folder_is_evaluated(run, tmp_path) -> None:
    if run == "new":
        parts = {"agent": Held(load("agent")["agent"])}
        shutil.copytree(RUN, run)
        shutil.rmtree(Path(run, "checkpoints"))
        Checkpoints(Path(run, "checkpoints"), parts).save("last", 384, {})
    expected = evaluate_run(run, episodes=4).row
    paths = [Path(run), *Path(run).rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    # Root may write whatever the permissions say, unless it gives that right away.
    setpriv = shutil.which("setpriv")
    if os.geteuid() == 0 and setpriv is None:
        pytest.skip("root without setpriv")
    able = [str(setpriv), "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    told = []
    for command in (["touch", f"{run}/x"], [sys.executable, "-m", "klrl", "evaluate", run]):
        more = ["--episodes", "4", "--json"] if "evaluate" in command else []
        told.append(subprocess.run([*able, *command, *more], capture_output=True, text=True))
    for path in paths:
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert told[0].returncode != 0, "it is read-only"
    assert told[1].returncode == 0, told[1].stderr
    found = json.loads(told[1].stdout)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
