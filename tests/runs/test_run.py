"""Whole runs: what they record, how they end, how they go on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrl.envs import Compose

import klrl
from klrl.base.errors import ConfigError
from klrl.envs.transforms.rlhf import KLRewardTransform
from klrl.kl import KLComputation, RetrieveLogProb
from klrl.runs.folder import _git_commit
from klrl.runs.metrics import METRICS
from klrl.runs.resume import stored_config
from tests.conftest import QUICK
from tests.runs.commands import exits, manifest_of, only_run, rows_of, timeless

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "words",
    [
        ["kl=none", "loss=clip", "optim=adamw"],
        ["kl.coef=0", "actor.share_trunk=true", "loss.kl_old=sampled", "loss.clip_value=0.2"],
    ],
    ids=lambda words: words[0],
)
def test_a_run_leaves_its_record(words, capsys, curves) -> None:
    assert exits(*QUICK, "eval.every=1", "eval.episodes=2", "frames=192", *words) == 0
    folder, told = only_run(), capsys.readouterr().out
    assert str(folder) in told
    manifest, rows = manifest_of(folder), rows_of(folder)
    assert manifest["status"] == "finished"
    assert manifest["versions"]["torch"] == torch.__version__
    assert [row["frames"] for row in rows] == [64, 128, 192]
    for row in rows:
        assert set(row) <= set(METRICS)
        assert all(np.isfinite(list(row.values())))
        assert row["kl/ref/coef"] == row["kl/ref/penalty"] == 0
        assert row["reward/shaped"] == row["reward/raw"]
    if words[0] != "kl=none":
        assert rows[0]["kl/ref/exact"] < 1e-6 < rows[2]["kl/ref/exact"], "with normalisation on"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"last", "best"}
    assert not list(folder.rglob("*.pkl"))
    assert stored_config(folder).kl.name == ("none" if words[0] == "kl=none" else "retrieve")


@pytest.mark.parametrize(
    ("words", "built"),
    [
        (["kl=retrieve", "kl.apply=step"], [Compose, *[RetrieveLogProb] * 2, KLComputation]),
        (["kl=legacy"], [KLRewardTransform]),
        (["kl=none"], []),
    ],
)
def test_the_manifest_names_the_transforms_that_charge_in_order(words, built) -> None:
    exits(*QUICK, "eval.every=0", *words, "hydra.run.dir=run")
    names = [f"{each.__module__}.{each.__name__}" for each in built]
    assert manifest_of(Path("run"))["built"] == names


def test_the_same_seed_gives_the_same_numbers_and_another_others() -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        exits(*QUICK, "eval.every=2", f"seed={seed}", f"hydra.run.dir={name}")
    a, b, c = (timeless(rows_of(Path(name))) for name in "abc")
    assert a == b
    assert all(x["reward/raw"] != y["reward/raw"] for x, y in zip(a, c, strict=True))


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_on_a_machine_without_is_refused(device, settings, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match=f"^device={device}: this machine has no CUDA device; "):
        klrl.run(settings(f"device={device}"))


def test_a_device_beyond_the_last_is_refused(settings, monkeypatch) -> None:
    config = settings("device=cuda:2")  # the driver is not asked
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="^device=cuda:2: torch sees 2 CUDA devices here, the la"):
        klrl.run(config)


def test_evaluate_prints_one_json_object(capsys) -> None:
    exits(*QUICK, "hydra.run.dir=run")
    capsys.readouterr()
    assert exits("evaluate", "run", "--episodes", "30", "--json") == 0
    first = json.loads(capsys.readouterr().out)
    of_return = {"eval/return", "eval/return_std", "eval/return_se"}
    of_kl = {f"eval/kl_ref{way}{error}" for way in ("", "_forward") for error in ("", "_se")}
    assert set(first) == {*of_return, *of_kl, "eval/episodes", "episodes"}
    assert first["episodes"] == first["eval/episodes"] == 30
    assert exits("evaluate", "run", "--episodes", "30", "--json") == 0
    assert json.loads(capsys.readouterr().out) == first


def repository_with(named: str) -> None:
    """A repository whose setting ``named`` is a program that leaves a file."""
    hook = Path("hook.sh").resolve()
    hook.write_text("#!/bin/sh\ntouch ran\n")
    hook.chmod(0o700)
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "hook.sh"), (*who, "commit", "-qm", "x")):
        subprocess.run(["git", *words], check=True)
    subprocess.run(["git", "config", named, str(hook)], check=True)


@pytest.mark.parametrize(
    ("named", "url"),
    [
        ("core.sshCommand", "ssh://a/b"),
        ("remote.origin.uploadpack", "file:///tmp"),
        ("core.gitProxy", "git://a/b"),
    ],
)
def test_no_missing_object_is_fetched_for_the_commit(named: str, url: str) -> None:
    """In a partial clone git would run a command of the repository, to fetch what it lacks."""
    repository_with(named)
    words = {"core.repositoryformatversion": "1", "extensions.partialClone": "origin"}
    for name, value in (
        words | {"remote.origin.promisor": "true", "remote.origin.url": url}
    ).items():
        subprocess.run(["git", "config", name, value], check=True)
    told = ["git", "rev-parse", "HEAD^{tree}"]
    tree = subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip()
    Path(".git/objects", tree[:2], tree[2:]).unlink()
    Path("hook.sh").touch()
    assert _git_commit() is None
    assert not Path("ran").exists()


@pytest.mark.parametrize("named", ["core.fsmonitor", "filter.f=g.clean", "filter.f.process"])
def test_the_commit_is_told_without_running_what_the_repository_names(named: str) -> None:
    """``git status`` would run these of a repository from elsewhere."""
    repository_with(named)
    if named != "core.fsmonitor":
        driver = named.rpartition(".")[0]
        subprocess.run(["git", "config", f"{driver}.required", "true"], check=True)
        Path(".git/info/attributes").write_text(f"* {driver.replace('.', '=')}\n")
    Path("hook.sh").touch()  # git looks into it again
    commit = _git_commit()
    assert commit is not None
    assert len(commit) == 40
    assert not Path("ran").exists()


@pytest.mark.integration
def test_the_processor_is_told_with_the_instructions_that_are_used() -> None:
    """A cell of docs/results/mujoco returns to the digit with AVX-512, and differs with AVX2."""
    code = "from klrl.base.processor import processor; print(processor())"

    def told(**more: str) -> str:
        how = {"env": {**os.environ, **more}, "capture_output": True, "text": True}
        return subprocess.run([sys.executable, "-c", code], **how, check=True).stdout.strip()

    here, plain = told(), told(ATEN_CPU_CAPABILITY="default")
    used = torch.backends.cpu.get_cpu_capability()
    assert here.split(", ")[-2] == used
    assert plain == here.replace(f", {used},", ", DEFAULT,")
