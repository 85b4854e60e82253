"""Finds and checks the context length of a causal LM."""

from __future__ import annotations


def check_length(network: object, tokens: int) -> None:
    """Check that a prompt and its response, together ``tokens`` long, fit into a model's context.

    Raises:
        ValueError: they do not fit.
    """
    name, limit = _limit(getattr(network, "config", None))
    if limit is not None and limit < tokens:
        raise ValueError(
            f"{tokens} tokens: more than the model's {name}={limit}; truncate the prompts, or "
            "lower max_new_tokens"
        )


def context_of(config: object) -> int | None:
    """Return the context length, in tokens, in a model's config; None without a limit.

    With longrope (Ding et al. 2024, arXiv:2402.13753) return the length before extension: if one
    sequence of a batch exceeds it, ``transformers`` changes the rotary embedding of all sequences,
    and a sequence's log-probs depend on the rest of the batch.
    """
    return _limit(config)[1]


def _limit(config: object) -> tuple[str, int | None]:
    """Return the name and the value of the config entry that limits a model's context."""
    name = "max_position_embeddings"
    limit = getattr(config, name, None)
    limits = {name: limit} if limit is not None and limit > 0 else {}  # -1 means no limit
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *rope.values()):  # parameters of all layers, or of each type of layer
        if isinstance(each, dict) and each.get("rope_type") == "longrope":
            name = "original_max_position_embeddings (beyond it longrope changes the embedding)"
            limits[name] = int(each["original_max_position_embeddings"])
    return min(limits.items(), key=lambda item: item[1], default=(name, None))
