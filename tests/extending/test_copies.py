"""klrl's own parts, brought from outside, give klrl's rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sort_digits_base import build
from tests.extending.page import SHORT
from tests.language.conftest import QUICK as LANGUAGE
from tests.language.conftest import QUICK_MODEL
from tests.runs.commands import exits, rows_of, timeless

#: Parts of klrl's, written again as a user would: their rows must be klrl's.
COPIES = """
import math
import torch
from torch import nn
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from klrl.control.run.advantage import learned_reward
from klrl.control.policy.networks import mlp, orthogonal
from klrl.kl.controllers import FixedKLController
from klrl.losses.beta import BetaRule
from klrl.losses.policy import PolicyLoss

def cartpole(): return CartPoleEnv()

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
        # float32 sums in another order, as of the advantages, may differ in the last digit; that of
        # a KL, a difference of log-probs of order 1, is 1e-7, however small the KL
        shared = own.keys() & klrl.keys()
        assert own.keys() >= {"kl/ref/exact", "kl/old/exact", "loss/objective"}
        expected = pytest.approx({k: klrl[k] for k in shared}, rel=1e-4, abs=1e-7)
        assert {k: own[k] for k in shared} == expected


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
