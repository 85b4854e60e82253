"""Compiled updates on disk: built once, found again, loaded only where all is well."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from klrl.config import JobConfig
from klrl.control.run import compiled
from klrl.control.run.compiled import choose, package_key
from klrl.runs.folder import RunFolder
from klrl.train.loop import start
from tests.conftest import QUICK
from tests.control.updates import CPU, learn, made, minibatch


@pytest.fixture
def no_build(monkeypatch):
    """Building a package fails."""

    def refuse(*_):
        raise AssertionError("nothing is to be built here")

    monkeypatch.setattr(compiled, "build_package", refuse)


#: Categorical, clipped, with KL in the loss.
PACKAGED = ("env=cartpole", "loss=clip", "kl.placement=split", "kl.estimator=exact")


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """The package of PACKAGED with 8 minibatches, built once."""
    from klrl.config.checks import to_config
    from klrl.config.compose import compose

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("package")

    def settings(*words: str) -> JobConfig:
        return to_config(compose([*QUICK, *words]))

    experiment, batch = made(settings, *PACKAGED, "learner.compile=false")
    problem, example = minibatch(experiment, batch)
    example[4] = example[4][: batch.numel() // 8]
    path = folder / f"{package_key(problem, example)}.pt2"
    compiled.build_package(problem, example, path)
    return path


@pytest.fixture
def kept(package: Path, cache: Path) -> Path:
    """The same in the cache of this test."""
    return copied(package, cache)


def copied(package: Path, cache: Path) -> Path:
    """A package and its SHA-256, in a cache."""
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    shutil.copy(package.with_name(f"{package.name}.sha256"), cache)
    return Path(shutil.copy(package, cache))


@pytest.mark.services
def test_a_package_is_built_once(settings, package, cache, monkeypatch) -> None:
    calls = []

    def build(problem, example, path: Path) -> None:
        calls.append(path)
        copied(package, path.parent)

    monkeypatch.setattr(compiled, "build_package", build)
    built, _, told = learn(settings, "aot", *PACKAGED)
    assert calls == [cache / package.name]
    assert "stored in" in told[-1]
    again, _, told = learn(settings, "aot", *PACKAGED)
    assert len(calls) == 1
    assert told == [f"update: package {package.name[:8]} found in the cache"]
    assert torch.equal(again, built)


@pytest.mark.services
def test_a_package_agrees_with_eager(settings, kept, no_build) -> None:
    """104 updates to 1e-5."""
    eager, theirs, _ = learn(settings, "false", *PACKAGED)
    built, mine, _ = learn(settings, "aot", *PACKAGED)
    torch.testing.assert_close(built, eager, rtol=1e-5, atol=1e-5)
    assert mine.keys() == theirs.keys() >= {"loss/objective", "kl/old/exact", "learner/grad_norm"}
    for name in theirs:
        assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


#: A weight of the sampler's, and an estimate that has q.
STALE = ("collector.staleness=1", "loss.sampler_weight=mask", "loss.sampler_high=1.5")


@pytest.mark.services
def test_a_package_reads_the_sampler(settings, cache) -> None:
    words = ("env=cartpole", *STALE, "kl.placement=loss", "kl.estimator=k3")
    eager, theirs, _ = learn(settings, "false", *words)
    built, mine, told = learn(settings, "aot", *words)
    assert told[-1].startswith("update: compiled in")
    torch.testing.assert_close(built, eager, rtol=1e-5, atol=1e-5)
    assert 0 < theirs["loss/masked"] < 1
    for name in theirs:
        assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


@pytest.mark.services
def test_auto_is_the_same_whatever_lies_in_the_cache(settings, kept, no_build, monkeypatch) -> None:
    """208 steps, far from paying for a build; a long run needs no compiler for what is there."""
    packaged, _, _ = learn(settings, "aot", *PACKAGED)
    eager, _, _ = learn(settings, "false", *PACKAGED)
    assert not torch.equal(packaged, eager), "else this test could not tell one from the other"
    monkeypatch.setattr(compiled, "cxx", lambda: None)
    short, _, told = learn(settings, "auto", *PACKAGED)
    assert told == ["update: eager"]
    assert torch.equal(short, eager)

    monkeypatch.setattr(compiled, "AUTO_STEPS", 1)
    found, _, told = learn(settings, "auto", *PACKAGED)
    assert told == [f"update: package {kept.name[:8]} found in the cache"]
    assert torch.equal(found, packaged)
    told = learn(settings, "auto", *PACKAGED, "loss.clip_epsilon=0.3")[2]
    assert told[0].startswith("update: eager; "), "the package is of another step"


def test_a_cache_that_may_not_be_read_is_an_empty_one(settings, cache, monkeypatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    experiment, _ = made(settings)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", refuse)
        assert choose("aot", experiment.config, CPU, lambda: cache / "x.pt2", str) == ("aot", None)


@pytest.mark.services
@pytest.mark.parametrize("mode", ["false", "aot"])
def test_a_resumed_run_goes_on_as_it_began(
    mode, settings, kept, no_build, tmp_path, capfd, monkeypatch
) -> None:
    """However long it is by now."""
    monkeypatch.setattr(compiled, "AUTO_STEPS", 1 if mode == "aot" else 10**6)
    config = settings(*PACKAGED, "learner.minibatches=8", "learner.compile=auto", "frames=64")
    said = {"false": "update: eager", "aot": f"update: package {kept.name[:8]} found in the cache"}
    folder = tmp_path / "run"
    start(config, RunFolder(folder))
    monkeypatch.setattr(compiled, "AUTO_STEPS", 1 if mode == "false" else 10**6)
    start(replace(config, frames=128), RunFolder(folder), resume=True)
    assert json.loads((folder / "manifest.json").read_text())["compile"] == mode
    assert capfd.readouterr().out.count(said[mode]) == 2


@pytest.mark.services
def test_a_package_has_another_name_for_everything_that_matters(settings, monkeypatch) -> None:
    def key(*words: str, rows: int | None = None) -> str:
        experiment, batch = made(settings, *words)
        problem, arguments = minibatch(experiment, batch)
        arguments[4] = arguments[4][:rows]
        return package_key(problem, arguments)

    base = key()
    assert key() == base
    tensors = ("seed=5", "optim.lr=0.001", "kl.coef=0.9", "loss.beta=3", "loss.dtarg=0.02")
    assert key(*tensors) == base, "these come as tensors, or are not read"
    others = [
        key("loss.critic_coeff=0.7"),
        key("loss.entropy_coeff=0.02"),
        key("optim.max_grad_norm=0.9"),
        key("optim=adamw"),
        key("loss=clip"),
        key("actor.hidden=[8,8]"),
        key("actor.activation=relu"),
        key("actor.share_trunk=true"),
        key("actor.share_trunk=true", "loss.separate_losses=true"),
        key("kl.placement=loss"),
        key("kl.placement=loss", "kl.estimator=k3"),
        key("kl.placement=loss", "kl.estimator=exact"),
        key("kl.placement=loss", "kl.estimator=exact", "kl.divergence=forward"),
        key("kl.placement=loss", "kl.estimator=exact", "kl.divergence=js"),
        key("actor=tanh_normal"),
        key("env=cartpole"),
        key(rows=16),
    ]
    monkeypatch.setattr(compiled, "instructions", lambda: "another")
    others.append(key())
    assert len({base, *others}) == len(others) + 1


def eager_line(settings, mode: str, *words: str) -> str:
    """What is said last of an update that has to be the eager one."""
    eager = learn(settings, "false", *words)[0]
    parameters, _, lines = learn(settings, mode, *words)
    assert torch.equal(parameters, eager)
    return lines[-1]


@pytest.fixture
def loaded(monkeypatch) -> list[str]:
    """The packages that torch was asked to load."""
    paths: list[str] = []
    loader = torch._C._aoti.AOTIModelPackageLoader

    def load(path: str, *more):
        paths.append(path)
        return loader(path, *more)

    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", load)
    return paths


@pytest.mark.services
@pytest.mark.parametrize("place", [0.3, 0.6, 0.9, "digest"])
def test_a_package_with_one_other_bit_is_not_loaded_but_built_anew(
    place, settings, kept, package, loaded, monkeypatch
) -> None:
    file = kept.with_name(f"{kept.name}.sha256") if place == "digest" else kept
    data = bytearray(file.read_bytes())
    data[10 if place == "digest" else int(len(data) * place)] ^= 1
    file.write_bytes(data)
    damaged = f"package {kept.name[:8]} is not used: it is damaged, its SHA-256 does not match"
    monkeypatch.setattr(compiled, "build_package", lambda *_: copied(package, kept.parent))
    lines = learn(settings, "aot", *PACKAGED)[2]
    assert lines[0] == damaged
    assert lines[-1].startswith("update: compiled in ")
    assert loaded == [str(kept)]


@pytest.mark.services
@pytest.mark.parametrize(
    ("what", "fault"),
    [("package", "owner"), ("digest", "mode"), ("folder", "mode"), ("cache", "owner")],
)
def test_what_another_user_could_have_written_is_not_loaded(
    what, fault, settings, kept, loaded, no_build
) -> None:
    places = {
        "package": kept,
        "digest": kept.with_name(f"{kept.name}.sha256"),
        "folder": kept.parent,
        "cache": kept.parent.parent,
    }
    path = places[what]
    if fault == "mode":
        path.chmod(path.stat().st_mode | 0o020)
        why = "can be written by others (chmod go-w)"
    elif os.geteuid() == 0:
        os.chown(path, 12345, -1)
        why = "belongs to another user (uid 12345)"
    else:
        pytest.skip("only root can give a file away")
    *built_anew, last = learn(settings, "aot", *PACKAGED)[2]
    assert last.startswith("update: eager; ")
    assert f"{path} {why}" in (built_anew[0] if what in ("package", "digest") else last)
    assert loaded == []


@pytest.mark.services
def test_a_package_is_loaded_where_new_files_are_the_groups_too(
    settings, package, loaded, monkeypatch, tmp_path
) -> None:
    """With umask 002, which distributions set for users that are alone in their group."""

    def compile_(*_, package_path: str, **__) -> None:
        Path(package_path).write_bytes(package.read_bytes())

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", compile_)
    before = os.umask(0o002)
    try:
        lines = learn(settings, "aot", *PACKAGED)[2]
    finally:
        os.umask(before)
    assert lines[-1].startswith("update: compiled in ")
    assert len(loaded) == 1


@pytest.mark.services
@pytest.mark.parametrize("unusable", ["a file", "read only", "full"])
def test_without_a_usable_cache_it_is_eager_and_says_so(
    unusable, settings, monkeypatch, tmp_path
) -> None:
    def full(*_, package_path: str, **__):
        Path(package_path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    if unusable == "a file":
        (tmp_path / "cache").write_text("")
    where = "/proc/self" if unusable == "read only" else tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(where))
    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", full)
    line = eager_line(settings, "aot")
    assert line.startswith("update: eager; learner.compile=aot failed: ")
    reason = {"a file": "NotADirectoryError", "read only": "FileNotFoundError", "full": "No space"}
    assert reason[unusable] in line
    assert not [path for path in tmp_path.rglob("*") if "pt2" in path.name]
