"""docs/extending.md: every example runs from a folder outside the repository, as a user's would."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from klrl.language.base_model import build
from tests.language.conftest import QUICK as LANGUAGE
from tests.language.conftest import QUICK_MODEL
from tests.runs.commands import exits, manifest_of, rows_of, timeless

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
#: What makes a run of the page one of a second.
SHORT = (
    *("frames=128", "env.num_envs=2", "collector.steps=32"),
    *("learner.minibatches=2", "learner.epochs=2", "eval.every=0"),
)


def blocks() -> list[str]:
    """The indented blocks of the page, without their indent."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    |\n    ))+", PAGE.read_text("utf-8"), re.MULTILINE)
    return ["\n".join(line[4:] for line in block.split("\n")).strip() + "\n" for block in found]


def files() -> dict[str, str]:
    """The files of the page, by their names."""
    found = {}
    for block in blocks():
        if match := re.match(r"# ([\w/]+\.(?:py|yaml))\n", block):
            found[match[1]] = block[match.end() :]
    return found


def commands() -> list[str]:
    """The commands of the page that start a run."""
    lines = [line for block in blocks() for line in block.splitlines()]
    return [line for line in lines if re.match(r"klrl .*=", line)]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The page's files in the current folder."""
    for name, text in files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_the_page_has_an_example_of_each_part() -> None:
    text = " ".join(commands())
    for group in ("env", "actor", "loss", "controller", "advantage", "logger"):
        assert f"{group}=custom {group}.target=" in text
    parts = ("loss.own_beta_rule", "kl.own_estimator", "kl.own_divergence", "actor.own_critic")
    for inner in parts:
        assert f"{inner}.target=" in text
    assert "env.wrappers=[" in text
    assert len(commands()) == len(files()) + 1, "each file has a command, the estimators two"


@pytest.mark.integration
@pytest.mark.parametrize("command", commands(), ids=lambda c: c.split("target=")[-1][:40])
def test_every_example_trains(command: str, mine: Path) -> None:
    words = shlex.split(command)[1:]
    quiet = () if "logger=custom" in words else ("logger=none",)
    assert exits(*words, *SHORT, *quiet, f"hydra.run.dir={mine / 'run'}") == 0
    rows = rows_of(mine / "run")
    assert [row["frames"] for row in rows] == [64, 128]
    assert all(row["kl/ref/exact"] >= 0 for row in rows)
    own = manifest_of(mine / "run")["own"]
    targets = [part["target"] for part in own.values()]
    told = " ".join(words) + (mine / "conf/env/maze.yaml").read_text("utf-8")
    assert all(target in told for target in targets)
    local = [part for part in own.values() if not part["target"].startswith("gymnasium")]
    assert local
    assert all(re.fullmatch(r"[0-9a-f]{12}", str(part["source"])) for part in local)
    if "logger=custom" in words:
        lines = (mine / "run" / "lines.txt").read_text("utf-8").split()
        assert [int(line) for line in lines[::2]] == [64, 128]


# ---------------------------------------------------------- klrl's own parts, brought from outside

