"""Access to a causal LM of ``transformers``: its backbone, its head, position ids, mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from klrl.kl.reference import evaluating

#: Hidden states [..., D] -> logits [..., V].
Head: TypeAlias = Callable[[Tensor], Tensor]


def unwrapped(model: nn.Module) -> Any:
    """The causal LM itself; of a ``peft`` model the LM inside, adapters included."""
    base = getattr(model, "get_base_model", None)
    return base() if base is not None else model


def backbone(model: nn.Module) -> Any:
    """The network without its head; its output has ``last_hidden_state`` [B, T, D]."""
    return unwrapped(model).base_model


def head(model: nn.Module) -> Head:
    """The layer from hidden states to logits."""
    return unwrapped(model).get_output_embeddings()


#: Attribute of a model whose arithmetic has another dtype than its weights, see :mod:`.mixed`.
COMPUTES_IN = "klrl_computes_in"


def model_dtype(model: nn.Module) -> torch.dtype:
    """The dtype that it computes in: that of its parameters, unless it is mixed."""
    mixed: torch.dtype | None = getattr(unwrapped(model), COMPUTES_IN, None)
    return next(model.parameters()).dtype if mixed is None else mixed


def model_device(model: nn.Module) -> torch.device:
    """The device of the parameters."""
    return next(model.parameters()).device


def positions(mask: Tensor) -> Tensor:
    """Position ids [B, T] that count only real tokens, so that left padding shifts none."""
    return (mask.long().cumsum(-1) - 1).clamp_min(0)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, except where gradient checkpointing needs the training mode.

    ``transformers`` checkpoints in training mode only; such a model must hold no dropout
    (``klrl.language.checks`` compares sampled with recomputed log-probs and finds it).
    """
    if torch.is_grad_enabled() and getattr(unwrapped(model), "is_activation_checkpointing", False):
        yield
        return
    with evaluating(model):
        yield


def sharing_refused(model: nn.Module) -> str | None:
    """Why, by the model's config, the responses of a prompt cannot share one row; None if they can.

    Sharing needs attention that takes any mask, and keys that only position ids tell apart.
    """
    config = unwrapped(model).config
    attention = getattr(config, "_attn_implementation", None)
    if attention not in ("sdpa", "eager"):
        return f"attention '{attention}' takes no 4-D mask"
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "sliding_window", None):
        kinds = ["sliding_attention"]
    by_slot = sorted(set(kinds or ()) - {"full_attention"})
    return f"its layers tell keys apart by slot ({', '.join(by_slot)})" if by_slot else None


class ValueHead(nn.Module):
    """V(s_t) = w . h_t + b, from the hidden state h_t that predicts token t. w and b start at 0.

    Args:
        model: the causal LM whose hidden states it reads; gives width and device. The weights
            have its dtype, but float32 at least: they learn.
        detach: keep the critic's gradient out of the policy's network.
    """

    def __init__(self, model: nn.Module, detach: bool = False) -> None:
        super().__init__()
        self.detach = detach
        width = unwrapped(model).config.get_text_config().hidden_size
        dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        self.linear = nn.Linear(width, 1, device=model_device(model), dtype=dtype)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """[B, R, D] -> [B, R], in reward units; 0 at padding, and no gradient from it."""
        # 0 * NaN is NaN in the weights' gradient, and states are undefined at padding.
        states = states.masked_fill(~mask.unsqueeze(-1), 0.0)
        states = (states.detach() if self.detach else states).to(self.linear.weight.dtype)
        value = self.linear(states).squeeze(-1)
        return value.masked_fill(~mask, 0.0)
