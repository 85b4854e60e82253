"""docs/your_policy.md: its files load policies of other libraries, unchanged to 1e-6."""

import math
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torch import nn
from torch.distributions import Normal, kl_divergence

import klrl
from klrl.runs.resume import stored_config
from klrl.train.callbacks import Callback
from klrl.train.policy_kl import kl_between
from tests.conftest import QUICK
from tests.runs.commands import rows_of, said

pytestmark = pytest.mark.integration
PAGE = Path(__file__).parents[2] / "docs" / "your_policy.md"
#: A policy that does not learn; MuJoCo's presets normalise observations too.
STILL = (
    "env.normalize_observation=true",
    "optim.lr=1e-12",
    "optim.lr_floor=0",
    "collector.steps=64",
    "frames=2560",
)
STILL += ("eval.every=0", "eval.final=0", "logger=none", "learner.compile=false")

#: A short lesson.
DISTIL = ("experiment=distill", "env=pendulum", "optim.lr=0.01", *STILL[3:])
DISTIL += ("collector.steps=32", "frames=1024")
#: torch.onnx uses a class that torch itself calls deprecated.
TORCHS_OWN = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning")


def write_page() -> None:
    """The page's files, into the current folder."""
    for name, code in re.findall(
        r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text("utf-8"), re.S
    ):
        Path(name).write_text(code)


def sb3() -> Callable[[np.ndarray], Normal]:
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.vec_env import VecNormalize

    env = VecNormalize(make_vec_env("Pendulum-v1", n_envs=2, seed=3))
    model = PPO("MlpPolicy", env, n_steps=128, seed=3, device="cpu")
    model.set_logger(configure("logs", []))  # without one it writes below /tmp
    model.learn(512)
    model.save("sb3.zip")
    env.save("sb3.pkl")

    def source(observations: np.ndarray) -> Normal:
        seen = torch.as_tensor(env.normalize_obs(observations), dtype=torch.float32)
        return model.policy.get_distribution(seen).distribution

    return source


def rsl_rl() -> Callable[[np.ndarray], Normal]:
    actor = nn.Sequential(nn.Linear(3, 32), nn.ELU(), nn.Linear(32, 16), nn.ELU(), nn.Linear(16, 1))
    mean, std = torch.tensor([[0.3, -0.2, 1.0]]), torch.tensor([[0.7, 0.6, 4.0]])
    state = {"std": torch.tensor([0.6]), "actor_obs_normalizer._mean": mean}
    state |= {f"actor.{key}": value for key, value in actor.state_dict().items()}
    state |= {"actor_obs_normalizer._std": std, "critic.0.weight": torch.ones(1, 3)}
    torch.save({"model_state_dict": state, "iter": 7}, "model.pt")
    return lambda seen: Normal(actor((torch.as_tensor(seen) - mean) / (std + 0.01)), state["std"])


