"""The update in C++: each number against torch in float64; its library in the cache."""

import json
import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from klrl.base.errors import ConfigError, NonFiniteError
from klrl.base.processor import instructions
from klrl.control.policy.distributions import Categorical, Normal, TanhNormalFamily
from klrl.control.policy.networks import Agent, PolicyNet, ValueNet, mlp
from klrl.control.run import compiled, kernel
from klrl.control.run.compiled import choose
from klrl.control.run.kernel import kernel_step
from klrl.control.run.step import Adam, AdamSettings, Columns, StepParts, draw, pure_step
from klrl.kl.charge import ReferenceKL
from klrl.losses.policy import make_loss
from klrl.runs.folder import RunFolder
from klrl.runs.machine import cxx
from klrl.train.loop import start
from tests.control.updates import CPU, learn, made

pytestmark = pytest.mark.skipif(cxx() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def library() -> Path:
    return kernel.library(instructions())[0]


class Case:
    """A step of random sizes on random frames, with moments as after some steps."""

    def __init__(
        self, settings, seed: int, *words: str, sizes=None, family="normal", ref=None
    ) -> None:
        draws = torch.Generator().manual_seed(seed)

        def whole(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (), generator=draws))

        if sizes is None:
            depth = whole(1, 3)
            sizes = (
                whole(1, 400),
                [whole(8, 300) for _ in range(depth)],
                whole(1, 20),
                whole(2, 2048),
            )
        inputs, hidden, actions, batch = sizes
        actions += family == "categorical"
        torch.manual_seed(seed)
        config = settings(*words)
        kind = config.actor.activation
        stds = None if family == "categorical" else 0.7
        policy = PolicyNet(nn.Identity(), mlp([inputs, *hidden], kind), actions, stds)
        value = ValueNet(nn.Identity(), mlp([inputs, *hidden], kind))
        with torch.no_grad():
            for p in (*policy.parameters(), *value.parameters()):
                p += 0.05 * torch.randn_like(p)
        bounds = torch.arange(1.0, actions + 1)
        families = {"tanh_normal": TanhNormalFamily(-bounds, 2 * bounds)}
        families |= {"normal": Normal(), "categorical": Categorical()}
        self.family = families[family]
        actor, critic = [SimpleNamespace(module=policy)], SimpleNamespace(module=value)
        self.agent = Agent(actor, critic, self.family, None)
        charged = ref and ReferenceKL(0.4, ref, "loss")
        self.loss = make_loss(config.loss, "control", charged, 0.3)
        decay = getattr(config.optim, "weight_decay", 0.0)
        optim = AdamSettings(config.optim.eps, config.optim.max_grad_norm, decay)
        self.adam = Adam(self.agent.networks.in_order(), optim)
        self.adam.exp_avg.normal_().mul_(0.01)
        self.adam.exp_avg_sq.uniform_().mul_(1e-4)
        self.adam.count += seed % 9
        frames = self.frames(policy, value, inputs, batch)
        columns = Columns(frames)
        self.problem = StepParts(self.agent, self.loss, optim, columns)
        self.arguments = [*self.adam.tensors, columns.pack(frames), torch.tensor([0.003, 0.7, 0.4])]

    @torch.no_grad()
    def frames(self, policy, value, inputs: int, batch: int) -> dict[str, torch.Tensor]:
        """Frames of a policy near this one, and a reference that is farther away."""
        observation = torch.randn(batch, inputs)
        keys = self.family.param_keys
        new = policy(observation)
        old, ref = ([x + by * torch.randn_like(x) for x in new] for by in (0.1, 0.3))
        if len(keys) == 2:  # as after a step
            old[1], ref[1] = new[1] * 1.1, new[1] * 0.8
        old, ref = (dict(zip(keys, each, strict=True)) for each in (old, ref))
        frames = {key: torch.randn(batch) for key in ("advantage", "value_target", "state_value")}
        sample = self.family.sample(old, 1)[0]
        frames |= {"observation": observation, self.family.sample_key: sample, **old}
        frames["action_log_prob"] = self.family.log_prob(old, sample)
        if self.loss.reference_estimator:
            frames["ref_log_prob"] = self.family.log_prob(ref, sample)
            frames |= {f"ref_{key}": x for key, x in ref.items()}
        return frames | draw(self.loss, self.family, frames)

    def state(self, dtype=torch.float32) -> list[torch.Tensor]:
        return [x.to(dtype, copy=True) for x in self.arguments[:4]]

    def both(self, library: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """State and metrics after a step of the kernel, and of torch in float64; all in float64."""
        mine, theirs = self.state(), self.state(torch.float64)
        mine.append(kernel_step(self.problem, library)(*mine, *self.arguments[4:]))
        double = [x.double() for x in self.arguments[4:]]
        theirs.append(pure_step(self.problem)(*theirs, *double))
        return [x.double() for x in mine], theirs

    def apart(self, library: Path) -> dict[str, float]:
        """The largest distances from torch over tensors, relative to a tensor's norm."""
        (*mine, _, metrics), (*theirs, _, expected) = self.both(library)
        sizes = [p.numel() for p in self.agent.networks.in_order()]
        names = ("flat", "exp_avg", "exp_avg_sq")
        pairs = dict(zip(names, zip(mine, theirs, strict=True), strict=True))
        before = self.arguments[0].double()
        pairs["change"] = tuple(x - before for x in pairs["flat"])
        for x in self.arguments[1:3]:
            x.zero_()  # then the first moment is a tenth of the clipped gradient
        pairs["gradient"] = tuple(x[1] for x in self.both(library))
        found = {"metrics": float(((metrics - expected).abs() / (1e-3 + expected.abs())).max())}
        for name, (one, other) in pairs.items():
            parts = zip(one.split(sizes), other.split(sizes), strict=True)
            found[name] = max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in parts)
        return found


