"""The known faults of the installed TorchRL: 1 = there, 0 = gone.

Lines here fail nothing: they show which of klrl's workarounds are still needed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tensordict.nn import TensorDictModule as Mod
from torch import nn
from torchrl.modules import IndependentNormal, TanhNormal, ValueOperator
from torchrl.objectives import KLPENPPOLoss

from klrl.doctor.lines import Line


class Fault(Line):
    """A fault of TorchRL; one that is not as known was fixed."""

    @property
    def verdict(self) -> str:
        return "as known" if self.ok else "changed"


def upstream_lines() -> Iterator[Fault]:
    """One line per fault, checked by running the library."""
    section, source = "Known faults of this install's TorchRL: 1 = there", "found by running"
    for name, check in _FAULTS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            present = float(check())
        yield Fault(section, name, 1.0, present, 0.0, source)


def _no_control_transform() -> bool:
    import torchrl.envs.transforms as transforms

    return not hasattr(transforms, "KLRewardTransform")


def _klpen() -> tuple[KLPENPPOLoss, TensorDict]:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    scale = Mod(lambda loc: torch.ones_like(loc), ["loc"], ["scale"])
    actor = ProbabilisticTensorDictSequential(
        Mod(net, ["observation"], ["loc"]),
        scale,
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["action"], distribution_class=IndependentNormal, return_log_prob=True
        ),
    )
    critic = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
    batch = TensorDict({"observation": torch.randn(16, 3)}, [16])
    with torch.no_grad():
        actor(batch)
    batch["advantage"], batch["value_target"] = torch.randn(16, 1), torch.randn(16, 1)
    return KLPENPPOLoss(actor, critic, beta=1.0, functional=False), batch


def _beta_moves_in_evaluation() -> bool:
    loss, batch = _klpen()
    with torch.no_grad():
        loss.eval()(batch.copy())
    return float(loss.beta) != 1.0


def _gradient_uses_the_next_beta() -> bool:
    """The gradient at increment 2 equals that of beta = 2, not of beta = 1."""
    gradients = []
    for beta, increment in ((1.0, 2.0), (1.0, 1.0)):
        loss, batch = _klpen()
        loss.beta.fill_(beta)
        loss.increment, loss.decrement = increment, 1.0 / increment
        with torch.no_grad():
            loss.actor_network[0].module.bias += 1.0
        loss(batch.copy())["loss_objective"].backward()
        gradients.append(loss.actor_network[0].module.bias.grad.clone())
    return not torch.allclose(*gradients)


def _saturated_log_prob_clamps() -> bool:
    loc, scale = torch.tensor([9.0]), torch.tensor([1e-3])
    exact = -math.log(1e-3) - 0.5 * math.log(2 * math.pi) + 2 * math.log(math.cosh(9.0))
    log_prob = TanhNormal(loc, scale, event_dims=1).log_prob(loc.tanh())
    return abs(float(log_prob) - exact) > 0.1


def _adaptive_controller_moves_the_wrong_way() -> bool:
    from torchrl.data import AdaptiveKLController

    controller = AdaptiveKLController(init_kl_coef=1.0, target=0.1, horizon=10)
    controller.update([1.0])
    return float(controller.coef) < 1.0


_FAULTS: tuple[tuple[str, Callable[[], bool]], ...] = (
    ("the control KLRewardTransform is gone", _no_control_transform),
    ("KLPENPPOLoss moves beta in evaluation", _beta_moves_in_evaluation),
    ("KLPENPPOLoss's gradient has the next forward's beta", _gradient_uses_the_next_beta),
    ("TanhNormal.log_prob clamps saturated actions", _saturated_log_prob_clamps),
    ("AdaptiveKLController lowers coef above its target", _adaptive_controller_moves_the_wrong_way),
)
