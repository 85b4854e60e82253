"""Numeric checks before training; a failed check raises a ConfigError."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from klrl.base.errors import ConfigError
from klrl.domains import Domain
from klrl.kl.estimators import masked_mean

#: dtype -> the largest mean KL, nats, that rounding may give for equal policies.
SAME_POLICY = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Check:
    """A number that must not exceed a limit when training starts."""

    name: str
    value: float
    limit: float  # the largest value that passes
    detail: str = ""
    remedy: str = "report this"

    @property
    def ok(self) -> bool:
        """Whether the value is at most the limit; false for NaN."""
        return self.value <= self.limit

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "FAILED"
        detail = f"; {self.detail}" if self.detail else ""
        return f"{self.name}: {self.value:.3g} (at most {self.limit:g}) {verdict}{detail}"


def run_checks(checks: Iterable[Check | str]) -> list[str]:
    """Return a line for each check or note (str); raise a ConfigError if a check failed."""
    lines = []
    for check in checks:
        if isinstance(check, Check) and not check.ok:
            raise ConfigError(f"preflight: {check}; {check.remedy}")
        lines.append(f"preflight: {check}")
    return lines


def kl_at_start(
    kl: Tensor, domain: Domain, dtype: torch.dtype, remedy: str | None, mask: Tensor | None = None
) -> Check | str:
    """Make the check that mean KL(pi_0 || pi_ref) is 0 for an initial policy pi_0 = pi_ref.

    With ``remedy`` None they may differ: return a line; a check that fails if the KL is infinite.
    ``kl`` is exact or sampled, per frame or per token [B, R]; ``mask`` marks the real tokens.
    """
    kl = kl.detach()
    value = abs(float(kl.mean() if mask is None else masked_mean(kl, mask)))
    name = f"KL(policy||reference) at the start, nats/{domain.unit}"
    forbids = "the reference forbids what the policy allows; choose another reference"
    check = Check(name, value, SAME_POLICY[dtype], remedy=forbids if remedy is None else remedy)
    if remedy is not None or value == torch.inf:
        return check
    away = "" if check.ok else "; the reference is not where the policy starts"
    return f"{name}: {value:.3g}{away}"