#: Words, family, estimator of the KL in the loss.
CASES = {
    "klpen": ((), "normal", None),
    "clip": (("loss=clip", "loss.clip_epsilon_high=0.3"), "normal", None),
    "trpo": (("loss=trpo", "optim.max_grad_norm=0.01"), "normal", None),
    "tanh": (("loss.samples_mc_entropy=3", "loss.entropy_coeff=0.1"), "tanh_normal", None),
    "tanh_exact": (("loss=clip", "optim=adamw", "optim.weight_decay=0.1"), "tanh_normal", "exact"),
    "exact": (("loss.clip_value=0.2", "loss.entropy_coeff=0.1"), "normal", "exact"),
    "k1": (("loss=clip", "loss.loss_critic_type=l1"), "normal", "k1"),
    "k2": (("actor.activation=elu", "loss.normalize_advantage=false"), "normal", "k2"),
    "k3": (("loss.reduction=sum", "optim.max_grad_norm=1e4"), "normal", "k3"),
    "discrete": (("loss=clip", "loss.entropy_coeff=0.1"), "categorical", "exact"),
    "discrete_klpen": (("loss.loss_critic_type=smooth_l1",), "categorical", "k3"),
    "discrete_trpo": (
        ("loss=trpo", "loss.clip_value=0.3", "actor.activation=relu"),
        "categorical",
        None,
    ),
}
#: One frame, one wide layer and one odd one, several chunks, and widths of whole vectors.
SIZES = [(1, [8], 1, 2), (400, [65, 9, 300], 20, 33), (17, [64, 64], 6, 600), (3, [64, 64], 1, 64)]


#: A change of a parameter has the rounding of float32 parameters.
LIMITS = {
    **dict.fromkeys(("gradient", "exp_avg", "exp_avg_sq", "flat"), 1e-5),
    **{"metrics": 1e-4, "change": 1e-3},
}


def too_far(case: Case, library: Path) -> dict[str, float]:
    return {k: v for k, v in case.apart(library).items() if not v <= LIMITS[k]}


