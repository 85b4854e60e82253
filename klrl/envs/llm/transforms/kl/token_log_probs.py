"""Log-probs of given tokens under a causal language model.

The one place where klrl works around TorchRL 0.14.1's ``TransformersWrapper``. Its forward
passes the attention mask by position (where GPT-2 takes its cache: an error), pads on the left
without position ids, finds padding by value (where pad == eos it drops EOS), returns wrong numbers
with ``pad_model_input=False``, ignores the temperature, and leaves dropout on in training mode.
Here every sequence is stripped of its padding by position and padded on the right, where a causal
network cannot see it, so the numbers of a sequence depend only on its own tokens.
tests/transforms/test_llm_upstream.py shows when the faults are gone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from klrl.base.context import check_length
from klrl.kl.reference import evaluating


def token_log_probs(
    network: nn.Module, ids: list[Tensor], attention: list[Tensor], temperature: float = 1.0
) -> list[Tensor]:
    """Log softmax(logits / temperature) of every token given those before it, nats.

    ``ids`` are B rows [T_i], ``attention`` is True at real tokens; padding may be on both sides.
    The rows [T_i] that return are at least float32, on the device of ``ids``, zero at padding and
    at the first real token, which has no context. ``network`` is a causal LM of ``transformers``.
    """
    real = [row[mask] for row, mask in zip(ids, attention, strict=True)]
    empty = [index for index, row in enumerate(real) if row.numel() == 0]
    if empty:
        raise ValueError(f"samples {empty} hold no token: there is nothing to score")
    check_length(network, max(row.numel() for row in real))
    device = next(network.parameters()).device
    tokens = pad_sequence(real, batch_first=True, padding_value=0).to(device)
    mask = pad_sequence([torch.ones_like(row) for row in real], batch_first=True).to(device)
    with evaluating(network):
        output = network(input_ids=tokens, attention_mask=mask, use_cache=False)
    logits = output.logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    # [B, V, T-1] against [B, T-1]: logits t - 1 predict token t.
    scored = -cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    return [_spread(*pair) for pair in zip(scored, attention, strict=True)]


def _spread(scored: Tensor, attention: Tensor) -> Tensor:
    """Place the log-probs of real tokens, from the second on, at their positions; else zeros."""
    positions = attention.nonzero().squeeze(-1)[1:]
    scored = scored[: positions.numel()].to(attention.device)
    spread = torch.zeros(attention.shape, dtype=scored.dtype, device=scored.device)
    return spread.index_put((positions,), scored)