#: Parts of klrl's, written again as a user would: their rows must be klrl's, to the bit.
COPIES = """
import math
import torch
from torch import nn
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from tensordict import TensorDict
from torchrl.data import Composite, OneHot, Unbounded
from torchrl.envs import EnvBase
from klrl.control.advantage import learned_reward
from klrl.control.networks import mlp, orthogonal
from klrl.kl.controllers import FixedKLController
from klrl.losses.beta import BetaRule
from klrl.losses.policy import PolicyLoss

def cartpole(): return CartPoleEnv()

class TorchRLCartPole(EnvBase):
    def __init__(self):
        super().__init__()
        self.env, self.first = CartPoleEnv(), None
        self.observation_spec = Composite(observation=Unbounded(4))
        self.action_spec, self.reward_spec = OneHot(2), Unbounded(1)
    def _set_seed(self, seed): self.first = seed
    def _reset(self, data=None, **how):
        seed, self.first = self.first, None
        return TensorDict({"observation": torch.tensor(self.env.reset(seed=seed)[0])})
    def _step(self, data):
        seen, reward, out, _, _ = self.env.step(int(data["action"][1]))
        out = torch.tensor([out])
        return TensorDict({"observation": torch.tensor(seen), "reward": torch.tensor([reward]),
                           "terminated": out, "done": out})

class Clip(PolicyLoss):
    def __init__(self, epsilon: float = 0.2, **given):
        super().__init__(**given)
        self.epsilon = epsilon
    def gain(self, scored, advantage, beta):
        ratio = (scored.log_prob - scored.old_log_prob).exp()
        clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon)
        return torch.minimum(ratio * advantage, clipped * advantage)

class Dual(FixedKLController):
    def __init__(self, coef, target: float, lr: float = 0.1):
        super().__init__(coef)
        self.target, self.lr = target, lr
    def move(self, kl, n):
        self.coef = self.coef * math.exp(self.lr * (kl / self.target - 1))

class Doubling(BetaRule):
    def update(self, kl):
        self.beta *= 2.0 if kl > 1.5 * self.dtarg else 0.5 if kl < self.dtarg / 1.5 else 1.0
        return self.beta

def forward(log_ratio): return -torch.exp(-log_ratio) * log_ratio  # u log u, u = pi_ref / pi
def k3(log_ratio): return torch.expm1(-log_ratio) + log_ratio

class GAE:
    def __init__(self, config, critic, reward_scale, normalizer):
        self.how, self.critic, self.config = (config, reward_scale, normalizer), critic, config
    def __call__(self, batch):
        value, after = self.critic.module(batch["observation"]), batch["next"]
        later = self.critic.module(after["observation"]) * ~after["terminated"]
        delta = learned_reward(batch, *self.how) + self.config.gamma * later - value
        advantage, total = torch.zeros_like(delta), 0.0
        for t in reversed(range(delta.shape[1])):
            decay = self.config.gamma * self.config.lmbda * ~after["done"][:, t]
            total = delta[:, t] + decay * total
            advantage[:, t] = total
        batch["state_value"], batch["advantage"] = value, advantage
        batch["value_target"] = advantage + value
"""
_ENV = ("env.target=copies:cartpole", "env.wrappers=[{target: gymnasium.wrappers:TimeLimit, "
        "args: {max_episode_steps: 500}}]")  # fmt: skip
#: klrl's words, and those of the copy.
SAME = {
    "env": (["env=cartpole"], ["env=custom", *_ENV]),
    "torchrl env": (
        ["env=cartpole", "collector=torchrl"],
        [
            "env=custom",
            *(word.replace("cartpole", "TorchRLCartPole") for word in _ENV),
            "collector=torchrl",
        ],
    ),
    "loss": (["loss=clip"], ["loss=custom", "loss.target=copies:Clip"]),
    "controller": (
        ["controller=dual", "controller.target=0.05"],
        ["controller=custom", "controller.target=copies:Dual", "controller.args.target=0.05"],
    ),
    "beta_rule": ([], ["loss.beta_rule=custom", "loss.own_beta_rule.target=copies:Doubling"]),
    "estimator": (
        ["kl.placement=loss", "kl.estimator=k3"],
        ["kl.placement=loss", "kl.estimator=custom", "kl.own_estimator.target=copies:k3"],
    ),
    "divergence": (
        ["kl.placement=split", "kl.estimator=exact", "kl.divergence=forward"],
        [
            *("kl.placement=split", "kl.estimator=exact", "kl.divergence=custom"),
            "kl.own_divergence.target=copies:forward",
        ],
    ),
    "advantage": ([], ["advantage=custom", "advantage.target=copies:GAE"]),
}


@pytest.mark.integration
@pytest.mark.parametrize("part", SAME)
def test_a_copy_of_klrls_part_gives_klrls_rows(part: str, tmp_path: Path) -> None:
    (tmp_path / "copies.py").write_text(COPIES, encoding="utf-8")
    both = []
    for folder, words in zip(("klrls", "copied"), SAME[part], strict=True):
        task = [] if "env" in part.split() else ["env=cartpole"]
        preset = ["optim.lr_floor=0", "learner.compile=false", "seed=3", "logger=none"]
        assert exits(*task, *words, *SHORT, *preset, f"hydra.run.dir={folder}") == 0
        both.append(timeless(rows_of(Path(folder))))
    klrls, copied = both
    assert len(klrls) == len(copied) == 2
    for own, klrl in zip(copied, klrls, strict=True):
        # float32 sums in another order, as of the advantages, may differ in the last digit
        shared = own.keys() & klrl.keys()
        assert own.keys() >= {"kl/ref/exact", "kl/old/exact", "loss/objective"}
        assert {k: own[k] for k in shared} == pytest.approx({k: klrl[k] for k in shared}, rel=1e-4)