def tried(case: str, settings, library: Path) -> dict[str, float]:
    """What is too far from torch at the first of SIZES where anything is."""
    words, family, ref = CASES[case]
    cases = (
        Case(settings, seed, *words, sizes=sizes, family=family, ref=ref)
        for seed, sizes in enumerate(SIZES)
    )
    return next(filter(None, (too_far(each, library) for each in cases)), {})


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_torchs_in_float64(case: str, settings, library) -> None:
    assert tried(case, settings, library) == {}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_step_of_any_size_is_torchs_in_float64(case: str, settings, library) -> None:
    words, family, ref = CASES[case]
    for seed in range(5):
        drawn = Case(settings, seed, *words, family=family, ref=ref)
        assert too_far(drawn, library) == {}


#: What is wrong, in the source: text, its replacement, and a case that sees it.
MUTANTS = {
    "sign of the KL": ("gain -= beta", "gain += beta", "klpen"),
    "sign of the KL's slope": ("by[KL_OLD] = -beta", "by[KL_OLD] = beta", "klpen"),
    "sign of the reference's KL": ("by[KL_REF] = -kl_coef", "by[KL_REF] = kl_coef", "exact"),
    "clip side": ("if (clipped < gain)", "if (clipped > gain)", "clip"),
    "clip of the ratio": ("ratio > high ? high", "ratio > high ? low", "clip"),
    "log-det": ("y[LOG_PROB] -= slope,", "", "tanh"),
    "log-det in the entropy": ("y[ENTROPY] += mean", "y[ENTROPY] += 0 * mean", "tanh"),
    "bias correction": ("expm1(*count * log(0.999))", "expm1(*count * log(0.9))", "klpen"),
    "count": ("*count += 1;", "", "klpen"),
    "transposed weight": (
        "y.weight, y.in, false, y.backward",
        "y.weight, y.out, true, y.backward",
        "klpen",
    ),
    "turned block": ("i / 4 * ld + k + i % 4", "i % 4 * ld + k + i / 4", "klpen"),
    "a chunk's weights": (
        "backward(s, w, net, n, first > 0)",
        "backward(s, w, net, n, false)",
        "klpen",
    ),
    "tanh's slope": ("g *= 1.f - y * y", "g *= 1.f - y", "klpen"),
    "std of the batch": ("squares / (count - 1)", "squares / count", "klpen"),
    "decay": ("1 - lr * s.weight_decay", "1", "tanh_exact"),
    "norm": ("cut = cut > 1 ? 1 : cut;", "cut = 1;", "trpo"),
    "trained policy": ("first_net = s.loss == TRPO", "first_net = 0", "trpo"),
    "k2's weight": ("slope = w * r, w * 0.5f", "slope = w * r * (1 + r / 2), w * 0.5f", "k2"),
    "clipped value": ("if (cut > loss &&", "if (", "exact"),
    "unit of the KL": ("s.reward_scale / a.spread", "s.reward_scale", "k1"),
    "entropy of logits": ("-p * (w.log_p[i] + y[ENTROPY])", "-p * w.log_p[i]", "discrete"),
}


def build(source: str, *flags: str) -> Path:
    Path("k.cpp").write_text(source)
    subprocess.run([cxx() or "", *kernel.FLAGS, *flags, "-o", "k.so", "k.cpp"], check=True)
    return Path("k.so").resolve()


@pytest.mark.services
@pytest.mark.parametrize("wrong", MUTANTS)
def test_a_wrong_kernel_is_seen(wrong: str, settings) -> None:
    text, other, case = MUTANTS[wrong]
    source = kernel.SOURCE.read_text()
    assert source.count(text) == 1, "or the mutant is of another source"
    built = build(source.replace(text, other), "-O1")
    assert tried(case, settings, built)


