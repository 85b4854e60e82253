"""The update's step: eager against torch's own Adam, the pure form and the compiled ones."""

import copy
import getpass
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from klrl.base.cache import Untrusted, cache_dir, compiling
from klrl.control.run import compiled
from klrl.control.run.compiled import choose, decide
from klrl.control.run.step import check_inputs, eager_step, loss_terms, pure_step
from klrl.runs.machine import cxx
from tests.conftest import QUICK, marked
from tests.control.updates import CPU, learn, made, minibatch

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
    "sampler": ("loss=clip", "collector.staleness=1", "kl.placement=loss", "kl.estimator=k3"),
    "masked": ("env=cartpole", "collector.staleness=1", "loss.sampler_weight=mask"),
    "separate": ("actor.share_trunk=true", "loss.separate_losses=true", "loss.beta_rule=forward"),
}


@pytest.mark.parametrize("case", marked("integration", CASES, "klpen", "clip", "split"))
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


@pytest.mark.services
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


def command(
    *words: str, python: tuple[str, ...] = (), compiler_cache: bool = True, **environment: str
):
    """klrl in a process of its own, with nothing compiled before."""
    given = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    if compiler_cache:
        given["TORCHINDUCTOR_CACHE_DIR"] = str(Path("inductor").resolve())
    return subprocess.run(
        [sys.executable, *python, "-m", "klrl", *QUICK, "hydra.run.dir=run", *words],
        capture_output=True,
        text=True,
        env={**given, **environment},
    )


@pytest.mark.services
@pytest.mark.parametrize("mode", marked("slow", ("aot", "jit"), "aot"))
def test_no_compiler_looks_into_the_machines_folder_for_temporary_files(mode: str) -> None:
    """Another user's folder is where torch's compiler keeps its libraries, unless it is told.

    Nor does a warning of torch's own code end the build where warnings are errors.
    """
    place = Path("tmp", f"torchinductor_{getpass.getuser()}")
    place.mkdir(parents=True)
    done = command(
        f"learner.compile={mode}",
        python=("-W", "error"),
        compiler_cache=False,
        TMPDIR=str(Path("tmp").resolve()),
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("update: ")]
    assert line.startswith({"aot": "update: compiled in", "jit": "update: torch.compile"}[mode])
    assert not list(place.iterdir())
    assert list(cache_dir().glob("compiler/inductor/**/*.so")), "or it did not compile"
    assert (cache_dir() / "compiler").stat().st_mode & 0o777 == 0o700


def test_the_compilers_folders_are_klrls_or_the_users(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", "/before")
    monkeypatch.setattr(tempfile, "tempdir", "/set")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    folder = tmp_path / "cache" / "klrl" / "compiler"
    with compiling():
        assert default_cache_dir() == str(folder / f"torchinductor_{getpass.getuser()}")
        code = "import tempfile; print(tempfile.gettempdir())"
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert child.stdout.strip() == str(folder)
    assert (os.environ["TMPDIR"], tempfile.tempdir) == ("/before", "/set")
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    with compiling():
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    folder.chmod(0o777)
    with pytest.raises(Untrusted, match="can be written by others"), compiling():
        pass


@pytest.mark.services
@pytest.mark.parametrize("mode", marked("slow", ("aot", "jit"), "aot"))
def test_a_broken_compiler_ends_no_run_and_the_manifest_says_eager(mode: str, cache) -> None:
    done = command(f"learner.compile={mode}", CXX=shutil.which("false") or "false")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("update: ")]
    assert line.startswith(f"update: eager; learner.compile={mode} failed: ")
    manifest = json.loads(Path("run/manifest.json").read_text())
    assert (manifest["status"], manifest["compile"]) == ("finished", "false")
    assert not list(cache.glob("*"))


@pytest.mark.services
def test_torchs_compiler_still_warns_of_its_own_code() -> None:
    """Once this fails, ``script_method`` goes from compiled.py, and this test with it."""
    code = "import torch.utils.mkldnn"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
    assert b"DeprecationWarning: `torch.jit.script_method` is deprecated" in done.stderr


def test_without_a_compiler_it_is_eager_and_says_so(settings, cache, monkeypatch) -> None:
    monkeypatch.setattr(compiled, "cxx", lambda: None)
    for mode in ("aot", "jit"):
        experiment, batch = made(settings, f"learner.compile={mode}", "device=cpu")
        told: list[str] = []
        experiment.parts.learner.steps.say = told.append
        experiment.parts.learner.update(batch, 0.0)
        assert experiment.parts.learner.steps.mode == "false"
        needs = f"learner.compile={mode} needs a C++ compiler; none is installed"
        assert told == [f"update: eager; {needs}"]


