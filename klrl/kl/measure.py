"""KL(pi_theta || pi_ref) of a rollout by every estimator, whichever of them is charged."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from klrl.base.errors import NonFiniteError
from klrl.kl.estimators import ESTIMATORS, masked_mean, sequence_mean


@torch.no_grad()
def mean_kl(
    exact: Tensor, forward: Tensor, log_ratio: Tensor, mask: Tensor | None = None
) -> dict[str, Tensor]:
    """Mean KL(pi_theta || pi_ref) of a rollout by every estimator, in nats, by metric.

    And KL(pi_ref || pi_theta) in the same states, ``kl/ref/forward``. With a mask also
    ``kl/ref/exact_seq`` and so on: sums over a row, means over rows.

    Args:
        exact: the closed form of every step, [N, T] or [B, R].
        forward: that of KL(pi_ref || pi_theta), the same shape.
        log_ratio: log pi_theta - log pi_ref of what was done, the same shape.
        mask: bool, where steps are real; None: everywhere.

    Raises:
        NonFiniteError: one of them is NaN or infinite.
    """
    per_step = {"kl/ref/exact": exact, "kl/ref/forward": forward}
    per_step |= {f"kl/ref/{name}": each(log_ratio) for name, each in ESTIMATORS.items()}
    if mask is None:
        means = {name: value.mean() for name, value in per_step.items()}
    else:
        per_step = {name: value.double() for name, value in per_step.items()}
        means = {name: masked_mean(value, mask) for name, value in per_step.items()}
        means |= {f"{name}_seq": sequence_mean(value, mask) for name, value in per_step.items()}
    return _finite(means)


@torch.no_grad()
def mean_charged(
    charged: Tensor, mask: Tensor | None = None, error: Tensor | None = None
) -> dict[str, Tensor]:
    """Mean of the divergence that is charged, where it is not the reverse KL, in nats.

    Args:
        charged: of every step, [N, T] or [B, R].
        mask: bool, where steps are real; None: everywhere. With one also the sum over a row, mean
            over rows.
        error: its standard error at every step [N, T], where it was sampled. With one also that of
            the mean over steps, which are sampled independently.

    Raises:
        NonFiniteError: one of them is NaN or infinite.
    """
    if mask is None:
        means = {"div/ref/charged": charged.mean()}
    else:
        charged = charged.double()
        means = {"div/ref/charged": masked_mean(charged, mask)}
        means["div/ref/charged_seq"] = sequence_mean(charged, mask)
    if error is not None:
        means["div/ref/charged_error"] = error.norm() / error.numel()
    return _finite(means)


def _finite(means: dict[str, Tensor]) -> dict[str, Tensor]:
    for name, value in means.items():
        if not torch.isfinite(value):
            raise NonFiniteError(f"{name} is {float(value)}; raise kl.coef or lower optim.lr")
    return means


def in_unit(measured: Mapping[str, Tensor], unit: str | None) -> float:
    """What a controller is given, nats per ``unit``: the divergence that is charged.

    Per step or token (None: either) it is the mean over them; per sequence the sum over a row, mean
    over rows.
    """
    name = "div/ref/charged" if "div/ref/charged" in measured else "kl/ref/exact"
    return float(measured[f"{name}_seq" if unit == "sequence" else name])