@pytest.mark.services
@pytest.mark.parametrize("flags", [("-mno-avx512f",), ("-mno-avx512f", "-mno-avx")])
def test_other_vectors_compute_the_same(flags, settings) -> None:
    """As on processors with AVX2, and with neither."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the flags are of another processor")
    built = build(kernel.SOURCE.read_text(), *flags)
    for case in ("k2", "tanh_exact", "discrete_trpo"):
        assert tried(case, settings, built) == {}


@pytest.mark.parametrize(
    ("kind", "family"), [("tanh", "normal"), ("relu", "tanh_normal"), ("elu", "categorical")]
)
def test_a_nan_anywhere_reaches_the_metrics(kind: str, family: str, settings, library) -> None:
    """Where torch's metrics are not finite, the kernel's are not; NaN and infinities anywhere."""
    words = (f"actor.activation={kind}", "loss=clip", "loss.clip_value=0.2")
    case = Case(settings, 0, *words, sizes=(3, [10, 9], 2, 20), family=family, ref="k3")
    step, torchs = kernel_step(case.problem, library), pure_step(case.problem)
    flat, rows = case.arguments[0], case.arguments[4]
    index = case.problem.columns.widths[
        : list(case.problem.columns.shapes).index(case.family.sample_key)
    ]
    kept = sum(index) if family == "categorical" else -1
    places = [rows[7, i : i + 1] for i in range(rows.shape[1]) if i != kept]
    places += [flat[i : i + 1] for i in range(0, len(flat), 7)]
    stopped = 0
    for place in places:
        before = place.clone()
        for bad in (torch.nan, torch.inf, -torch.inf):
            place.fill_(bad)
            if not torchs(*case.state(), *case.arguments[4:]).isfinite().all():
                stopped += 1
                assert not step(*case.state(), *case.arguments[4:]).isfinite().all()
        place.copy_(before)
    assert stopped > len(places)
    assert step(*case.state(), *case.arguments[4:]).isfinite().all()


def test_a_run_stops_at_a_nan(settings) -> None:
    experiment, batch = made(settings, "learner.compile=kernel")
    batch["advantage"][0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="loss/objective is nan in minibatch"):
        experiment.parts.learner.update(batch, 0.0)
    assert experiment.parts.learner.steps.mode == "kernel"


def test_a_step_depends_on_its_arguments_alone(settings, library) -> None:
    """Equal to the bit again, and after a larger minibatch in the same memory."""
    case = Case(settings, 1, sizes=(5, [40, 21], 3, 700))
    fresh, used = (kernel_step(case.problem, library) for _ in range(2))
    rows, coef = case.arguments[4:]
    used(*case.state(), rows, coef)
    for part in (rows[:33].clone(), rows):
        one, other = case.state(), case.state()
        assert torch.equal(fresh(*one, part, coef), used(*other, part, coef))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("ref", [None, "k3"])
def test_a_call_for_an_epoch_takes_the_steps_of_its_minibatches(ref, settings, library) -> None:
    """To the bit; the last of four minibatches is smaller."""
    case = Case(settings, 2, sizes=(5, [40, 21], 3, 207), ref=ref)
    step, (rows, coef) = kernel_step(case.problem, library), case.arguments[4:]
    one, other = case.state(), case.state()
    apart = [step(*one, part.clone(), coef) for part in rows.chunk(4)]
    assert [len(part) for part in rows.chunk(4)] == [52, 52, 52, 51]
    assert torch.equal(step(*other, rows, coef, batch=52), torch.stack(apart))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("loss.kl_old=sampled",), "loss.kl_old=sampled"),
        (("kl.placement=loss", "kl.estimator=exact", "kl.divergence=js"), "kl.divergence=js"),
        (("actor.share_trunk=true",), "actor.share_trunk=true"),
        (("actor.activation=gelu",), "these networks, only MLPs with tanh, relu or elu"),
        (("env=catch", "actor=cnn"), "actor.share_trunk=true"),
    ],
)
def test_what_it_does_not_compute_runs_eagerly(words, what, settings) -> None:
    lines = learn(settings, "kernel", *words)[2]
    assert lines == [f"update: eager; learner.compile=kernel does not compute {what}"]


# ------------------------------------------------------------------------------------ the library


def test_the_way_follows_from_the_settings(settings, monkeypatch) -> None:
    config = settings()
    assert choose("kernel", config, CPU, Path, lambda: None) == ("kernel", None)
    assert choose("kernel", config, CPU, Path, lambda: "masks")[0] == "false"
    monkeypatch.setattr(compiled, "cxx", lambda: None)
    needs = "learner.compile=kernel needs a C++ compiler; none is installed"
    assert learn(settings, "kernel")[2] == [f"update: eager; {needs}"]


@pytest.fixture
def quick_build(monkeypatch) -> None:
    monkeypatch.setattr(kernel, "FLAGS", ("-std=c++17", "-O0", *kernel.FLAGS[2:]))


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The programs that are run for the kernel: the last word of each."""
    found: list[str] = []
    run = kernel._run

    def counted(*command: str) -> str:
        found.append(Path(command[-1]).name)
        return run(*command)

    monkeypatch.setattr(kernel, "_run", counted)
    return found


