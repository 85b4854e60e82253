"""The update's step: eager against torch's own Adam, the pure form and the compiled ones."""

import copy
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from klrl.base.errors import ConfigError
from klrl.control import compiled
from klrl.control.compiled import check_inputs, choose, decide, package_key
from klrl.control.score import draw
from klrl.control.step import Columns, Problem, eager_step, loss_terms, pure_step
from klrl.control.update import ControlSteps
from klrl.runs.folder import RunFolder
from klrl.train.loop import Training, start
from tests.conftest import QUICK
from tests.rollouts import moved_rollout

CPU = torch.device("cpu")

#: Every branch of loss, family and optimiser; the third word list is what the loss charges.
CASES = {
    "klpen": (),
    "clip": ("loss=clip", "loss.clip_value=0.2", "env=cartpole"),
    "tanh": ("actor=tanh_normal", "loss.samples_mc_entropy=3", "optim=adamw"),
    "sampled": ("loss.kl_old=sampled", "loss.samples_mc_kl=4", "kl.placement=loss"),
    "sampled_discrete": ("loss.kl_old=sampled", "loss.samples_mc_kl=4", "env=cartpole"),
    "split": ("kl.placement=split", "kl.estimator=exact", "loss.reduction=sum"),
    "k2": ("kl.placement=loss", "kl.estimator=k2", "actor.share_trunk=true"),
    "js": ("kl.placement=split", "kl.estimator=exact", "kl.divergence=js", "kl.samples_mc_js=3"),
    "forward": (
        *("kl.placement=loss", "kl.estimator=exact", "kl.divergence=forward"),
        "actor=tanh_normal",
    ),
    "separate": ("actor.share_trunk=true", "loss.separate_losses=true", "loss.beta_rule=forward"),
}


def made(settings, *words: str):
    """An experiment with a charged rollout; weights away from the reference's."""
    torch.manual_seed(0)
    config = settings("kl.coef=0.3", "optim.lr=0.003", "learner.epochs=1", *words)
    experiment = Training(config)
    batch = moved_rollout(experiment, by=0.1)
    experiment.parts.charge_kl(batch)
    experiment.parts.estimate_advantage(batch)
    return experiment, batch


def minibatch(experiment: Training, batch) -> tuple[Problem, list[torch.Tensor]]:
    """What a step is built from, and arguments for it."""
    steps = experiment.parts.learner.steps
    frames = steps.lay_out(batch)
    frames |= draw(steps.loss, experiment.parts.agent.family, frames)
    columns = Columns(frames)
    rows = columns.pack(frames)[: batch.numel() // 2]
    coefficients = torch.tensor([0.003, 0.7, 0.3])
    problem = Problem(experiment.parts.agent, steps.loss, steps.optimizer.settings, columns)
    return problem, [*steps.optimizer.tensors, rows, coefficients]


@pytest.mark.parametrize("case", CASES)
def test_the_pure_step_is_the_eager_one(case: str, settings) -> None:
    """100 steps with moving coefficients, parameters and metrics to 1e-5."""
    experiment, batch = made(settings, *CASES[case])
    problem, arguments = minibatch(experiment, batch)
    pure = pure_step(problem)
    state = [x.clone() for x in arguments[:4]]
    eager = eager_step(problem)
    first = arguments[0].clone()
    for i in range(100):
        arguments[5][1:] *= 1.001
        arguments[5][0] = 0.003 * (1 - i / 100)
        mine = pure(*state, *arguments[4:])
        theirs = eager(*arguments)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state[0], arguments[0], rtol=1e-5, atol=1e-5)
    assert float((arguments[0] - first).abs().max()) > 0.01
    assert float(arguments[3]) == 100


def test_columns_come_back_as_they_went_in() -> None:
    torch.manual_seed(0)
    frames = {
        "a": torch.randn(7, 3),
        "b": torch.randint(0, 2**24, (7,)),
        "c": torch.randn(7),
        "d": torch.randn(7, 2, 4),
    }
    columns = Columns(frames)
    rows = columns.pack(frames)
    assert rows.shape == (7, 3 + 1 + 1 + 8)
    for key, value in columns.unpack(rows).items():
        assert value.dtype == frames[key].dtype
        assert torch.equal(value, frames[key]), key
    with pytest.raises(TypeError, match="e is torch.float64"):
        Columns({"e": torch.zeros(2, dtype=torch.float64)})


