"""TorchRL's PPO from its parts, on its batched pendulum: Collector, GAE, buffer, ClipPPOLoss.

N simulators in pure torch step in one call; observations are normalised. Advantages come once per
rollout (TorchRL's example recomputes them every epoch), and minibatches hold only what a loss
reads, which is faster. No KL, no rows.
"""

from __future__ import annotations

import argparse
import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from tensordict import TensorDict
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import BatchSizeTransform, Compose, TransformedEnv, VecNormV2
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from benchmarks.peers.common import Clock, make_parser, report
from klrl.control.env.pendulum import Pendulum

#: What the loss reads.
READ = ("observation", "action", "action_log_prob", "advantage", "value_target")


def make_networks(width: int) -> tuple[ProbabilisticActor, ValueOperator]:
    cells = {"in_features": 3, "num_cells": [width, width], "activation_class": nn.Tanh}
    policy = nn.Sequential(MLP(out_features=1, **cells), AddStateIndependentNormalScale(1))
    actor = ProbabilisticActor(
        TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    return actor, ValueOperator(MLP(out_features=1, **cells), in_keys=["observation"])


class Update:
    """Epochs of minibatches over one rollout."""

    def __init__(self, args: argparse.Namespace, loss: ClipPPOLoss) -> None:
        frames = args.n * args.t
        self.epochs, self.loss = args.epochs, loss
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(frames),
            sampler=SamplerWithoutReplacement(),
            batch_size=frames // args.minibatches,
        )
        self.parameters = list(loss.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=args.lr, eps=1e-5, fused=True)

    def __call__(self, batch: TensorDict) -> None:
        self.buffer.empty()
        self.buffer.extend(batch.select(*READ).reshape(-1))
        for _ in range(self.epochs):
            for minibatch in self.buffer:
                found = self.loss(minibatch)
                self.optimizer.zero_grad()
                (found["loss_objective"] + found["loss_critic"]).backward()
                nn.utils.clip_grad_norm_(self.parameters, 0.5)
                self.optimizer.step()


def main() -> None:
    clock = Clock()
    args = make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    sized = BatchSizeTransform(batch_size=[args.n])
    env = TransformedEnv(Pendulum(), Compose(sized, VecNormV2(in_keys=["observation"])))
    actor, critic = make_networks(args.width)
    how = {"entropy_bonus": False, "critic_coeff": 0.5, "loss_critic_type": "l2"}
    update = Update(args, ClipPPOLoss(actor, critic, normalize_advantage=True, **how))
    advantage = GAE(gamma=args.gamma, lmbda=args.lmbda, value_network=critic)
    size = {"frames_per_batch": args.n * args.t, "total_frames": -1}
    collector = Collector(env, actor, auto_register_policy_transforms=False, **size)
    batches = iter(collector)
    clock.start()
    for _ in range(args.iterations):
        with clock.phase("rollout"):
            batch = next(batches)
        with clock.phase("advantage"), torch.no_grad():
            advantage(batch)
        with clock.phase("update"):
            update(batch)
        clock.lap()
    collector.shutdown()
    reward = float(batch["next", "reward"].mean())
    report("TorchRL", args, clock, reward=round(reward, 3))


if __name__ == "__main__":
    main()
