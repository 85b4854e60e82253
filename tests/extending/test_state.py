"""State of a part of one's own is in the checkpoint, or the manifest says that a resume is anew."""

from __future__ import annotations

from pathlib import Path

import pytest

import klrl
from klrl.report.diff import compare_bits
from tests.conftest import QUICK
from tests.control.test_resumption import PART, WHOLE, WORDS, interrupted
from tests.runs.commands import manifest_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

#: Each moves with every iteration, and would differ after a resume that begins anew with it.
PARTS = """
import numpy as np
import torch

from klrl.control.run.advantage import gae
from klrl.kl.controllers import FixedKLController
from klrl.losses.beta import BetaRule
from klrl.losses.policy import PolicyLoss


class Saves:
    def state_dict(self): return {"seen": self.seen}
    def load_state_dict(self, state): self.seen = state["seen"]


class Counting(FixedKLController):
    def __init__(self, coef):
        super().__init__(coef)
        self.seen = 0
    def move(self, kl, n):
        self.seen += 1
        self.coef = 0.1 * self.seen


class Half(Counting):
    # What is loaded is not what was saved.
    def state_dict(self): return {**super().state_dict(), "seen": self.seen}
    def load_state_dict(self, state): self.coef = state["coef"]


class Weighs(FixedKLController):
    def __init__(self, coef):
        super().__init__(coef)
        self.net, self.noise = torch.nn.Linear(2, 2), torch.Generator().manual_seed(0)
        self.draws, self.seen = np.random.default_rng(0), torch.tensor(0.0)
        self.half, self.rule = torch.ones(2, dtype=torch.bfloat16), lambda kl: kl
    def move(self, kl, n): self.coef *= 1.1


class Saved(Counting):
    def state_dict(self): return {**super().state_dict(), "seen": self.seen}


class Plain:
    def __init__(self, **given):
        self.given, self.seen = given, [0]
        self.estimate = gae(given["config"], given["critic"], given["reward_scale"])
    def __call__(self, batch):
        self.estimate(batch)
        batch["advantage"] *= self.factor()
    def factor(self): return 1.0


class Forgetful(Plain):
    def factor(self):
        self.seen[0] += 1
        return float(self.seen[0])


class Remembers(Saves, Forgetful): pass


class Rule(BetaRule):
    def __init__(self, beta, dtarg):
        super().__init__(beta, dtarg)
        self.seen = 0
    def update(self, kl):
        self.seen += 1
        return self.seen


class Steady(PolicyLoss):
    def __init__(self, **given):
        super().__init__(**given)
        self.seen = 0
    def gain(self, scored, advantage, beta):
        return (scored.log_prob - scored.old_log_prob).exp() * advantage


class Annealed(Steady):
    def gain(self, scored, advantage, beta):
        self.seen += 1
        return super().gain(scored, advantage, beta) / self.seen


class Saving(Saves, Annealed): pass
"""
CASES = [
    *(("controller", name, "exact") for name in ("Saved", "Weighs")),
    *(("controller", name, "anew") for name in ("Counting", "Half")),
    ("advantage", "Remembers", "exact"),
    ("advantage", "Forgetful", "anew"),
    ("loss.own_beta_rule", "Rule", "anew"),
    ("loss", "Steady", "exact"),
    *(("loss", name, "anew") for name in ("Annealed", "Saving")),
]


@pytest.mark.parametrize(("setting", "name", "resume"), CASES)
def test_the_manifest_says_whether_a_resume_is_exact_and_it_is(
    setting: str, name: str, resume: str, capsys
) -> None:
    Path("parts.py").write_text(PARTS)
    words = [f"{setting}.target=parts:{name}", f"{setting}=custom"]
    if setting == "advantage":
        words.append("env.normalize_reward=true")
    if setting == "loss.own_beta_rule":
        words = [words[0], "loss.beta_rule=custom"]
    if resume == "exact":
        klrl.run(*WORDS, *words, folder=WHOLE)
        interrupted(words)
        assert compare_bits(WHOLE, PART)[0]
    else:
        klrl.run(*QUICK, *words, folder=PART)
    assert manifest_of(PART)["resume"] == resume
    told = f"resume: a later resume will reset {setting}, whose state is not saved"
    assert (told in capsys.readouterr().out) == (resume == "anew")