@pytest.mark.parametrize("optim", ["adam", "adamw"])
def test_the_optimiser_is_torchs(optim: str, settings) -> None:
    """100 steps of eager_step against clip_grad_norm_ and torch's unfused Adam, in float32."""
    experiment, batch = made(settings, f"optim={optim}")
    problem, arguments = minibatch(experiment, batch)
    twin = copy.deepcopy(experiment.parts.agent)
    parameters = list(dict.fromkeys(twin.modules.parameters()))
    config = experiment.config.optim
    decay = {"weight_decay": config.weight_decay} if optim == "adamw" else {}
    kind = torch.optim.AdamW if optim == "adamw" else torch.optim.Adam
    theirs = kind(parameters, 0.003, eps=config.eps, foreach=False, **decay)
    step = eager_step(problem)
    frames = problem.columns.unpack(arguments[4])
    for _ in range(100):
        metrics = step(*arguments)
        outputs = twin.policy_net.of_normalized(frames["observation"])
        value = twin.value_net.of_normalized(frames["observation"]).squeeze(-1)
        terms = loss_terms(problem, (*outputs, value), frames, arguments[5])
        theirs.zero_grad()
        terms.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        theirs.step()
        assert float(metrics[-1]) == pytest.approx(float(norm), rel=1e-3)
    mine = dict(experiment.parts.agent.modules.named_parameters())
    for name, value in twin.modules.named_parameters():
        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-5)


def test_an_optimiser_that_is_not_known_is_no_adam(settings) -> None:
    experiment, _ = made(settings)
    config = experiment.config
    unknown = replace(config, optim=replace(config.optim, name="sgd"))
    with pytest.raises(ConfigError, match="optim.name=sgd: is not registered"):
        ControlSteps(unknown, experiment.parts.agent)


def test_parameters_stay_views_of_the_flat_tensor(settings) -> None:
    """After an update, a checkpoint's load and a move of the normaliser."""
    experiment, batch = made(settings)
    learner = experiment.parts.learner
    learner.update(batch, 0.0)
    experiment.parts.agent.modules.load_state_dict(
        copy.deepcopy(experiment.parts.agent.modules.state_dict())
    )
    storage = learner.steps.optimizer.flat.untyped_storage().data_ptr()
    for parameter in learner.steps.parameters:
        assert parameter.untyped_storage().data_ptr() == storage


def learn(settings, mode: str, *words: str) -> tuple[torch.Tensor, dict, list[str]]:
    """Parameters, metrics and what was said after 104 steps: 13 epochs of 8 minibatches."""
    experiment, batch = made(
        settings, *words, f"learner.compile={mode}", "learner.epochs=13", "learner.minibatches=8"
    )
    told: list[str] = []
    experiment.parts.learner.steps.say = told.append
    learned = experiment.parts.learner.update(batch, 0.0, 0.3)
    assert told[-1].startswith("update: ")
    return experiment.parts.learner.steps.optimizer.flat.clone(), vars(learned), told


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A package cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "klrl" / "update"


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
    from klrl.__main__ import compose
    from klrl.config.checks import to_config

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("package")
    words = (*QUICK, *PACKAGED, "learner.minibatches=8", "learner.compile=false")
    steps = Training(to_config(compose(list(words)))).parts.learner.steps
    problem, example = steps.foresee()
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


@pytest.mark.integration
def test_a_package_is_built_once_and_built_anew_where_it_is_broken(
    settings, package, cache, monkeypatch
) -> None:
    """``aot``: what is called for is built where foresee() said that it would be."""
    calls = []

    def build(problem, example, path: Path) -> None:
        calls.append(path)
        copied(package, path.parent)

    monkeypatch.setattr(compiled, "build_package", build)
    built, _, told = learn(settings, "aot", *PACKAGED)
    assert calls == [cache / package.name]
    assert "kept in" in told[-1]
    again, _, told = learn(settings, "aot", *PACKAGED)
    assert len(calls) == 1
    assert told == [f"update: package {package.name[:8]} found in the cache"]
    assert torch.equal(again, built)
    calls[0].write_bytes(package.read_bytes()[:1000])
    mended, _, _ = learn(settings, "aot", *PACKAGED)
    assert len(calls) == 2
    assert torch.equal(mended, built)


