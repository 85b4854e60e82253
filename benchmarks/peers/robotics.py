"""PPO of rsl_rl (OnPolicyRunner) and of skrl (SequentialTrainer); in .venv-rl: make bench-rl.

Copies are Gymnasium's SyncVectorEnv. Observations are normalised; no rows. Truncations bootstrap
from the value before, as both do.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import gymnasium
import torch
from gymnasium.vector import AutoresetMode
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from skrl.agents.torch.ppo import PPO
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.trainers.torch import SequentialTrainer
from tensordict import TensorDict
from torch import nn

from benchmarks.peers.common import ENV_IDS, PACKAGES, Clock, make_parser, report


def make_copies(args: argparse.Namespace) -> gymnasium.vector.VectorEnv:
    how = {"autoreset_mode": AutoresetMode.SAME_STEP}
    return gymnasium.make_vec(ENV_IDS[args.env], args.n, "sync", how)


class Copies(VecEnv):
    """rsl_rl's view of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.env = make_copies(args)
        self.num_envs, self.num_actions = args.n, self.env.single_action_space.shape[-1]
        self.max_episode_length, self.device, self.cfg = 200, "cpu", {}
        self.episode_length_buf = torch.zeros(args.n, dtype=torch.long)
        self.show(self.env.reset(seed=args.seed)[0])

    def show(self, observation: Any) -> None:
        self.seen = TensorDict({"policy": torch.tensor(observation)}, [self.num_envs])

    def get_observations(self) -> TensorDict:
        return self.seen

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict]:
        observation, reward, terminated, truncated, _ = self.env.step(actions.numpy())
        self.show(observation)
        over, late = torch.tensor(terminated | truncated), torch.tensor(truncated)
        return self.seen, torch.tensor(reward, dtype=torch.float32), over, {"time_outs": late}


def run_rsl_rl(args: argparse.Namespace, clock: Clock) -> None:
    net = {"class_name": "MLPModel", "hidden_dims": [args.width] * 2, "activation": "tanh"}
    net["obs_normalization"] = True
    algorithm = {
        **{"class_name": "PPO", "schedule": "fixed", "learning_rate": args.lr, "lam": args.lmbda},
        **{"num_learning_epochs": args.epochs, "num_mini_batches": args.minibatches},
        **{"gamma": args.gamma, "entropy_coef": 0.0, "value_loss_coef": 0.5, "max_grad_norm": 0.5},
        "use_clipped_value_loss": False,
    }
    settings = {
        **{"num_steps_per_env": args.t, "save_interval": 10**9, "algorithm": algorithm},
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**net, "distribution_cfg": {"class_name": "GaussianDistribution"}},
        "critic": net,
    }
    runner = OnPolicyRunner(Copies(args), settings)
    log = runner.logger.log
    runner.logger.log = lambda **told: (log(**told), clock.lap())
    clock.start()
    runner.learn(args.iterations)


class Policy(GaussianMixin, Model):
    def __init__(self, net: nn.Module, **spaces: Any) -> None:
        Model.__init__(self, device="cpu", **spaces)
        GaussianMixin.__init__(self)
        self.net, self.log_std = net, nn.Parameter(torch.zeros(1))

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[torch.Tensor, dict]:
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Value(DeterministicMixin, Model):
    def __init__(self, net: nn.Module, **spaces: Any) -> None:
        Model.__init__(self, device="cpu", **spaces)
        DeterministicMixin.__init__(self)
        self.net = net

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[torch.Tensor, dict]:
        return self.net(inputs["observations"]), {}


def run_skrl(args: argparse.Namespace, clock: Clock) -> None:
    env = wrap_env(make_copies(args))
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    settings = {
        **{"rollouts": args.t, "learning_epochs": args.epochs, "mini_batches": args.minibatches},
        **{"learning_rate": args.lr, "discount_factor": args.gamma, "gae_lambda": args.lmbda},
        **{"value_loss_scale": 0.5, "value_clip": 0.0, "time_limit_bootstrap": True},
        "observation_preprocessor": RunningStandardScaler,
        "observation_preprocessor_kwargs": {"size": env.observation_space, "device": "cpu"},
    }

    def net() -> nn.Module:
        hidden = (nn.Linear(3, args.width), nn.Tanh(), nn.Linear(args.width, args.width), nn.Tanh())
        return nn.Sequential(*hidden, nn.Linear(args.width, 1))

    memory = RandomMemory(memory_size=args.t, num_envs=args.n, device="cpu")
    models = {"policy": Policy(net(), **spaces), "value": Value(net(), **spaces)}
    agent = PPO(models=models, memory=memory, cfg=settings, device="cpu", **spaces)
    agent.write_interval = agent.checkpoint_interval = 0
    update = agent.update
    agent.update = lambda **at: (update(**at), clock.lap())
    how = {"timesteps": args.t * args.iterations, "headless": True, "disable_progressbar": True}
    trainer = SequentialTrainer(cfg=how, env=env, agents=agent)
    clock.start()
    trainer.train()


RUNS = {"rsl_rl": run_rsl_rl, "skrl": run_skrl}


def main() -> None:
    clock = Clock()
    torch.set_num_threads(1)
    parser = make_parser(__doc__)
    parser.add_argument("--system", choices=RUNS, default="rsl_rl")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    with contextlib.redirect_stdout(sys.stderr):
        RUNS[args.system](args, clock)
    report(args.system, args, clock, packages=(*PACKAGES, "rsl-rl-lib", "skrl"))


if __name__ == "__main__":
    main()
