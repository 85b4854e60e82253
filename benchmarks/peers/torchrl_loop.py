"""PPO put together from TorchRL's parts: GymEnv, Collector, GAE, replay buffer, KLPENPPOLoss.

As TorchRL's own PPO example, where equal work does not ask for less: advantages once per rollout
(the example recomputes them every epoch), one optimiser, a Normal that the environment clips (its
KL has a closed form). Several copies of the environment are TorchRL's wrapper around Gymnasium's
SyncVectorEnv, its fastest way without processes.
"""

from __future__ import annotations

import argparse
import os
import tempfile

os.environ["OMP_NUM_THREADS"] = "1"

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    EnvBase,
    GymEnv,
    GymWrapper,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNormV2,
)
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import KLPENPPOLoss
from torchrl.objectives.value import GAE
from torchrl.record import CSVLogger

from benchmarks.peers.common import ENV_IDS, Clock, make_parser, report

LOSSES = ("loss_objective", "loss_critic", "loss_entropy")


def make_env(args: argparse.Namespace) -> TransformedEnv:
    """Copies in this process, observations normalised."""
    base = make_base(args)
    transforms = [RewardSum(), StepCounter(), VecNormV2(in_keys=["observation"])]
    if base.observation_spec["observation"].dtype == torch.float64:  # MuJoCo's
        transforms.insert(0, DoubleToFloat(in_keys=["observation"]))
    env = TransformedEnv(base, Compose(*transforms))
    env.set_seed(args.seed)
    return env


def make_base(args: argparse.Namespace) -> EnvBase:
    env_id = ENV_IDS[args.env]
    if args.n == 1:  # GymEnv is the faster
        return GymEnv(env_id, device="cpu")
    settings = {"autoreset_mode": AutoresetMode.SAME_STEP}
    return GymWrapper(
        gym.make_vec(env_id, num_envs=args.n, vectorization_mode="sync", vector_kwargs=settings)
    )


def make_networks(env: EnvBase) -> tuple[ProbabilisticActor, ValueOperator]:
    width, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    cells = {"num_cells": [64, 64], "activation_class": nn.Tanh}
    policy = nn.Sequential(
        MLP(in_features=width, out_features=actions, **cells),
        AddStateIndependentNormalScale(actions),
    )
    actor = ProbabilisticActor(
        TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(in_features=width, out_features=1, **cells), in_keys=["observation"])
    return actor, critic


class Update:
    """Epochs of minibatches over one rollout."""

    def __init__(self, args: argparse.Namespace, actor: nn.Module, critic: nn.Module) -> None:
        frames = args.n * args.t
        self.epochs = args.epochs
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(frames),
            sampler=SamplerWithoutReplacement(),
            batch_size=frames // args.minibatches,
        )
        self.loss = KLPENPPOLoss(
            actor,
            critic,
            entropy_coeff=0.0,
            critic_coeff=0.5,
            loss_critic_type="l2",
            normalize_advantage=True,
        )
        self.parameters = list(self.loss.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=args.lr, eps=1e-5, fused=True)

    def __call__(self, batch: TensorDict) -> dict[str, float]:
        self.buffer.empty()
        self.buffer.extend(batch.reshape(-1))
        losses = []
        for _ in range(self.epochs):
            for minibatch in self.buffer:
                losses.append(self.step(minibatch))
        return dict(zip(LOSSES, torch.stack(losses).mean(0).tolist(), strict=True))

    def step(self, minibatch: TensorDict) -> torch.Tensor:
        found = self.loss(minibatch)
        terms = torch.stack([found[name] for name in LOSSES])
        self.optimizer.zero_grad()
        terms.sum().backward()
        nn.utils.clip_grad_norm_(self.parameters, 0.5)
        self.optimizer.step()
        return terms.detach()


def train(args: argparse.Namespace, clock: Clock, folder: str) -> None:
    torch.manual_seed(args.seed)
    env = make_env(args)
    actor, critic = make_networks(env)
    update = Update(args, actor, critic)
    advantage = GAE(gamma=args.gamma, lmbda=args.lmbda, value_network=critic)
    logger = CSVLogger("torchrl", log_dir=folder)
    env.step_and_maybe_reset = clock.timed("env", env.step_and_maybe_reset)
    collector = Collector(
        env,
        actor,
        frames_per_batch=args.n * args.t,
        total_frames=-1,
        auto_register_policy_transforms=False,
    )
    batches = iter(collector)
    collect = clock.timed("rollout", lambda: next(batches))
    clock.start()
    for iteration in range(1, args.iterations + 1):
        batch = collect()
        with clock.phase("advantage"), torch.no_grad():
            advantage(batch)
        with clock.phase("update"):
            losses = update(batch)
        returns = batch["next", "episode_reward"][batch["next", "done"]]
        if len(returns):
            losses["return"] = float(returns.mean())
        for name, value in losses.items():
            logger.log_scalar(name, value, step=iteration * args.n * args.t)
        clock.lap()
    collector.shutdown()


def main() -> None:
    clock = Clock()
    torch.set_num_threads(1)
    args = make_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        train(args, clock, folder)
    report("TorchRL loop", args, clock)


if __name__ == "__main__":
    main()
