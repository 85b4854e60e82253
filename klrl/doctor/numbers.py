"""Compares numbers that this install computes with known values, for ``klrl doctor``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Categorical

from klrl.base.text import text_table
from klrl.config import EnvConfig, GaussianActorConfig, LegacyKLConfig, RetrieveKLConfig
from klrl.control.env.copies import make_copies
from klrl.control.policy.actor import make_agent
from klrl.control.run.kl import make_reference_kl
from klrl.kl.estimators import ESTIMATORS, exact_kl
from klrl.kl.reference import freeze
from klrl.losses.terms import reference_kl

#: Number of actions; standard deviations of logit differences theta - ref and old - theta.
_ACTIONS, _REF, _OLD = 50, 1.0, 0.3


@dataclass(frozen=True)
class KnownNumber:
    """A known number, and the number that this install computes."""

    section: str  # the title of its table
    name: str
    expected: float
    found: float
    tolerance: float = 1e-9  # largest allowed absolute difference of the two
    source: str = f"sums over {_ACTIONS} actions"  # where the known number comes from

    @property
    def ok(self) -> bool:
        """Whether the two numbers agree."""
        return abs(self.found - self.expected) <= self.tolerance


def table(lines: Sequence[KnownNumber]) -> str:
    """Format the numbers as text, one block for each section."""
    blocks = []
    for section in dict.fromkeys(line.section for line in lines):
        members = [line for line in lines if line.section == section]
        rows = [  # a number within its tolerance of 0 is a rounding error
            (x.name, f"expected {x.expected:>7.4g}",
             f"found {x.found if abs(x.found) > x.tolerance else 0:>7.4g}",
             f"+-{x.tolerance:<7.2g} {'ok' if x.ok else 'OFF'}")
            for x in members
        ]  # fmt: skip
        blocks.append(f"{section}   [{members[0].source}]\n{text_table(rows, indent=2)}")
    return "\n\n".join(blocks)


def examine() -> list[KnownNumber]:
    """Compute all numbers, in the order in which they are printed."""
    torch.set_num_threads(1)
    return [*_one_step(), *_parity()]


def _one_step() -> Iterator[KnownNumber]:
    """Yield relative errors of KL estimators, then of their gradients in reward and loss."""
    generator = torch.Generator().manual_seed(0)
    ref, away, step = torch.randn(3, _ACTIONS, dtype=torch.float64, generator=generator)
    theta = (ref + _REF * away).requires_grad_()
    log_p, log_q, log_old = (x.log_softmax(0) for x in (theta, ref, theta + _OLD * step))
    p, old, ratio = log_p.exp().detach(), log_old.exp().detach(), log_p - log_q
    true = (log_p.exp() * ratio).sum()

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value.sum(), theta, retain_graph=True)[0]

    def error(loss: Tensor) -> Tensor:
        return (gradient(loss) - gradient(true)).norm() / gradient(true).norm()

    def line(name: str, found: Tensor, expected: float = 0.0) -> KnownNumber:
        return KnownNumber(section, name, expected, found.item())

    estimates = {name: p * estimator(ratio) for name, estimator in ESTIMATORS.items()}
    section = "KL(pi||ref): relative error of the expectation"
    yield line("exact", exact_kl(*(Categorical(logits=x) for x in (theta, ref))) / true - 1)
    for name in ("k1", "k3"):
        yield line(name, estimates[name].sum() / true - 1)
    bias = (p * 0.5 * ratio**2).sum() / true - 1
    yield line("k2, which is biased", estimates["k2"].sum() / true - 1, bias.item())

    section = "Its gradient, actions of pi_theta"
    yield line("k1 in the reward", error(p * ESTIMATORS["k1"](ratio).detach() * log_p))
    yield line("k2 in the loss", error(estimates["k2"]))
    none = gradient(estimates["k1"]).norm() / gradient(true).norm()
    yield line("k1 in the loss, which has none", none)

    section = "Its gradient in the loss, actions of pi_old"
    for name in ESTIMATORS:
        loss = old * reference_kl(name, log_p, log_old.detach(), log_q)
        yield line(f"{name} with the ratio", error(loss))


def _parity() -> Iterator[KnownNumber]:
    """Yield the largest differences of ``kl=legacy`` and ``kl=retrieve`` on the same batch."""
    config = EnvConfig("Pendulum-v1", {}, 4, True, 1.0, name="gym")
    modes = (
        LegacyKLConfig(0.5, "rollout", name="legacy"),
        RetrieveKLConfig(0.5, "rollout", "k1", "reward", False, name="retrieve"),
    )
    for distribution in ("normal", "tanh_normal"):
        torch.manual_seed(0)
        env = make_copies(config, seed=0)
        actor = GaussianActorConfig([32], "tanh", False, init_std=1.0, name=distribution)
        agent = make_agent(actor, env, normalize=True, separate=False)
        reference = freeze(agent.actor)
        with torch.no_grad():
            for parameter in agent.actor.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        batch = env.rollout(200, agent.actor, break_when_any_done=False).detach()
        charged = []
        for mode in modes:
            kl = make_reference_kl(mode, agent.actor, reference)
            assert kl is not None
            assert kl.transform is not None
            charged.append(kl.transform(batch.clone())["next"])
        legacy, retrieve = charged
        size = float(legacy["kl_penalty"].abs().mean())
        section = f"legacy against retrieve, {distribution}, mean |KL| {size:.2f}: largest gap"
        for key in ("reward", "kl_penalty", "ref_log_prob"):
            gap = float((legacy[key] - retrieve[key]).abs().max())
            yield KnownNumber(section, key, 0.0, gap, 1e-5, "each other")
