"""What must hold before a run is believed: checks with a number each, fatal where one fails."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from klrl.base.errors import ConfigError
from klrl.domains import Domain
from klrl.kl.estimators import masked_mean

#: Largest mean KL(pi_0 || pi_ref), nats, of two equal policies, by dtype.
SAME_POLICY = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Check:
    """One line of the preflight."""

    name: str
    value: float
    limit: float  # the largest value that is right
    detail: str = ""
    remedy: str = "report this"

    @property
    def ok(self) -> bool:
        """Whether the value is at most the limit; NaN is not."""
        return self.value <= self.limit

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "FAILED"
        detail = f"; {self.detail}" if self.detail else ""
        return f"{self.name}: {self.value:.3g} (at most {self.limit:g}) {verdict}{detail}"


def run_checks(checks: Iterable[Check | str]) -> list[str]:
    """Opening lines of a run, one for each check that passes; a string is a note, and passes."""
    lines = []
    for check in checks:
        if isinstance(check, Check) and not check.ok:
            raise ConfigError(f"preflight: {check}; {check.remedy}")
        lines.append(f"preflight: {check}")
    return lines


def kl_at_start(
    kl: Tensor, domain: Domain, dtype: torch.dtype, remedy: str, mask: Tensor | None = None
) -> Check:
    """KL(pi_0 || pi_ref), mean in nats: 0 where the reference is the policy as it starts.

    ``kl`` is exact or sampled, per frame or per token [B, R], of which ``mask`` says the real ones.
    """
    kl = kl.detach()
    value = abs(float(kl.mean() if mask is None else masked_mean(kl, mask)))
    name = f"KL(policy||reference) at the start, nats/{domain.unit}"
    return Check(name, value, SAME_POLICY[dtype], remedy=remedy)