@pytest.mark.integration
def test_a_package_agrees_with_eager(settings, kept, no_build) -> None:
    """104 updates to 1e-5."""
    eager, theirs, _ = learn(settings, "false", *PACKAGED)
    built, mine, _ = learn(settings, "aot", *PACKAGED)
    torch.testing.assert_close(built, eager, rtol=1e-5, atol=1e-5)
    for name in theirs:
        assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


@pytest.mark.integration
def test_auto_takes_a_package_however_short_the_run(settings, kept, no_build, monkeypatch) -> None:
    """208 steps, far from paying for a build; a compiler is not needed to load what is there."""
    packaged, _, _ = learn(settings, "aot", *PACKAGED)
    eager, _, _ = learn(settings, "false", *PACKAGED)
    assert not torch.equal(packaged, eager), "else this test could not tell one from the other"
    monkeypatch.setattr(compiled, "_compiler", lambda: None)
    found, _, told = learn(settings, "auto", *PACKAGED)
    assert told == [f"update: package {kept.name[:8]} found in the cache"]
    assert torch.equal(found, packaged)
    told = learn(settings, "auto", *PACKAGED, "loss.clip_epsilon=0.3")[2]
    assert told == ["update: eager"], "the package is of another step"

    kept.write_bytes(kept.read_bytes()[:1000])
    cut, _, told = learn(settings, "auto", *PACKAGED)
    assert told == [
        f"update: eager; package {kept.name[:8]} is not used: it is damaged, its SHA-256 is "
        "another, learner.compile=aot builds it anew"
    ]
    assert torch.equal(cut, eager)
    kept.unlink()
    without, _, told = learn(settings, "auto", *PACKAGED)
    assert told == ["update: eager"]
    assert torch.equal(without, eager)


@pytest.mark.integration
def test_a_minibatch_that_was_not_foreseen_gets_no_package_of_another(
    settings, kept, no_build
) -> None:
    """The package of half a rollout is another one, and is not there."""
    experiment, batch = made(settings, *PACKAGED, "learner.minibatches=8", "learner.compile=auto")
    assert experiment.parts.learner.steps.mode == "aot"
    lines: list[str] = []
    experiment.parts.learner.steps.say = lines.append
    experiment.parts.learner.update(batch[:1], 0.0)
    assert lines[-1].endswith("failed: AssertionError: nothing is to be built here")


