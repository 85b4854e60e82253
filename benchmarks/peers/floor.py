"""The floor: PPO by hand, with nothing that the work does not need.

The policy acts in numpy; values and log-probs come in one batch per rollout; one compiled graph is
the whole update of a minibatch: gradient of the loss, clipping and Adam on one flat buffer of
parameters. No normalisation, no KL, no record.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from benchmarks.peers.common import ENV_IDS, Clock, make_parser, report

HIDDEN = 64
CLIP, MAX_NORM, VALUE_WEIGHT = 0.2, 0.5, 0.5
DECAY_1, DECAY_2, EPS = 0.9, 0.999, 1e-5


@dataclass(frozen=True)
class Sizes:
    """Where the parameters of actor, critic and log_std lie in the flat buffer."""

    observation: int
    action: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for last in (self.action, 1):
            for wide, narrow in ((self.observation, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, last)):
                found += [(wide, narrow), (narrow,)]
        return [*found, (self.action,)]

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views: six of the actor, six of the critic, log_std."""
        parts = flat.split([math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def make_parameters(sizes: Sizes) -> Tensor:
    """Orthogonal: gain sqrt(2), 0.01 for the policy's last layer, 1 for the value's."""
    flat = torch.zeros(sum(math.prod(shape) for shape in sizes.shapes))
    gains = [math.sqrt(2), math.sqrt(2), 0.01, math.sqrt(2), math.sqrt(2), 1.0]
    weights = [view for view in sizes.split(flat) if view.ndim == 2]
    for weight, gain in zip(weights, gains, strict=True):
        torch.nn.init.orthogonal_(weight, gain)
    return flat


def mlp(x: Tensor, layers: list[Tensor]) -> Tensor:
    w1, b1, w2, b2, w3, b3 = layers
    x = torch.tanh(torch.addmm(b1, x, w1))
    x = torch.tanh(torch.addmm(b2, x, w2))
    return torch.addmm(b3, x, w3)


def layer(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    """tanh(x w + b), in place of the product."""
    x = x @ w
    x += b
    return np.tanh(x, out=x)


def gaussian_log_prob(z: Any, log_std: Any) -> Any:
    """Of a diagonal Gaussian at mean + z exp(log_std), nats, [...]; numpy or torch."""
    return -0.5 * (z * z).sum(-1) - log_std.sum() - 0.5 * math.log(2 * math.pi) * z.shape[-1]


Minibatch = tuple[Tensor, ...]  # observation, action, log_prob, advantage, value target


def make_step(sizes: Sizes, lr: float) -> Callable[[Minibatch], None]:
    """One compiled update of a minibatch; what it updates hangs on it as ``parameters``."""
    flat = make_parameters(sizes)
    first, second, count = torch.zeros_like(flat), torch.zeros_like(flat), torch.zeros(())

    def loss(flat: Tensor, observation: Tensor, action: Tensor, old: Tensor, advantage: Tensor,
             target: Tensor) -> Tensor:  # fmt: skip
        *layers, log_std = sizes.split(flat)
        z = (action - mlp(observation, layers[:6])) * torch.exp(-log_std)
        ratio = torch.exp(gaussian_log_prob(z, log_std) - old)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        value = mlp(observation, layers[6:]).squeeze(-1)
        return VALUE_WEIGHT * ((value - target) ** 2).mean() - gain.mean()

    def adam(
        flat: Tensor, first: Tensor, second: Tensor, count: Tensor, *minibatch: Tensor
    ) -> None:
        gradient = torch.func.grad(loss)(flat, *minibatch)
        gradient = gradient * torch.clamp(MAX_NORM / (gradient.norm() + 1e-6), max=1.0)
        count.add_(1)
        first.mul_(DECAY_1).add_(gradient, alpha=1 - DECAY_1)
        second.mul_(DECAY_2).addcmul_(gradient, gradient, value=1 - DECAY_2)
        step = first / (1 - DECAY_1**count)
        flat.sub_(lr * step / ((second / (1 - DECAY_2**count)).sqrt() + EPS))

    compiled = torch.compile(adam, fullgraph=True, dynamic=False)

    def update(minibatch: Minibatch) -> None:
        compiled(flat, first, second, count, *minibatch)

    update.parameters = flat
    return update


class Rollouts:
    """T steps of N copies into arrays [T, N, ...]; done copies are reset through a mask."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.env = gym.make_vec(
            ENV_IDS[args.env],
            num_envs=args.n,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED, "copy": False},
        )
        self.t, self.n = args.t, args.n
        self.high = self.env.single_action_space.high
        self.sizes = Sizes(
            self.env.single_observation_space.shape[0], self.env.single_action_space.shape[0]
        )
        self.random = np.random.default_rng(args.seed)
        self.observation = self.env.reset(seed=args.seed)[0].astype(np.float32)

    def collect(self, parameters: Tensor) -> dict[str, np.ndarray]:
        t, n, f32 = self.t, self.n, np.float32
        *layers, log_std = (view.numpy() for view in self.sizes.split(parameters))
        w1, b1, w2, b2, w3, b3 = layers[:6]
        z = self.random.standard_normal((t, n, self.sizes.action), dtype=f32)
        noise = z * np.exp(log_std)
        seen = np.empty((t, n, self.sizes.observation), f32)
        after, actions, rewards = np.empty_like(seen), np.empty_like(noise), np.empty((t, n), f32)
        terminated, done = np.zeros((t, n), bool), np.zeros((t, n), bool)
        observation = self.observation
        for i in range(t):
            seen[i] = observation
            hidden = layer(layer(observation, w1, b1), w2, b2)
            np.add(hidden @ w3 + b3, noise[i], out=actions[i])
            observation, reward, ended, cut, _ = self.env.step(
                actions[i].clip(-self.high, self.high)
            )
            after[i], rewards[i], terminated[i] = observation, reward, ended
            over = ended | cut
            if over.any():
                done[i] = over
                observation, _ = self.env.reset(options={"reset_mask": over})
            observation = observation.astype(f32)
        self.observation = observation
        return {
            "observation": seen,
            "after": after,
            "action": actions,
            "log_prob": gaussian_log_prob(z, log_std),
            "reward": rewards,
            "terminated": terminated,
            "done": done,
        }


def make_frames(
    batch: dict[str, np.ndarray], parameters: Tensor, sizes: Sizes, gamma: float, lmbda: float
) -> Minibatch:
    """Values and GAE of a rollout, flattened to [T N, ...]."""
    *layers, _ = sizes.split(parameters)
    observation, action, old, after = (
        torch.from_numpy(batch[key]).flatten(0, 1)
        for key in ("observation", "action", "log_prob", "after")
    )
    t, n = batch["reward"].shape
    value = mlp(observation, layers[6:]).view(t, n).numpy()
    # The next step's value is at hand, but where an episode or the rollout ends.
    ends = batch["done"].copy()
    ends[-1] = True
    value_after = np.empty_like(value)
    value_after[:-1] = value[1:]
    value_after[ends] = mlp(after[torch.from_numpy(ends).flatten()], layers[6:]).squeeze(-1).numpy()
    delta = batch["reward"] + np.float32(gamma) * value_after * ~batch["terminated"] - value
    keep = np.float32(gamma * lmbda) * ~batch["done"]
    advantage, running = np.empty_like(value), np.zeros(n, np.float32)
    for i in reversed(range(t)):
        running = delta[i] + keep[i] * running
        advantage[i] = running
    target = torch.from_numpy(advantage + value).flatten()
    return observation, action, old, torch.from_numpy(advantage).flatten(), target


def minibatches(frames: Minibatch, args: argparse.Namespace) -> Iterator[Minibatch]:
    count = len(frames[0])
    for _ in range(args.epochs):
        order = torch.randperm(count)
        shuffled = [part[order].split(count // args.minibatches) for part in frames]
        yield from zip(*shuffled, strict=True)


@torch.no_grad()
def train(args: argparse.Namespace, clock: Clock) -> None:
    torch.manual_seed(args.seed)
    rollouts = Rollouts(args)
    step = make_step(rollouts.sizes, args.lr)
    rollouts.env.step = clock.timed("env", rollouts.env.step)
    collect = clock.timed("rollout", rollouts.collect)
    clock.start()
    for _ in range(args.iterations):
        batch = collect(step.parameters)
        with clock.phase("advantage"):
            frames = make_frames(batch, step.parameters, rollouts.sizes, args.gamma, args.lmbda)
        with clock.phase("update"):
            for minibatch in minibatches(frames, args):
                step(minibatch)
        clock.lap()


def main() -> None:
    clock = Clock()
    torch.set_num_threads(1)
    args = make_parser(__doc__).parse_args()
    train(args, clock)
    report("floor", args, clock, compiled=True)


if __name__ == "__main__":
    main()
