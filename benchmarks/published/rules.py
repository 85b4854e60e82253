"""Controllers of kl.coef and rules of beta, one step each, against their formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator

from klrl.config import KLPENConfig
from klrl.doctor.lines import Line
from klrl.kl.controllers import (
    AdaptiveKLController,
    DualKLController,
    FixedKLController,
    HeldKLController,
    ScheduledKLController,
)
from klrl.losses.beta import make_beta_rule


def controller_lines() -> Iterator[Line]:
    """coef after one update from 1, at a KL above the target."""
    section, n = "Controllers of kl.coef: 1 becomes", 1000
    cases = (
        ("fixed", FixedKLController(1.0), 0.5, 1.0, "coef"),
        ("schedule, linear to 0, a quarter over", ScheduledKLController(1.0, 0.0, 4000), 0.5, 0.75,
         "linear in frames"),
        ("schedule, cosine to 0, a quarter over", ScheduledKLController(1.0, 0.0, 4000, "cosine"),
         0.5, (1 + math.cos(math.pi / 4)) / 2, "half a cosine"),
        ("adaptive, KL = 1.1 target", AdaptiveKLController(1.0, 0.1, 5000), 0.11, 1.02,
         "Ziegler et al. 2019"),
        ("adaptive, KL = 0.5 target", AdaptiveKLController(1.0, 0.1, 5000), 0.05, 0.96,
         "Ziegler et al. 2019"),
        ("dual, KL = 2 target", DualKLController(1.0, 0.1, 0.5), 0.2, math.exp(0.5),
         "log coef += lr (KL/target - 1)"),
        ("held, KL = 2 target", HeldKLController(1.0, 0.1, 0.2), 0.2, 2**0.2,
         "ln coef += integral ln(KL/target)"),
    )  # fmt: skip
    for name, controller, kl, expected, _ in cases:
        yield Line(section, name, expected, controller.update(kl, n=n), 1e-9, "formulas")


def beta_lines() -> Iterator[Line]:
    """beta after one iteration from 1."""
    section, source = "Rules of loss.beta: 1 becomes", "Schulman et al. 2017; formulas"
    cases = (
        ("doubling, KL = dtarg / 1.6", "doubling", 0.01 / 1.6, 0.5),
        ("doubling, KL = 1.4 dtarg", "doubling", 0.014, 1.0),
        ("doubling, KL = 1.6 dtarg", "doubling", 0.016, 2.0),
        ("proportional, KL = 4 dtarg", "proportional", 0.04, 2.0),
        ("proportional, KL = dtarg / 10000", "proportional", 1e-6, 0.25),
        ("forward, KL = 1.6 dtarg", "forward", 0.016, 2.0),
    )
    for name, rule, kl, expected in cases:
        beta = make_beta_rule(_klpen(rule)).update(kl)
        yield Line(section, name, expected, beta, 1e-9, source)
    bounded = make_beta_rule(_klpen("doubling"))
    for _ in range(100):
        bounded.update(0.0)
    yield Line(section, "doubling, KL = 0 for 100 iterations", 1e-4, bounded.beta, 1e-12, source)


def _klpen(rule: str) -> KLPENConfig:
    return KLPENConfig(
        name="klpen",
        entropy_bonus=False,
        entropy_coeff=0.0,
        samples_mc_entropy=1,
        critic_coeff=1.0,
        loss_critic_type="l2",
        clip_value=None,
        normalize_advantage=False,
        separate_losses=False,
        reduction="mean",
        dtarg=0.01,
        beta=1.0,
        increment=2.0,
        decrement=0.5,
        beta_rule=rule,
        gain=0.5,
        line_search="none",
        max_alpha=2.0,
        beta_min=1e-4,
        beta_max=1e4,
        kl_old="exact",
        samples_mc_kl=1,
    )