def test_a_cache_that_may_not_be_read_is_an_empty_one(settings, cache, monkeypatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    experiment, _ = made(settings)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", refuse)
        chosen = choose("auto", experiment.config, CPU, lambda: cache / "x.pt2")
    assert (chosen.mode, chosen.why) == ("false", None)


@pytest.mark.integration
@pytest.mark.parametrize("mode", ["false", "aot"])
def test_a_resumed_run_goes_on_as_it_began(mode, settings, kept, no_build, tmp_path, capfd) -> None:
    """Eager where it began without the package, which is there by now; and the other way round."""
    whole = kept.read_bytes()
    if mode == "false":
        kept.unlink()
    config = settings(*PACKAGED, "learner.minibatches=8", "learner.compile=auto", "frames=64")
    said = {"false": "update: eager", "aot": f"update: package {kept.name[:8]} found in the cache"}
    folder = tmp_path / "run"
    start(config, RunFolder(folder))
    kept.write_bytes(whole)
    start(replace(config, frames=128), RunFolder(folder), resume=True)
    assert json.loads((folder / "manifest.json").read_text())["compile"] == mode
    assert capfd.readouterr().out.count(said[mode]) == 2


#: What lays a minibatch out otherwise, beside CASES.
LAYOUTS = {
    "reduced": ("loss.reduction=sum", "env.normalize_observation=false"),
    "torch": ("actor.activation=gelu",),
    "torchrl": ("collector=torchrl", "env=cartpole"),
    "torchrl_tanh": ("collector=torchrl", "actor=tanh_normal"),
    "parts": ("kl=legacy", "learner.minibatches=4"),
}


@pytest.mark.parametrize("case", [*CASES, *LAYOUTS])
def test_the_first_minibatch_is_foreseen(case: str, settings) -> None:
    """The package of a run is looked for before its first rollout; no random number is used up."""
    experiment, batch = made(settings, *(CASES | LAYOUTS)[case])
    steps = experiment.parts.learner.steps
    before = torch.get_rng_state()
    problem, example = steps.foresee()
    assert torch.equal(torch.get_rng_state(), before)
    experiment.parts.learner.update(batch, 0.0, 0.3)
    assert problem.columns.shapes == steps._columns.shapes
    assert list(problem.columns.shapes) == list(steps._columns.shapes)
    check_inputs(steps._example, example)
    actual = Problem(experiment.parts.agent, steps.loss, steps.optimizer.settings, steps._columns)
    assert package_key(problem, example) == package_key(actual, steps._example)


@pytest.mark.integration
def test_torch_compile_agrees_with_eager_and_never_recompiles(settings, cache) -> None:
    """Gaussian KLPEN: 104 updates to 1e-5, then other coefficients."""
    torch._dynamo.reset()
    eager = learn(settings, "false")[0]
    with torch._dynamo.config.patch(error_on_recompile=True):
        experiment, batch = made(
            settings, "learner.compile=jit", "learner.epochs=13", "learner.minibatches=8"
        )
        learner = experiment.parts.learner
        learner.update(batch, 0.0, 0.3)
        torch.testing.assert_close(learner.steps.optimizer.flat, eager, rtol=1e-5, atol=1e-5)
        learner.beta_rule.beta = 0.123
        learner.update(batch, 0.5, 0.45)


def test_wrong_inputs_are_refused() -> None:
    example = [torch.zeros(4, 3)]
    check_inputs(example, [torch.ones(4, 3)])
    for wrong in (torch.zeros(5, 3), torch.zeros(4, 3).double(), torch.zeros(3, 4).t()):
        with pytest.raises(RuntimeError, match="input 0 of the compiled update"):
            check_inputs(example, [wrong])


@pytest.mark.integration
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
    monkeypatch.setattr(compiled, "_processor", lambda: "another")
    others.append(key())
    assert len({base, *others}) == len(others) + 1


# --------------------------------------------------------------------- what must not end a run


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


@pytest.mark.integration
@pytest.mark.parametrize("place", [0.3, 0.6, 0.9, "digest"])
def test_a_package_with_one_other_bit_is_not_loaded_but_built_anew(
    place, settings, kept, package, loaded, monkeypatch
) -> None:
    file = kept.with_name(f"{kept.name}.sha256") if place == "digest" else kept
    data = bytearray(file.read_bytes())
    data[10 if place == "digest" else int(len(data) * place)] ^= 1
    file.write_bytes(data)
    damaged = f"package {kept.name[:8]} is not used: it is damaged, its SHA-256 is another"
    line = eager_line(settings, "auto", *PACKAGED)
    assert line == f"update: eager; {damaged}, learner.compile=aot builds it anew"
    assert loaded == []
    monkeypatch.setattr(compiled, "build_package", lambda *_: copied(package, kept.parent))
    lines = learn(settings, "aot", *PACKAGED)[2]
    assert lines[0] == damaged
    assert lines[-1].startswith("update: compiled in ")
    assert loaded == [str(kept)]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("package", "owner"),
        ("digest", "mode"),
        ("folder", "mode"),
        ("cache", "owner"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                ("package", "mode"),
                ("digest", "owner"),
                ("folder", "owner"),
                ("cache", "mode"),
            )
        ),
    ],
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
    line = eager_line(settings, "auto", *PACKAGED)
    assert f"{path} {why}" in line
    assert eager_line(settings, "aot", *PACKAGED).startswith("update: eager; ")
    assert loaded == []


@pytest.mark.integration
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


