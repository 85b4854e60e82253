"""How a causal LM of ``transformers`` is called here: its backbone, its head, positions, mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from klrl.transforms.token_log_probs import evaluating

#: Hidden states [..., D] -> logits [..., V].
Head: TypeAlias = Callable[[Tensor], Tensor]


def plain(model: nn.Module) -> Any:
    """The causal LM itself; a ``peft`` model's with its adapters in it."""
    base = getattr(model, "get_base_model", None)
    return base() if base is not None else model


def backbone(model: nn.Module) -> Any:
    """The network without its head: -> ``last_hidden_state`` [B, T, D]."""
    return plain(model).base_model


def head(model: nn.Module) -> Head:
    """The layer from hidden states to logits."""
    return plain(model).get_output_embeddings()


def model_dtype(model: nn.Module) -> torch.dtype:
    """Of the parameters."""
    return next(model.parameters()).dtype


def model_device(model: nn.Module) -> torch.device:
    """Of the parameters."""
    return next(model.parameters()).device


def positions(mask: Tensor) -> Tensor:
    """Position ids [B, T] that count real tokens: left padding moves no token."""
    return (mask.long().cumsum(-1) - 1).clamp_min(0)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, except where gradient checkpointing needs the training mode.

    ``transformers`` checkpoints in training mode only; such a model must hold no dropout
    (``klrl.language.checks`` compares sampled with recomputed log-probs and finds it).
    """
    if torch.is_grad_enabled() and getattr(plain(model), "is_activation_checkpointing", False):
        yield
        return
    with evaluating(model):
        yield


def sharing_refused(model: nn.Module) -> str | None:
    """Why the responses of a prompt cannot share one row, by the model's settings; else None.

    Sharing needs attention that takes any mask, and keys that are told apart by position ids alone.
    """
    config = plain(model).config
    attention = getattr(config, "_attn_implementation", None)
    if attention not in ("sdpa", "eager"):
        return f"attention '{attention}' takes no 4-D mask"
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "sliding_window", None):
        kinds = ["sliding_attention"]
    other = sorted(set(kinds or ()) - {"full_attention"})
    return f"its layers tell keys apart by slot ({', '.join(other)})" if other else None