# --------------------------------------------------------- a sweep, resume, evaluate, report, plan


@pytest.fixture
def klrl(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """The command line as in a new process in a folder: the user's modules are imported anew."""
    path = sys.path[:]

    def run(*words: str, cwd: Path) -> tuple[int, str, str]:
        for name in files():
            sys.modules.pop(name.removesuffix(".py"), None)
        importlib.invalidate_caches()
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "path", path[:])
        code = exits(*words)
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def console_script(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``klrl`` as it is installed: unlike ``python -m`` it does not search the current folder."""
    script = "import sys; sys.path.pop(0); from klrl.cli.main import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[1])}
    return subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=environment,
    )


OWN = (
    *("env=custom", "env.target=maze:Maze", "loss=custom", "loss.target=losses:SPO"),
    *("actor=custom", "actor.target=nets:Residual", "actor.own_critic.target=nets:Residual"),
    *("controller=custom", "controller.target=controllers:Halving"),
    *("controller.args.target=0.05", "logger=none", *SHORT),
)


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_own_parts_in_a_sweep_resume_evaluation_and_report(mine, klrl, tmp_path_factory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    code, out, err = klrl("-m", "sweep=s", *OWN, "loss.args.epsilon=0.1,0.2", cwd=mine)
    assert code == 0, err
    assert "2 jobs: 2 finished" in out
    run = mine / "outputs" / "s" / "loss.args.epsilon=0.1"
    one, two = (manifest_of(run.parent / f"loss.args.epsilon=0.{i}") for i in (1, 2))
    assert one["config_hash"] != two["config_hash"]
    assert one["own"] == two["own"]
    assert one["own"]["env"]["target"] == "maze:Maze"

    code, out, err = klrl(f"resume={run}", "frames=192", cwd=elsewhere)
    assert code == 0, err
    assert [row["frames"] for row in rows_of(run)] == [64, 128, 192]
    evaluated = ("evaluate", str(run), "--episodes", "2", "--json")
    code, out, err = klrl(*evaluated, cwd=elsewhere)
    assert (code, err) == (0, "")
    assert json.loads(out)["episodes"] == 2
    assert klrl(*evaluated, "env.args.slip=0", cwd=elsewhere)[0] == 0
    code, out, err = klrl(*evaluated, "env.args.slpi=0", cwd=elsewhere)
    assert (code, out) == (2, "")
    assert "did you mean slip?" in err

    source = (mine / "losses.py").read_text("utf-8")
    (mine / "losses.py").write_text(source.replace("(2 * self", "(3 * self"), encoding="utf-8")
    code, out, err = klrl("-m", "sweep=s", *OWN, "loss.args.epsilon=0.1,0.2", cwd=mine)
    assert code == 0, err
    assert "2 jobs, 2 to start" in out, "a patched loss is another job"
    hashes = {
        manifest_of(path.parent)["config_hash"] for path in run.parent.glob("*/manifest.json")
    }
    assert len(hashes) == 4
    code, out, err = klrl("-m", "sweep=s", *OWN, "loss.args.epsilon=0.1,0.2", cwd=mine)
    assert "2 jobs, 2 finished before" in out
    code, out, err = klrl(f"resume={run}", "frames=256", cwd=elsewhere)
    assert code == 2
    assert "loss.target=losses:SPO: has changed since this run began" in err
    assert klrl(*evaluated, cwd=elsewhere)[2] == "", "an evaluation has no loss"
    (mine / "maze.py").write_text("\n" + (mine / "maze.py").read_text("utf-8"), encoding="utf-8")
    assert "env.target=maze:Maze: has changed" in klrl(*evaluated, cwd=elsewhere)[2]

    for name in files():
        (mine / name).unlink()
    code, out, err = klrl("report", "outputs/s", cwd=mine)
    assert code == 0, err
    assert "4 runs in 4 settings" in out, "what was recorded is enough for a report"
    code, out, err = klrl("evaluate", str(run), cwd=elsewhere)
    assert code == 2
    assert "importing maze fails (ModuleNotFoundError" in err


@pytest.mark.services
@pytest.mark.timeout(300)
def test_other_processes_find_own_parts(mine: Path) -> None:
    """joblib's, from the console script, which does not search the current folder."""
    done = console_script("-m", "sweep=s", "launcher=joblib", "launcher.n_jobs=1", *OWN, cwd=mine)
    assert done.returncode == 0, done.stderr
    assert "1 job: 1 finished" in done.stdout
    assert len(rows_of(mine / "outputs/s/job")) == 2


# ------------------------------------------------------------------- what the first call finds out

#: Parts that are wrong: what is said of each.
WRONG = """
import gymnasium, numpy as np, torch
from torch import nn
from klrl.kl.controllers import FixedKLController
from klrl.losses.beta import BetaRule
from klrl.losses.policy import PolicyLoss
from maze import Maze
from point import Point
from torchrl.envs import EnvBase

class Detached(PolicyLoss):
    def gain(self, scored, advantage, beta): return scored.log_prob.detach() * advantage
class Mean(PolicyLoss):
    def gain(self, scored, advantage, beta): return (scored.log_prob * advantage).mean()
class Nan(PolicyLoss):
    def gain(self, scored, advantage, beta): return scored.log_prob.log()
class Raises(PolicyLoss):
    def gain(self, scored, advantage, beta): return scored.nothing
class NoSuper(PolicyLoss):
    def __init__(self): pass
    def gain(self, scored, advantage, beta): return scored.log_prob
class Plain: pass
async def later(): pass
class Negative(FixedKLController):
    def move(self, kl, n): self.coef = -1.0
class Text(FixedKLController):
    def move(self, kl, n): return "a"
    def update(self, kl, n=1): return "a"
class Infinite(BetaRule):
    def update(self, kl): return float("inf")
def env(): return Maze(4, 0.0)
class Few(Maze):
    def __init__(self): super().__init__(4, 0.0)
    def step(self, action): return super().step(action)[:4]
class Short(Few):
    def step(self, action): return Maze.step(self, action)
    def seen(self): return np.zeros(3, np.float32)
class NanSeen(Short):
    def seen(self): return np.full(4, np.nan, np.float32)
class Spaceless(gymnasium.Env): pass
class Batched(Point):
    def __init__(self):
        EnvBase.__init__(self, batch_size=[4])
class Worded(Maze):
    def __init__(self):
        super().__init__(4, 0.0)
        self.observation_space = gymnasium.spaces.Text(9)
class Unbounded(Maze):
    def __init__(self):
        super().__init__(4, 0.0)
        self.action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))
class Fixed(Maze):
    def __init__(self):
        super().__init__(4, 0.0)
        self.action_space = gymnasium.spaces.Box(1, 1, (1,))
class ShortMask(Maze):
    def __init__(self):
        super().__init__(4, 0.0)
        self.observation_space = gymnasium.spaces.Dict(
            at=self.observation_space,
            inner=gymnasium.spaces.Tuple([gymnasium.spaces.MultiBinary(2)]))
    def seen(self):
        return {"at": super().seen(), "inner": (np.zeros(3, np.int8),)}
class NoKey(ShortMask):
    def seen(self): return {"at": super().seen()["at"]}
class NoReward(Point):
    def _step(self, data): return super()._step(data).exclude("reward")
class Shifted(Point):
    def _reset(self, data=None, **how): return super()._reset().set("position", torch.zeros(2))
class NoSpecs(Point):
    def __init__(self): EnvBase.__init__(self)
class Net(nn.Module):
    def __init__(self, inputs, outputs=1):
        super().__init__()
        self.net, self.spare = nn.Linear(inputs, outputs), nn.Parameter(torch.zeros(2))
    def forward(self, x): return self.net(x) + self.spare.sum()
class Unused(Net):
    def forward(self, x): return self.net(x)
class Dropout(Net):
    def forward(self, x): return nn.functional.dropout(super().forward(x))
class OverRows(Net):
    def forward(self, x): return super().forward(x) - super().forward(x).mean()
class NotFinite(Net):
    def forward(self, x): return super().forward(x) * float("nan")
class OverTime(Net):
    def forward(self, x): return super().forward(x).cumsum(0)
class Wide(Net):
    def forward(self, x): return super().forward(x).mean(-1)
class Double(Net):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.double()
class Scale(Net):
    def forward(self, x): return super().forward(x), -super().forward(x).exp()
def shifted(log_ratio): return log_ratio ** 2 + 1
def forgets(critic):
    def write(batch): batch["advantage"] = batch["next", "reward"]
    return write
class NoLog: pass
def wrapped(env): return 3
"""
LOSS, CONTROLLER = "loss=custom loss.target", "controller=custom controller.target"
ENV = "env=custom env.target"
ACTOR = "env=pendulum actor=custom actor.target"
ANSWERS = [
    (f"{LOSS}=wrong:Detached", "gain has no gradient in the policy"),
    (f"{LOSS}=wrong:Mean", "gain returned shape () for positions of shape (8,); give one each"),
    (f"{LOSS}=wrong:Nan", "gain is not finite at finite log-probs"),
    (f"{LOSS}=wrong:Raises", "has no attribute 'nothing' (line "),
    (f"{LOSS}=wrong:NoSuper", "its __init__ does not call PolicyLoss's"),
    (f"{LOSS}=wrong:Plain", "made Plain; derive it from klrl.losses.policy.PolicyLoss"),
    (f"{CONTROLLER}=wrong:Negative", "kl.coef=-1.0 after a KL of .01 nats; give a number >= 0"),
    (f"{CONTROLLER}=wrong:Text", "kl.coef='a' after a KL"),
    (f"{CONTROLLER}=wrong:Plain", "derive it from klrl.kl.controllers.FixedKLController"),
    ("loss.beta_rule=custom loss.own_beta_rule.target=wrong:Infinite", "beta=inf after a KL of 2"),
    (f"{ENV}=wrong:Plain", "made Plain; return a gymnasium.Env"),
    (f"{ENV}=wrong:later", "is an async function; name a plain one"),
    (f"{ENV}=wrong:Few", "step returned tuple; give observation, reward, terminated, truncated"),
    (f"{ENV}=wrong:Short", "observation has shape (3,), its space (4,); mend the environment"),
    (f"{ENV}=wrong:NanSeen", "an observation is not finite; mend the environment"),
    (f"{ENV}=wrong:Spaceless", "has no observation_space; set one in its __init__"),
    (f"{ENV}=wrong:Batched", "has the batch size [4]; return one environment of batch size []"),
    (f"{ENV}=wrong:NoReward", "step wrote no reward, which its spec has; write it"),
    (f"{ENV}=wrong:Shifted", "reset wrote position of shape [2], and its spec says [1]"),
    (f"{ENV}=wrong:NoSpecs", "env.target=wrong:NoSpecs: "),
    (f"{ENV}=wrong:env actor.distribution=normal actor=custom actor.target=wrong:Net",
     "actor.distribution=normal: the actions of env.target=wrong:env are discrete"),
    (f"{ENV}=wrong:Worded", "env.target=wrong:Worded: its observation space is Text, which has no"),
    (f"{ENV}=wrong:env env.observation_keys=[a]", "observation of env.target=wrong:env is a Box,"),
    (f"{ENV}=wrong:Fixed actor=tanh_normal",
     "actions of env.target=wrong:Fixed have a lower bound that is not below the upper one"),
    (f"{ENV}=wrong:ShortMask", "observation's inner.0 array([0, 0, 0], dtype=int8) is not in its "
     "space MultiBinary(2)"),
    (f"{ENV}=wrong:NoKey", "observation has no inner; mend the environment"),
    (f"{ENV}=wrong:Unbounded actor=custom actor.target=wrong:Net actor.distribution=tanh_normal",
     "actor.distribution=tanh_normal: the actions of env.target=wrong:Unbounded have no finite "
     "bounds to scale to; choose actor.distribution=normal"),
    (f"{ENV}=wrong:Unbounded actor=categorical",
     "actor=categorical: the actions of env.target=wrong:Unbounded are continuous; choose "
     "actor=normal, tanh_normal or mlp"),
    (f"{ACTOR}=wrong:Unused", "its forward does not use spare; remove that parameter"),
    (f"{ACTOR}=wrong:Dropout", "two calls give different outputs; leave dropout and noise out"),
    (f"{ACTOR}=wrong:OverRows", "what it says of one observation depends on the others"),
    (f"{ACTOR}=wrong:NotFinite", "its outputs are not finite; look at its initialisation"),
    (f"{ACTOR}=wrong:OverTime", "what it says of one observation depends on the others"),
    (f"{ACTOR}=torch.nn:Linear", "asks for in_features, which klrl does not give (it gives"),
    (f"{ACTOR}=wrong:Wide", "gave (2, 3) for observations (2, 3, 3); give (2, 3, 1), or two"),
    (f"{ACTOR}=wrong:Double", "spare is not float32"),
    (f"{ACTOR}=wrong:Scale", "its second output is the scale of a Gaussian, and it is not above 0"),
    (f"{ACTOR}=wrong:Plain", "made Plain; return a network (torch.nn.Module)"),
    ("env=catch actor=custom actor.target=pixels:Pixels",
     "actor.own_critic=null: klrl's critic beside a network of your own is an MLP, which reads no"),
    ("env=catch actor=custom actor.target=wrong:Net actor.own_critic.target=pixels:Pixels",
     "actor.target=wrong:Net: raised TypeError"),
    (f"{ACTOR}=wrong:Net actor.own_critic.target=wrong:Wide", "actor.own_critic.target=wrong:Wide"),
    ("kl.placement=loss kl.estimator=custom kl.own_estimator.target=wrong:shifted",
     "is 1 where policy and reference agree (log-ratio 0); a divergence is 0 there"),
    ("kl.placement=loss kl.estimator=custom kl.own_estimator.target=wrong:Plain",
     "kl.own_estimator.target=wrong:Plain: name a function of log_ratio"),
    ("advantage=custom advantage.target=wrong:forgets", "wrote no value_target; write it into"),
    ("logger=custom logger.target=wrong:NoLog", "has no method log; add log(self, row)"),
    ("env=cartpole env.wrappers=[wrong:wrapped]", "made int; name a gymnasium.Wrapper"),
]  # fmt: skip


@pytest.mark.integration
def test_each_wrong_part_is_refused_in_one_line(mine: Path, capsys) -> None:
    (mine / "wrong.py").write_text(WRONG, encoding="utf-8")
    for words, said in ANSWERS:
        assert exits(*words.split(), *SHORT, "hydra.run.dir=outputs/run") == 2, words
        told = capsys.readouterr()
        assert told.out == "", words
        assert said in told.err, words
        assert len(told.err.splitlines()) == 1, words
        assert not (mine / "outputs" / "run").exists(), words


@pytest.mark.integration
def test_own_parts_of_a_language_run_give_klrls_rows(tmp_path: Path) -> None:
    (tmp_path / "copies.py").write_text(COPIES, encoding="utf-8")
    build(QUICK_MODEL, tmp_path / "model")
    both = (
        ["loss=clip", "kl.placement=loss", "kl.estimator=k3"],
        [
            *("loss=custom", "loss.target=copies:Clip"),
            *("kl.placement=loss", "kl.estimator=custom", "kl.own_estimator.target=copies:k3"),
        ],
    )
    rows = []
    for folder, words in zip(("klrls", "copied"), both, strict=True):
        shared = ["loss.normalize_advantage=false", f"actor.model={tmp_path / 'model'}"]
        assert exits(*LANGUAGE, *words, *shared, f"hydra.run.dir={folder}") == 0
        rows.append(timeless(rows_of(Path(folder))))
    klrls, copied = rows
    assert len(klrls) == len(copied) == 2
    assert klrls[-1]["loss/kl_ref"] > 0
    for own, klrl in zip(copied, klrls, strict=True):
        names = own.keys() & klrl.keys()
        assert {k: own[k] for k in names} == pytest.approx({k: klrl[k] for k in names}, rel=1e-5)