def test_the_cache_is_this_users_alone(monkeypatch, tmp_path) -> None:
    from klrl.base.cache import cache_dir, private_folder

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        private_folder(cache_dir() / "update")
    finally:
        os.umask(before)
    for folder in (cache_dir(), cache_dir() / "update"):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.integration
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


def command(*words: str, python: tuple[str, ...] = (), **environment: str):
    """klrl in a process of its own, with nothing compiled before."""
    compiler_cache = {"TORCHINDUCTOR_CACHE_DIR": str(Path("inductor").resolve())}
    return subprocess.run(
        [sys.executable, *python, "-m", "klrl", *QUICK, "hydra.run.dir=run", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **compiler_cache, **environment},
    )


@pytest.mark.integration
@pytest.mark.parametrize("mode", ["aot", pytest.param("jit", marks=pytest.mark.slow)])
def test_a_broken_compiler_ends_no_run_and_the_manifest_says_eager(mode: str, cache) -> None:
    done = command(f"learner.compile={mode}", CXX=shutil.which("false") or "false")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("update: ")]
    assert line.startswith(f"update: eager; learner.compile={mode} failed: ")
    manifest = json.loads(Path("run/manifest.json").read_text())
    assert (manifest["status"], manifest["compile"]) == ("finished", "false")
    assert not list(cache.glob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["aot", "jit"])
def test_torchs_own_warnings_end_no_build(mode: str, cache) -> None:
    done = command(f"learner.compile={mode}", python=("-W", "error"))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("update: ")]
    assert line.startswith({"aot": "update: compiled in", "jit": "update: torch.compile"}[mode])
    assert "failed" not in line


@pytest.mark.integration
def test_torchs_compiler_still_warns_of_its_own_code() -> None:
    """Once this fails, ``script_method`` goes from compiled.py, and this test with it."""
    code = "import torch.utils.mkldnn"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
    assert b"DeprecationWarning: `torch.jit.script_method` is deprecated" in done.stderr


def test_without_a_compiler_it_is_eager_and_says_so(settings, cache, monkeypatch) -> None:
    monkeypatch.setattr(compiled, "_compiler", lambda: None)
    for mode in ("aot", "jit"):
        experiment, batch = made(settings, f"learner.compile={mode}")
        told: list[str] = []
        experiment.parts.learner.steps.say = told.append
        experiment.parts.learner.update(batch, 0.0)
        assert experiment.parts.learner.steps.mode == "false"
        needs = f"learner.compile={mode} needs a C++ compiler, and there is none"
        assert told == [f"update: eager; {needs}"]


def test_auto_is_decided_by_the_settings(settings) -> None:
    short, long = settings("learner.compile=auto"), settings("frames=10_000_000")
    assert decide(short, CPU) == "false"
    assert decide(long, CPU) == "aot"
    assert decide(long, torch.device("cuda")) == "jit"
    assert decide(settings("learner.compile=jit"), CPU) == "jit"
    off = settings("frames=10_000_000", "learner.compile=false")
    assert decide(off, CPU) == "false"
    assert decide(replace(off, learner=replace(off.learner, compile="auto")), CPU) == "aot"
    assert decide(off, torch.device("cuda"), "aot") == "jit"


def test_on_a_gpu_no_package_is_looked_for(settings) -> None:
    def refuse():
        raise AssertionError("packages are for CPUs")

    for asked, mode in {"auto": "jit", "aot": "jit", "jit": "jit", "false": "false"}.items():
        assert choose(asked, settings(), torch.device("cuda"), refuse).mode == mode


def test_a_learner_reads_no_metric_between_minibatches(settings, monkeypatch) -> None:
    """On a GPU each read would wait for the device: one per iteration, however many minibatches."""
    reads = {"count": 0}
    plain = torch.Tensor.__float__

    def counted(self):
        reads["count"] += 1
        return plain(self)

    counts = []
    for minibatches in (2, 16):
        experiment, batch = made(settings, f"learner.minibatches={minibatches}")
        reads["count"] = 0
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "__float__", counted)
            experiment.parts.learner.update(batch, 0.0)
        counts.append(reads["count"])
    assert counts[0] == counts[1]
