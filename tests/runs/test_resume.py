"""A run that goes on: with what it had, from where it was, in its own folder."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import klrl
from klrl.__main__ import main
from klrl.runs.resume import stored_config
from klrl.train.loop import Training
from tests.conftest import QUICK
from tests.runs.commands import exits, manifest_of, rows_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_rows_after_the_checkpoint_are_made_again_after_a_kill() -> None:
    """As after kill -9: the manifest says running, rows are there that no checkpoint covers."""
    exits(*QUICK, "frames=256", "hydra.run.dir=run", "checkpoint.every=2")
    rows = rows_of(Path("run"))
    with Path("run/metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**rows[-1], "frames": 320, "iteration": 5, "reward/raw": 99.0}))
        file.write('\n{"frames": 38')
    manifest = manifest_of(Path("run")) | {"status": "running", "pid": 1}
    Path("run/manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert exits("resume=run", "frames=384") == 0
    after = rows_of(Path("run"))
    assert [row["frames"] for row in after] == [64, 128, 192, 256, 320, 384]
    assert after[:4] == rows
    assert all(row["reward/raw"] < 0 for row in after)


def test_what_a_resume_changed_holds_for_the_next_one() -> None:
    exits(*QUICK, "hydra.run.dir=run")
    exits("resume=run", "frames=192", "checkpoint.every=3")
    assert stored_config(Path("run")).frames == 192
    assert manifest_of(Path("run"))["planned"] == [128, 192]
    assert exits("resume=run", "checkpoint.every=3") == 0
    assert exits("resume=run", "frames=256") == 0
    assert stored_config(Path("run")).checkpoint.every == 3
    assert manifest_of(Path("run"))["planned"] == [128, 192, 256]
    assert rows_of(Path("run"))[-1]["frames"] == 256


def test_settings_edited_by_hand_are_not_resumed(capsys) -> None:
    """Below an intact ``# run ID``; an evaluation says so and goes on."""
    exits(*QUICK, "hydra.run.dir=run", "kl.coef=0.01")
    exits("resume=run", "frames=192", "checkpoint.every=1")
    stored, rows = Path("run/.hydra/config.yaml"), rows_of(Path("run"))
    text = stored.read_text("utf-8")
    edited = text.replace("coef: 0.01\n", "coef: 0.017\n", 1)
    assert edited != text
    stored.write_text(edited, encoding="utf-8")
    capsys.readouterr()
    assert exits("resume=run", "frames=256") == 2
    assert exits("evaluate", "run", "--episodes", "1") == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("its .hydra/config.yaml has changed since the run began" in line for line in lines)
    assert rows_of(Path("run")) == rows
    near = ("reference=checkpoint", "reference.path=run", "actor.init=run")
    assert exits(*QUICK, *near, "kl.coef=0.1", "hydra.run.dir=near") == 0
    lines = capsys.readouterr().err.splitlines()
    for name in ("reference.path=run: ", "actor.init=run: "):
        assert sum(line.count(f"{name}its .hydra/config.yaml") for line in lines) == 1
    stored.write_text(text, encoding="utf-8")
    assert exits("resume=run", "frames=256") == 0


def test_a_resume_killed_between_settings_and_manifest_is_resumed(monkeypatch) -> None:
    exits(*QUICK, "hydra.run.dir=run")
    with monkeypatch.context() as patch:
        patch.delattr("klrl.runs.folder._git_commit")
        with pytest.raises(NameError):
            main(["resume=run", "frames=192"])
    assert "frames: 192" in Path("run/.hydra/config.yaml").read_text("utf-8")
    assert manifest_of(Path("run"))["frames"] == 128
    assert exits("resume=run") == 0
    assert manifest_of(Path("run"))["planned"] == [128, 192]
    assert exits("resume=run", "frames=256") == 0
    assert rows_of(Path("run"))[-1]["frames"] == 256


def test_another_runs_policy_as_reference_and_resume_without_its_folder() -> None:
    exits(*QUICK, "hydra.run.dir=ref", "actor.hidden=[12]", "seed=9")
    words = ("reference=checkpoint", "reference.path=ref", "kl.coef=0.2", "kl=legacy")
    exits(*QUICK, "hydra.run.dir=run", *words)
    rows = rows_of(Path("run"))
    assert rows[0]["kl/ref/exact"] > 1e-5, "another policy is at a distance from the start"
    policy = klrl.load_policy("ref")

    reference = Training(stored_config(Path("run"))).parts.reference.module
    assert all(
        torch.equal(a, b)
        for a, b in zip(policy.state_dict().values(), reference.state_dict().values(), strict=True)
    )
    shutil.rmtree("ref")
    assert exits("resume=run", "frames=256") == 0
    last = rows_of(Path("run"))[-1]
    assert last["kl/ref/exact"] > 1e-5
    assert last["kl/ref/penalty"] == pytest.approx(0.2 * last["kl/ref/k1"], abs=1e-6), (
        "what is charged and what is measured have one reference"
    )
    from klrl.control.run.load import describe_policy
    from klrl.runs.folder import RunFolder

    resumed = Training(stored_config(Path("run")), RunFolder(Path("run")).manifest)
    resumed.checkpoints(RunFolder(Path("run"))).load_last(resumed.parts.device)
    assert describe_policy(stored_config(Path("run")))["normalize"] is True
    for name, value in policy.state_dict().items():
        assert torch.equal(resumed.parts.reference.module.state_dict()[name], value), name


def test_the_manifest_keeps_who_began_and_who_went_on(settings, monkeypatch) -> None:
    from klrl.runs import folder

    words = ["frames=128"]
    folder.RunFolder(Path("run"), words, ["klrl", "first"]).open(settings())
    path = Path("run/manifest.json")
    first = manifest_of(Path("run"))
    monkeypatch.setattr(folder, "__version__", "9.9.9")
    path.write_text(json.dumps({**first, "resumed": [{"time": "then"}]}))
    folder.RunFolder(Path("run"), words, ["klrl", "second"]).open(settings())
    now = manifest_of(Path("run"))
    kept = ("klrl", "argv", "started")
    assert [now[name] for name in kept] == [first[name] for name in kept]
    earlier, latest = now["resumed"]
    assert earlier == {"time": "then"}
    assert (latest["klrl"], latest["argv"]) == ("9.9.9", ["klrl", "second"])
    assert latest["time"] >= first["started"]
