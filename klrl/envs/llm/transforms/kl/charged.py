"""Finds the charged tokens, and computes their KLs and rewards, row by row."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from klrl.envs.llm.transforms.kl.rows import Rows, is_ragged, lengths, to_rows
from klrl.envs.llm.transforms.kl.tokens import ATTENTION_KEY, mask_rows, response_mask
from klrl.envs.llm.transforms.kl.wrappers import mask_key
from klrl.kl.charge import shaped
from klrl.kl.estimators import Estimator, estimate_kl
from klrl.kl.policies import Key


def matching_rows(gen: Rows, ref: Rows, gen_key: Key, ref_key: Key) -> tuple[list, list]:
    """Convert two sets of log-probs to rows [T_i]; refuse sets of different shapes."""
    if is_ragged(gen) != is_ragged(ref):
        kinds = ["ragged" if is_ragged(value) else "dense" for value in (gen, ref)]
        raise ValueError(
            f"pad_output mismatch: {gen_key} is {kinds[0]}, {ref_key} is {kinds[1]}; "
            "score both models with the same pad_output"
        )
    gen_rows, ref_rows = to_rows(gen), to_rows(ref)
    for index, (a, b) in enumerate(zip(gen_rows, ref_rows, strict=True)):
        if a.shape != b.shape or a.ndim != 1:
            raise ValueError(
                f"sample {index}: {gen_key} has shape {tuple(a.shape)}, {ref_key} has shape "
                f"{tuple(b.shape)}; both must be [tokens]"
            )
    return gen_rows, ref_rows


def charged_tokens(
    tensordict: TensorDictBase, next_tensordict: TensorDictBase, rows: list[Tensor], keys: list[Key]
) -> list[Tensor] | None:
    """Return masks of the charged tokens, [T_i] bool; None without any mask or prompt.

    The first of these that the data have is used: the mask of ``RetrieveLogProb``; ("masks",
    "all_assistant_mask"); the attention mask, set to False in the prompt if there is a prompt.
    """
    written = [mask_rows(next_tensordict, mask_key(key), rows) for key in keys]
    masks = [mask for mask in written if mask is not None]
    for mask in masks[1:]:
        if not all(map(torch.equal, masks[0], mask)):
            raise ValueError(f"{keys[0]} and {keys[1]} were scored on different tokens")
    if masks:
        return masks[0]
    for source in (next_tensordict, tensordict):
        real = mask_rows(source, ATTENTION_KEY, rows)
        if real is not None:
            return response_mask(next_tensordict, tensordict, real) or real
    return response_mask(
        next_tensordict, tensordict, [torch.ones_like(row, dtype=torch.bool) for row in rows]
    )


def token_kl(
    gen: list[Tensor], ref: list[Tensor], masks: list[Tensor] | None, estimator: Estimator
) -> list[Tensor]:
    """Estimate the KL of every token, [T_i], nats; 0 outside the mask."""
    masks = masks or [torch.ones_like(row, dtype=torch.bool) for row in gen]
    rows = zip(gen, ref, masks, strict=True)
    return [estimate_kl(a, b, estimator, mask) for a, b, mask in rows]


def charged_rewards(
    reward: Rows | None,
    kl: list[Tensor],
    masks: list[Tensor] | None,
    coef: Tensor,
    padding_side: str,
) -> list[Tensor]:
    """Return reward - coef * KL of every token, [T_i, 1], from the KLs [T_i].

    A scalar score ([B], [B, 1] or [B, 1, 1]) goes to the last charged token of its sequence. A
    reward per token [B, T, 1] stays where it is; if it is dense and the log-probs are ragged,
    its padding on ``padding_side`` is removed. A missing reward counts as 0.
    """
    rows = [torch.zeros_like(row).unsqueeze(-1) for row in kl]
    if reward is not None:
        rows = _per_token(to_rows(reward), kl, masks, padding_side)
    return [shaped(r, row.unsqueeze(-1), coef) for r, row in zip(rows, kl, strict=True)]


def _per_token(
    rows: list[Tensor], kl: list[Tensor], masks: list[Tensor] | None, padding_side: str
) -> list[Tensor]:
    """Return the uncharged reward of every token, [T_i, 1]."""
    longest = max(lengths(kl))
    placed = []
    for index, (row, divergence) in enumerate(zip(rows, kl, strict=True)):
        if row.ndim == 2 and row.shape[-1] == 1 and row.shape[0] > 1 and row.shape[0] == longest:
            size = divergence.shape[0]
            row = row[longest - size :] if padding_side == "left" else row[:size]
        if row.shape == (*divergence.shape, 1):
            placed.append(row)
        elif row.numel() == 1:
            placed.append(_on_last(row, divergence, masks[index] if masks else None, index))
        else:
            raise ValueError(
                f"sample {index}: the reward has shape {tuple(row.shape)}, the KL "
                f"{tuple(divergence.shape)}; a reward is one score, or one per token with one more "
                "dimension than the KL"
            )
    return placed


def _on_last(score: Tensor, kl: Tensor, mask: Tensor | None, index: int) -> Tensor:
    if mask is None:
        raise ValueError(
            f"one score for {kl.shape[0]} tokens, but no mask of the response: give "
            "('masks', 'all_assistant_mask'), or ('masks', 'all_attention_mask') and "
            "('tokens', 'prompt')"
        )
    positions = mask.nonzero()
    if not positions.numel():
        raise ValueError(f"sample {index} has a score, but no response token to add it to")
    placed = torch.zeros((*kl.shape, 1), dtype=score.dtype, device=score.device)
    return placed.index_put((positions[-1].to(score.device),), score.reshape(1, 1))
