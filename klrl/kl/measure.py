"""Measure KL(pi_theta || pi_ref) of a rollout by every estimator, charged or not."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from klrl.base.errors import NonFiniteError
from klrl.kl.estimators import ESTIMATORS, masked_mean, sequence_mean


@torch.no_grad()
def mean_kl(
    exact: Tensor | None,
    forward: Tensor | None,
    log_ratio: Tensor,
    mask: Tensor | None = None,
    weight: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return metric -> mean KL(pi_theta || pi_ref) of a rollout, for every estimator, in nats.

    ``kl/ref/forward`` is KL(pi_ref || pi_theta) in the same states. With a mask, each metric has a
    second value under its name + ``_seq``: the KL is summed over each row and averaged over rows.

    Args:
        exact: KL(pi_theta || pi_ref) in closed form at every step, [N, T] or [B, R]; None: not
            measured.
        forward: KL(pi_ref || pi_theta) in closed form, the same shape.
        log_ratio: log pi_theta - log pi_ref of the sampled actions, the same shape.
        mask: bool, True at real steps; None: all are real.
        weight: pi_theta / mu of the sampled actions, the same shape, if mu sampled them. It makes
            the mean of each estimator that of pi_theta's actions in the same states.

    Raises:
        NonFiniteError: a mean is NaN or infinite.
    """
    estimates = {name: each(log_ratio) for name, each in ESTIMATORS.items()}
    if weight is not None:
        estimates = {name: weight * value for name, value in estimates.items()}
    closed = {"kl/ref/exact": exact, "kl/ref/forward": forward}
    per_step = {name: value for name, value in closed.items() if value is not None}
    per_step |= {f"kl/ref/{name}": value for name, value in estimates.items()}
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
    """Return metrics of a charged divergence other than the reverse KL: its mean, in nats.

    Args:
        charged: the divergence at every step, [N, T] or [B, R].
        mask: bool, True at real steps; None: all are real. With a mask, a second metric has the
            sum over each row, averaged over rows.
        error: standard error of a sampled divergence at every step [N, T], whose draws are
            independent between steps. If given, the mean's standard error is a further metric.

    Raises:
        NonFiniteError: a metric is NaN or infinite.
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
            raise NonFiniteError(f"{not_finite(name, value)}; raise kl.coef or lower optim.lr")
    return means


def not_finite(name: str, value: Tensor | float) -> str:
    """Say that a divergence is NaN; or inf, and of ``.../exact``, ``eval/kl_ref`` etc. why."""
    first, second = ("policy", "reference")[:: -1 if "forward" in name else 1]
    told = bool(value == torch.inf and re.search("exact|kl_ref|forward", name))
    return f"{name} is {float(value)}" + f": the {second} forbids what the {first} allows" * told


def in_unit(measured: Mapping[str, Tensor], unit: str | None, *, exact: bool = True) -> float:
    """Return the mean of the charged divergence for a controller, in nats per ``unit``.

    For the unit sequence it is the sum over each row, averaged over rows; else the mean over steps.
    ``exact``: whether every rollout has the exact KL; else the controller always reads k3.
    """
    name = "kl/ref/exact" if exact else "kl/ref/k3"
    name = "div/ref/charged" if "div/ref/charged" in measured else name
    return float(measured[f"{name}_seq" if unit == "sequence" else name])