def test_a_library_is_built_once_for_a_compiler_and_a_processor(
    calls, cache, quick_build, monkeypatch
) -> None:
    path, built = kernel.library("one")
    assert built
    assert path.parent == cache
    assert kernel.library("one") == (path, False)
    assert calls == ["--version", "kernel.cpp", "--version"]
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert kernel.library("one") == (path, True), "a damaged one is built again"
    path.with_name(f"{path.name}.sha256").write_bytes(b"\xff")
    assert kernel.library("one") == (path, True), "a digest that is no text is another digest"
    path.with_name(f"{path.name}.sha256").unlink()
    assert kernel.library("one") == (path, True), "one without its digest is built again"

    class Needed(Exception):
        pass

    def write(path: Path, partial: Path) -> None:
        partial.write_bytes(b"")

    def other(*command: str) -> str:
        if command[-1] == "--version":
            return "g++ 99"
        raise Needed

    assert kernel.library("one") == (path, False)
    monkeypatch.setattr(kernel, "_run", other)
    with pytest.raises(Needed):
        kernel.library("one")
    monkeypatch.setattr(kernel, "_run", lambda *command: "the same" * (len(command) == 2))
    monkeypatch.setattr(kernel, "write_digest", write)
    one, two = kernel.library("one")[0], kernel.library("two")[0]
    assert one != two


@pytest.mark.parametrize("fault", ["writable", "compiler", "cache"])
def test_a_kernel_that_cannot_be_made_ends_no_run(
    fault, settings, cache, quick_build, monkeypatch
) -> None:
    if fault == "writable":
        kernel.library(instructions())[0].parent.chmod(0o777)
        why = "can be written by others (chmod go-w)"
    elif fault == "compiler":
        monkeypatch.setenv("CXX", shutil.which("false") or "false")
        why = f"{shutil.which('false')} failed with exit code 1: it said nothing"
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self")
        why = "FileNotFoundError"
    (line,) = learn(settings, "kernel")[2]
    assert line.startswith("update: eager; learner.compile=kernel failed: ")
    assert why in line


def test_a_resumed_run_goes_on_in_the_kernel_or_not_at_all(
    settings, cache, quick_build, monkeypatch, tmp_path, capsys
) -> None:
    """Its rows are those of an uninterrupted run, to the bit; another kernel has a line."""
    words = ("learner.compile=kernel", "frames=64")
    config, whole, folder = settings(*words), tmp_path / "whole", tmp_path / "run"
    start(replace(config, frames=128), RunFolder(whole))
    start(config, RunFolder(folder))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["compile"] == "kernel"
    assert manifest["library"] == kernel.library(instructions())[0].stem
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "cxx", lambda: None)
        before = (folder / "manifest.json").read_bytes()
        with pytest.raises(ConfigError, match=r"learner\.compile.*no C\+\+ compiler is installed"):
            start(replace(config, frames=128), RunFolder(folder), resume=True)
        assert (folder / "manifest.json").read_bytes() == before
    start(replace(config, frames=128), RunFolder(folder), resume=True)
    assert "built the kernel" not in capsys.readouterr().out
    rows = [
        [
            {k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "run"))}
            for line in (each / "metrics.jsonl").read_text().splitlines()
        ]
        for each in (whole, folder)
    ]
    assert rows[0] == rows[1]
    (folder / "manifest.json").write_text(json.dumps({**manifest, "library": "kernel-0"}))
    start(replace(config, frames=128), RunFolder(folder), resume=True)  # takes no step
    start(replace(config, frames=192), RunFolder(folder), resume=True)
    told = "resume: another compiler, processor or version of klrl built the kernel"
    assert capsys.readouterr().out.count(told) == 2