def plain() -> Callable[[np.ndarray], Normal]:
    actor = nn.Sequential(
        nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    state = {f"actor_mean.{key}": value for key, value in actor.state_dict().items()}
    state |= {"actor_logstd": torch.full((1, 1), -0.4), "critic.0.bias": torch.ones(1)}
    torch.save(state, "agent.pt")
    return lambda seen: Normal(actor(torch.as_tensor(seen)), state["actor_logstd"].exp())


SOURCES = {"sb3_policy": sb3, "rsl_policy": rsl_rl, "plain_policy": plain}


class Watch(Callback):
    """The parameters of the policy on each rollout's own observations."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, Normal]] = []
        self.actions: list[torch.Tensor] = []

    def iterated(self, training: object, row: dict, batch: TensorDictBase) -> None:
        params = [batch[key].flatten(0, -2) for key in ("loc", "scale")]
        self.actions.append(batch["action"].flatten(0, -2))
        self.seen.append((batch["observation"].flatten(0, -2), Normal(*params)))


def reverse_kl(policy: Normal, source: Normal) -> torch.Tensor:
    """The largest KL(policy||source) of one step, nats."""
    pair = (Normal(each.loc.double(), each.scale.double()) for each in (policy, source))
    return kl_divergence(*pair).sum(-1).max()


@pytest.mark.parametrize("file", SOURCES)
def test_a_policy_of_another_library_starts_as_it_is(file: str, capsys) -> None:
    """Its parameters are the source's on the run's own observations, in rows 1 and 5."""
    source = SOURCES[file]()
    write_page()
    watch = Watch()
    words = ("env=pendulum", f"actor.init={file}.py:policy", *STILL)
    klrl.run(*words, folder="run", callbacks=[watch])
    rows = rows_of(Path("run"))
    assert len(rows) == len(watch.seen) == 5
    for i in (0, 4):
        observations, policy = watch.seen[i]
        with torch.no_grad():
            wanted = source(observations.numpy())
        assert torch.allclose(policy.loc, wanted.loc, rtol=1e-6, atol=1e-6)
        assert torch.allclose(policy.scale, wanted.scale.expand_as(policy.loc), rtol=1e-6)
        assert reverse_kl(policy, wanted) < 1e-6
        assert abs(rows[i]["kl/ref/exact"]) < 1e-6
    assert "the network came with weights" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["plain_policy"])
def test_a_student_learns_from_code_and_klrl_kl_compares_with_it(file: str, capsys) -> None:
    SOURCES[file]()
    write_page()
    klrl.run(*DISTIL, f"reference.path={file}.py:policy", folder="run")
    rows = rows_of(Path("run"))
    assert rows[-1]["kl/ref/exact"] < 0.5 * rows[0]["kl/ref/exact"]
    assert said(capsys, "kl", "run", "--to", f"{file}.py:policy", "--episodes", "2")[0] == 0


def export(network: nn.Module) -> None:
    """The file policy.onnx."""
    program = torch.onnx.export(
        network.eval(),
        (torch.zeros(2, 3),),
        dynamo=True,
        verbose=False,
        dynamic_shapes={"observation": {0: torch.export.Dim("batch")}},
        input_names=["observation"],
        output_names=["loc", "scale"],
    )
    program.save("policy.onnx")


@TORCHS_OWN
def test_an_onnx_file_is_a_teacher(capsys) -> None:
    """Its KLs are those of the network that it was made of, in the states of the rollouts."""
    plain()
    write_page()
    export(network := runpy.run_path("plain_policy.py")["policy"](3, 1))
    watch = Watch()
    klrl.run(*DISTIL, "reference.path=policy.onnx", folder="run", callbacks=[watch])
    for row, (observations, policy) in zip(rows_of(Path("run")), watch.seen, strict=True):
        with torch.no_grad():
            kl = kl_divergence(policy, Normal(*network(observations))).mean()
        assert row["kl/ref/exact"] == pytest.approx(float(kl), rel=1e-4, abs=1e-7)
    Path("policy.onnx").write_bytes(b"changed")
    code, _, err = said(capsys, "resume=run", "frames=2048")
    assert code == 2
    assert "policy.onnx: has changed since this run began; restore it" in err


@TORCHS_OWN
def test_the_kl_of_code_and_an_onnx_file_that_differ_in_their_std() -> None:
    """KL(N(m, s) || N(m, 2s)) = ln 2 + 1/8 - 1/2 in every state."""
    plain()
    write_page()
    network = runpy.run_path("plain_policy.py")["policy"](3, 1)
    network.actor_logstd.data += math.log(2)
    export(network)
    pair = ("plain_policy.py:policy", "policy.onnx")
    for run, other in (pair, pair[::-1]):
        found = kl_between(run, other, ["env=pendulum"], episodes=2).distances
        one_way = found["KL(run||other) on run" if run == pair[0] else "KL(other||run) on run"]
        assert one_way.mean == pytest.approx(math.log(2) + 1 / 8 - 1 / 2, abs=1e-6)
        assert one_way.worst == pytest.approx(one_way.mean, abs=1e-6)


def test_finetune_takes_the_sizes_of_the_run_and_a_coefficient_from_its_reward(capsys) -> None:
    small = ("actor.hidden=[8]", "actor.activation=relu")
    quick = [word for word in QUICK if not word.startswith("actor.")]
    klrl.run(*quick, *small, folder="trained")
    klrl.run(*quick, "experiment=finetune", "actor.init=trained", folder="tuned")
    config = stored_config(Path("tuned"))
    assert (config.actor.hidden, config.actor.activation, config.kl.coef) == ([8], "relu", None)
    rows = rows_of(Path("tuned"))
    assert rows[0]["kl/ref/coef"] == 0
    assert {row["kl/ref/coef"] for row in rows[1:]} == {
        -rows[0]["reward/raw"]
    }  # all rewards are below 0


CHANCE = """
import torch
from torch import nn

class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.net.weight.data = torch.arange(3.0).reshape(1, 3)
        self.noise = nn.Parameter(torch.randn(4))

    def forward(self, observation):
        mean = self.net(observation) + 0 * self.noise.sum()
        return mean, torch.ones_like(mean)

def policy():
    torch.manual_seed(0)
    return Partly()
"""


def test_code_that_seeds_torch_changes_no_seed_and_one_loaded_weight_is_enough(capsys) -> None:
    Path("partly.py").write_text(CHANCE)
    first = []
    for seed in (1, 2):
        watch = Watch()
        klrl.run(*QUICK[1:], "env=pendulum", "actor.init=partly.py:policy", f"seed={seed}",
                 folder=f"run{seed}", callbacks=[watch])  # fmt: skip
        _, policy = watch.seen[0]
        first.append(watch.actions[0] - policy.loc)
    assert not torch.allclose(*first)
    assert capsys.readouterr().out.count("the network came with weights") == 2


def test_a_sweep_takes_files(capsys) -> None:
    for name in ("one", "two"):
        plain()
        Path("agent.pt").rename(f"{name}.pt")
        write_page()
        code = Path("plain_policy.py").read_text().replace("agent.pt", f"{name}.pt")
        Path(f"{name}.py").write_text(code)
    words = ("-m", "sweep=s", "actor.init=one.py:policy,two.py:policy", *STILL[3:])
    assert said(capsys, *words, "env=pendulum", "frames=320")[0] == 0
    one, two = (rows_of(run)[0]["reward/raw"] for run in sorted(Path("outputs/s").glob("actor*")))
    assert one != two


@TORCHS_OWN
def test_a_file_of_another_distribution_is_refused(capsys) -> None:
    klrl.run(*QUICK, "actor=tanh_normal", folder="tanh")
    assert said(capsys, "export", "tanh", "tanh.onnx")[0] == 0
    code, _, err = said(capsys, *DISTIL, "reference.path=tanh.onnx")
    assert code == 2
    assert "its policy is tanh_normal, but this policy is normal" in err


class Late(gymnasium.Env):
    """No reward in the first rollout, then 2 or -2."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    action_space = gymnasium.spaces.Box(-1, 1, (1,))
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample() * 0, {}

    def step(self, action):
        self.steps += 1
        reward = 2.0 * (-1) ** self.steps * (self.steps > 32)
        return np.full(3, reward, np.float32), reward, False, self.steps % 8 == 0, {}


def test_the_first_coefficient_waits_for_a_reward(capsys) -> None:
    words = [word for word in QUICK if not word.startswith("env")]
    words += ["env=custom", "env.target=tests.control.test_your_policy:Late", "env.num_envs=1"]
    klrl.run(*words, "kl.coef=null", folder="run")
    assert [row["kl/ref/coef"] for row in rows_of(Path("run"))] == [0, 0, 2, 2]
    assert "kl.coef=0: no reward so far" in capsys.readouterr().out
