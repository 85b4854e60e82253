"""Log-probs and exact KLs of pi = softmax(z / T) from logits z, with gradients in closed form.

For each KL, autograd makes some twenty passes over tables [n, K]. With K = 49,152 tokens these
passes took half as long as all matrix products of the model. This module saves no table but the
logits for the backward pass. It processes a few rows at a time, so that intermediate results stay
in a CPU's cache. For one row, with u = z / T:

    log pi(a)               d / du = 1_a - pi
    KL(pi || q)             d / du = pi * (log pi - log q - KL(pi || q))
    KL(q || pi)             d / du = pi - q
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klrl.kl.divergences import Which, over_actions

#: The divergences that are implemented here.
CLOSED_FORM = ("reverse", "forward")
#: Entries of a table that are processed at a time. On a CPU 2 MB of float32, which fit its cache;
#: on other devices 64 MB, to bound the memory.
PIECE, PIECE_ELSEWHERE = 2**19, 2**24


class Other(NamedTuple):
    """A second distribution q = softmax(logits / temperature) over the same actions."""

    logits: Tensor  # [n, K], without gradient
    temperature: float
    names: Sequence[Which]  # reverse: compute KL(pi || q); forward: KL(q || pi)


def tempered_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Compute log softmax(logits / temperature), in float32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)


def log_probs_and_kls(
    logits: Tensor, actions: Tensor, others: Sequence[Other], temperature: float
) -> Tensor:
    """Compute log pi of the actions, and for each other distribution q their log q and the KLs.

    Args:
        logits: z [n, K]; -inf at a forbidden action.
        actions: [n].
        others: the distributions q; their names must be in :data:`CLOSED_FORM`.
        temperature: T.

    Returns:
        [1 + sum over q of (1 + len(names)), n], nats, float32 or wider. log q has no gradient, and
        the function has no second derivative.
    """
    for other in others:
        if any(name not in CLOSED_FORM for name in other.names):
            raise ValueError(f"names={other.names}: choose from {', '.join(CLOSED_FORM)}")
        if other.logits.requires_grad and torch.is_grad_enabled():
            raise ValueError("the logits of a q require a gradient: detach them")
    which = [(other.temperature, tuple(other.names)) for other in others]
    tables = [other.logits for other in others]
    rows: Tensor = _LogProbsAndKLs.apply(logits, actions, temperature, which, *tables)
    return rows


class _LogProbsAndKLs(torch.autograd.Function):
    """Arguments: z, actions, T, (temperature, names) of each q, and the logits of each q."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        actions: Tensor,
        temperature: float,
        which: Sequence[tuple[float, tuple[Which, ...]]],
        *tables: Tensor,
    ) -> Tensor:
        pieces, forbids = [], False
        for part in _pieces(logits):
            log_p, chosen = tempered_log_softmax(logits[part], temperature), actions[part, None]
            rows = [log_p.gather(-1, chosen).squeeze(-1)]
            for table, (q_temperature, names) in zip(tables, which, strict=True):
                log_q = tempered_log_softmax(table[part], q_temperature)
                rows.append(log_q.gather(-1, chosen).squeeze(-1).to(log_p.dtype))
                for name in names:
                    kl = _kl(name, log_p, log_q)
                    if not torch.isfinite(kl).all():  # pi or q forbids an action
                        kl, forbids = over_actions(name, log_p, log_q), True
                    rows.append(kl)
            pieces.append(torch.stack(rows))
        values = torch.cat(pieces, 1)
        ctx.temperature, ctx.which, ctx.forbids = temperature, which, forbids
        ctx.save_for_backward(logits, actions, values, *tables)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # In backward, grad mode is on only under create_graph=True. PyTorch's once_differentiable
        # does not suffice: if ``gradient`` requires no gradient, it raises no error.
        if torch.is_grad_enabled():
            raise RuntimeError("log-probs and KLs from logits have no second derivative")
        logits, actions, values, *tables = ctx.saved_tensors
        slope = torch.empty_like(logits)
        for part in _pieces(logits):
            log_p = tempered_log_softmax(logits[part], ctx.temperature)
            qs = [
                (tempered_log_softmax(table[part], q_temperature), names)
                for table, (q_temperature, names) in zip(tables, ctx.which, strict=True)
            ]
            of_part = _slope(
                log_p, actions[part], gradient[:, part], values[:, part], qs, ctx.forbids
            )
            if ctx.temperature != 1.0:
                of_part.div_(ctx.temperature)
            slope[part] = of_part
        return slope, None, None, None, *(None for _ in tables)


def _slope(
    log_p: Tensor,
    actions: Tensor,
    gradient: Tensor,
    values: Tensor,
    qs: Sequence[tuple[Tensor, Sequence[Which]]],
    forbids: bool,
) -> Tensor:
    """Compute sum_i gradient_i d values_i / du, [n, K], over the rows i of ``values``."""
    p, of_log_p = log_p.exp(), gradient[0]
    slope = p * -of_log_p[:, None]
    slope.scatter_add_(1, actions[:, None], of_log_p[:, None])
    row = 1
    for log_q, names in qs:
        for i, name in enumerate(names, row + 1):
            if name == "reverse":
                excess = (log_p - log_q).sub_(values[i, :, None])
                if forbids:  # a forbidden action adds 0, but 0 * inf is NaN
                    excess.nan_to_num_(0.0, 0.0, 0.0)
                slope.addcmul_(excess.mul_(gradient[i, :, None]), p)
            else:
                slope.addcmul_(p - log_q.exp(), gradient[i, :, None])
        row += 1 + len(names)
    return slope


def _kl(name: Which, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute KL(p || q) or KL(q || p), [n]; NaN or inf where p or q forbids an action."""
    first, second = (log_p, log_q) if name == "reverse" else (log_q, log_p)
    return (first - second).mul_(first.exp()).sum(-1)


def _pieces(table: Tensor) -> Iterator[slice]:
    """Return slices of rows, to be processed one at a time; for an empty table one empty slice."""
    count, width = table.shape
    size = max(1, (PIECE if table.device.type == "cpu" else PIECE_ELSEWHERE) // width)
    return (slice(start, min(start + size, count)) for start in range(0, max(1, count), size))
