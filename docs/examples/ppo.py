"""PPO with a penalised KL to a reference, in plain torch and float64: docs/one_page.md explains it.

``python docs/examples/ppo.py`` trains Pendulum-v1. Shapes: N environments, T steps, B frames in a
minibatch, D numbers in an observation s, A in an action a. Log-probs and KLs are in nats.
"""

import math
from copy import deepcopy
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
from torch import nn


@dataclass
class Settings:
    """The settings of ``klrl env=pendulum kl.coef=0.1``: kl_coef is klrl's kl.coef, and so on."""

    frames: int = 100_000
    env_id: str = "Pendulum-v1"
    env_num_envs: int = 8  # N
    env_reward_scale: float = 0.1
    collector_steps: int = 128  # T
    kl_coef: float = 0.1  # reward per nat of KL(policy||reference)
    advantage_gamma: float = 0.9
    advantage_lmbda: float = 0.95
    loss_beta: float = 1.0  # coefficient of KL(old||new) to start from
    loss_dtarg: float = 0.01  # its target, nats per frame
    loss_critic_coeff: float = 0.5
    learner_epochs: int = 20
    learner_minibatches: int = 16
    optim_lr: float = 1e-3
    optim_lr_floor: float = 1e-4
    optim_eps: float = 1e-5
    optim_max_grad_norm: float = 0.5


def mlp(inputs, outputs, gain):  # [..., D] -> [..., outputs]
    layers = [nn.Linear(*size) for size in ((inputs, 64), (64, 64), (64, outputs))]
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]).double()


class Policy(nn.Module):
    """pi(.|s) = N(mu(s), sigma^2); sigma is the same in every state."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.mu = mlp(inputs, outputs, gain=0.01)
        self.log_sigma = nn.Parameter(torch.zeros(outputs).double())

    def forward(self, s):  # [..., D] -> mu and sigma, [..., A]
        mu = self.mu(s)
        return mu, self.log_sigma.exp().expand_as(mu)


def log_prob(pi, a):  # (mu, sigma) and a, [..., A] -> [...]
    mu, sigma = pi
    return (-(((a - mu) / sigma) ** 2) / 2 - sigma.log() - math.log(2 * math.pi) / 2).sum(-1)


def kl(p, q):  # KL(p||q); p and q are (mu, sigma), [..., A] -> [...]
    (m_p, s_p), (m_q, s_q) = p, q
    return ((s_q / s_p).log() + (s_p**2 + (m_p - m_q) ** 2) / (2 * s_q**2) - 1 / 2).sum(-1)


def collect(envs, s, act, steps, reset):  # s: the last observation of each environment; changed
    played = []
    for t in range(steps):
        actions = act(t, torch.tensor(np.array(s)).double()).numpy()  # [N, A]
        for i, (env, a) in enumerate(zip(envs, actions, strict=True)):
            after, raw, terminated, truncated, _ = env.step(a)
            played.append((s[i], a, raw, after, terminated, terminated or truncated))
            s[i] = reset(i) if terminated or truncated else after
    columns = (torch.tensor(np.array(x)).double() for x in zip(*played, strict=True))
    return [x.unflatten(0, (steps, len(envs))).transpose(0, 1) for x in columns]  # [N, T, ...]


def gae(c, reward, v, v_after, terminated, done):  # all [N, T] -> [N, T]
    delta = reward + c.advantage_gamma * (1 - terminated) * v_after - v
    decay = c.advantage_gamma * c.advantage_lmbda * (1 - done)
    advantage, later = torch.zeros_like(delta), 0.0
    for t in reversed(range(delta.shape[1])):
        advantage[:, t] = later = delta[:, t] + decay[:, t] * later
    return advantage


@torch.no_grad()
def score(c, policy, value, reference, rollout):
    s, a, raw, after, *ends = rollout
    old, ref = policy(s), reference(s)
    k1 = log_prob(old, a) - log_prob(ref, a)  # [N, T], E[k1] = KL(pi_old||pi_ref)
    shaped = raw - c.kl_coef * k1
    v, v_after = value(s).squeeze(-1), value(after).squeeze(-1)
    advantage = gae(c, c.env_reward_scale * shaped, v, v_after, *ends)
    columns = (s, a, *old, log_prob(old, a), advantage, advantage + v)
    row = {"reward/shaped": shaped, "kl/ref/k1": k1, "kl/ref/exact": kl(old, ref)}
    return [x.flatten(0, 1) for x in columns], {name: float(x.mean()) for name, x in row.items()}


def update(c, policy, value, adam, frames, beta, shuffled):
    weights, measured = [*policy.parameters(), *value.parameters()], []
    for _ in range(c.learner_epochs):
        for rows in shuffled(len(frames[0])).chunk(c.learner_minibatches):
            s, a, *old, old_log_prob, advantage, target = (x[rows] for x in frames)  # [B, ...]
            new = policy(s)
            ratio = (log_prob(new, a) - old_log_prob).exp()  # w = pi_theta / pi_old
            normalized = (advantage - advantage.mean()) / advantage.std()
            gain = ratio * normalized - beta * kl(old, new)
            critic = c.loss_critic_coeff * (value(s).squeeze(-1) - target) ** 2
            adam.zero_grad()
            (critic - gain).mean().backward()
            norm = nn.utils.clip_grad_norm_(weights, c.optim_max_grad_norm)
            adam.step()
            measured.append([float(x.detach().mean()) for x in (-gain, critic, norm)])
    names = ("loss/objective", "loss/critic", "learner/grad_norm")
    return dict(zip(names, np.mean(measured, 0).tolist(), strict=True))


def iterate(c, policy, value, reference, adam, rollout, beta, progress, shuffled=torch.randperm):
    lr = adam.param_groups[0]["lr"] = c.optim_lr + (c.optim_lr_floor - c.optim_lr) * progress
    frames, row = score(c, policy, value, reference, rollout)
    row |= update(c, policy, value, adam, frames, beta, shuffled)
    with torch.no_grad():
        kl_old = float(kl(frames[2:4], policy(frames[0])).mean())
    row |= {"kl/old/exact": kl_old, "kl/old/beta": beta, "learner/lr": lr}
    factor = 2 if kl_old > 1.5 * c.loss_dtarg else 0.5 if kl_old < c.loss_dtarg / 1.5 else 1
    return row, min(max(beta * factor, 1e-4), 1e4)


def train(c, seed=0):
    torch.manual_seed(seed)
    envs = [gymnasium.wrappers.ClipAction(gymnasium.make(c.env_id)) for _ in range(c.env_num_envs)]
    s = [env.reset(seed=seed + i)[0] for i, env in enumerate(envs)]
    policy, value = Policy(len(s[0]), envs[0].action_space.shape[0]), mlp(len(s[0]), 1, gain=1.0)
    reference, beta = deepcopy(policy), c.loss_beta
    adam = torch.optim.Adam([*policy.parameters(), *value.parameters()], eps=c.optim_eps)
    act = torch.no_grad()(lambda t, s: torch.normal(*policy(s)))
    for frames in range(0, c.frames, c.env_num_envs * c.collector_steps):
        rollout = collect(envs, s, act, c.collector_steps, lambda i: envs[i].reset()[0])
        row, beta = iterate(c, policy, value, reference, adam, rollout, beta, frames / c.frames)
        print(frames, {name: round(number, 4) for name, number in row.items()})


if __name__ == "__main__":
    train(Settings())
