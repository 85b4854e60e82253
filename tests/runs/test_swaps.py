"""Every file of a run that is swapped for one of a run of equal settings is refused, or told."""

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import QUICK
from tests.runs.commands import exits, manifest_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

#: Relative to a run folder; the files of an entry: ``test_checkpoint_damage.py``.
ENTRIES = [
    f"checkpoints/{each}" for each in ("last/frames-000000000064", "last/frames-000000000128")
]
FILES = [
    *("manifest.json", ".hydra/config.yaml", ".hydra/overrides.yaml", "owner.json"),
    *("metrics.jsonl", "samples.jsonl"),
    *ENTRIES,
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two runs of one seed, ``a`` and ``same``."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("a", "same"):
        assert exits(*QUICK, "checkpoint.every=1", f"hydra.run.dir={root / name}") == 0
        run = manifest_of(root / name).get("id")
        sample = {"run": run, "frames": 64, "response": name}
        (root / name / "samples.jsonl").write_text(json.dumps(sample) + "\n")
        owner = {"host": name, "pid": 7, "job": None, "restarts": 0, "heartbeat": 0}
        (root / name / "owner.json").write_text(json.dumps(owner))
    return root


@pytest.mark.parametrize("file", FILES)
def test_a_swapped_file_is_refused_by_name_or_told(file: str, runs, capsys) -> None:
    for name in ("a", "same"):
        shutil.copytree(runs / name, name)
    source, place = Path("same") / file, Path("a") / file
    if source.is_dir():
        shutil.rmtree(place)
        shutil.copytree(source, place)
    elif source.read_bytes() == place.read_bytes():
        pytest.skip("the same bytes: nothing is swapped")
    else:
        shutil.copyfile(source, place)
    if file != "owner.json":
        Path("a/owner.json").unlink()
    before = {p: p.read_bytes() for p in Path("a").rglob("*") if p.is_file()}
    capsys.readouterr()
    code, told = exits("resume=a", "frames=192"), capsys.readouterr().err
    if file == "manifest.json":  # all others are another's then
        assert ".hydra/config.yaml: belongs to run" in told
    elif file == "owner.json":
        assert "a: taken over from process" in told
    else:
        assert file in told
    if file != "owner.json":
        assert code == 2
        assert {p: p.read_bytes() for p in Path("a").rglob("*") if p.is_file()} == before


def test_a_run_whose_files_are_its_own_goes_on(runs, capsys) -> None:
    shutil.copytree(runs / "a", "a")
    Path("a/owner.json").unlink()
    Path("a/samples.jsonl").unlink()
    capsys.readouterr()
    assert exits("resume=a", "frames=192") == 0
    assert capsys.readouterr().err == ""