def fits() -> None:
    """As :func:`klrl.control.run.kernel.unfit` of a job that the kernel computes."""


def decided(config, device=CPU, asked: str = "auto", unfit=fits) -> str:
    return decide(asked, config, device, unfit)


def test_auto_is_decided_by_the_settings(settings) -> None:
    short, long = settings("frames=100"), settings("frames=10_000_000")
    gpu = torch.device("cuda")
    assert [decided(short), decided(long)] == ["false", "kernel"]
    assert decided(long, unfit=lambda: "masks") == "aot"
    assert decided(replace(long, threads=2)) == "aot", "the kernel has one thread"
    for word in ("collector.staleness=1", "advantage.reward_weight=0"):
        assert decided(settings("frames=10_000_000", word)) == "aot", word
    for mode in ("false", "jit", "aot"):
        assert decided(long, asked=mode) == mode
    assert [decided(long, gpu, mode) for mode in ("auto", "aot", "kernel")] == ["jit"] * 3


def test_on_a_gpu_no_package_is_looked_for(settings) -> None:
    def refuse():
        raise AssertionError("packages and the kernel are for CPUs")

    for asked, mode in {"auto": "jit", "aot": "jit", "jit": "jit", "false": "false"}.items():
        assert choose(asked, settings(), torch.device("cuda"), refuse, refuse) == (mode, None)


@pytest.mark.services
@pytest.mark.skipif(cxx() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("kernel", ("loss=clip",)),
        ("kernel", ("env=cartpole", "loss=klpen_held", "optim=adamw")),
        ("kernel", ("actor=tanh_normal", "loss=trpo")),
        ("kernel", ("kl.placement=loss", "kl.estimator=k3")),
        ("eager", ("env=catch", "actor=cnn", "actor.share_trunk=false")),
        ("eager", ("actor.activation=gelu",)),
        ("eager", ("loss.kl_old=sampled",)),
        ("eager", ("loss=clip", "collector.staleness=1")),
    ],
)
def test_auto_takes_the_kernel_if_it_computes_the_step(way, words, settings, monkeypatch) -> None:
    """Where it does not, the run is eager without a word about it."""
    monkeypatch.setattr(compiled, "KERNEL_STEPS", 1)
    eager, _, _ = learn(settings, "false", *words)
    found, _, told = learn(settings, "auto", *words)
    torch.testing.assert_close(found, eager, rtol=1e-5, atol=2e-5)
    assert told[-1].startswith("update: kernel in C++" if way == "kernel" else "update: eager")
    assert way == "kernel" or told[-1] == "update: eager"


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


def test_the_first_package_of_a_cache_makes_no_precompiled_header(
    settings, tmp_path, monkeypatch
) -> None:
    """The header costs 9 of 26 CPU seconds; later packages of the cache make it and use it."""
    headers = []

    def compile_(exported: object, *, package_path: str, inductor_configs: dict) -> None:
        headers.append(inductor_configs["aot_inductor.precompile_headers"])
        Path(package_path).write_bytes(b"")

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", compile_)
    problem, example = minibatch(*made(settings))
    for name in "abc":
        compiled.build_package(problem, example, tmp_path / "update" / f"{name}.pt2")
    assert headers == [False, True, True]


@pytest.mark.skipif(cxx() is None, reason="no C++ compiler")
def test_an_epoch_is_the_learners_minibatches(settings) -> None:
    """Equal order and steps as with a rule that reads each minibatch, whose rate cannot move."""
    bounds = ("optim.lr_min=3e-4", "optim.lr_max=3e-4", "optim.lr=3e-4", "optim.lr_floor=3e-4")
    apart, theirs, _ = learn(settings, "kernel", "optim.rate=kl_adaptive", *bounds)
    whole, mine, told = learn(settings, "kernel", "optim.lr=3e-4", "optim.lr_floor=3e-4")
    assert told[-1].startswith("update: kernel in C++, ")
    assert torch.equal(whole, apart)
    assert mine == theirs


@pytest.mark.skipif(cxx() is None, reason="no C++ compiler")
@pytest.mark.parametrize("words", [("env=cartpole", "loss=clip"), ("actor=tanh_normal",)])
def test_updates_in_the_kernel_are_those_of_eager_mode(words, settings) -> None:
    """104 steps by the learner."""
    eager, theirs, _ = learn(settings, "false", *words)
    built, mine, told = learn(settings, "kernel", *words)
    assert told[-1].startswith("update: kernel in C++, ")
    assert not torch.equal(built, eager), "else this test could not tell one from the other"
    torch.testing.assert_close(built, eager, rtol=1e-5, atol=2e-5)
    for name in theirs:
        assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name
