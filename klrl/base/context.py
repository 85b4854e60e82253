"""Finds and checks the context length of a causal LM."""

from __future__ import annotations


def check_length(network: object, tokens: int) -> None:
    """Refuse sequences that are longer than a model's context.

    Raises:
        ValueError: ``tokens``, of prompt and response, exceed the context.
    """
    name, limit = _limit(getattr(network, "config", None))
    if limit is not None and limit < tokens:
        raise ValueError(
            f"{tokens} tokens: more than the model's {name}={limit}; truncate the prompts, or "
            "lower max_new_tokens"
        )


def context_of(config: object) -> int | None:
    """The context length, in tokens, of a model with this config; None if it has no limit.

    With longrope (Ding et al. 2024, arXiv:2402.13753) it is the length before extension: as soon as
    one row of a batch is longer, ``transformers`` changes the rotation of all rows, so that a
    sequence's log-probs would depend on the other rows.
    """
    return _limit(config)[1]


def _limit(config: object) -> tuple[str, int | None]:
    """The setting of a model's config that limits its context, and its value."""
    name = "max_position_embeddings"
    limit = getattr(config, name, None)
    limits = {name: limit} if limit is not None and limit > 0 else {}  # -1: no limit
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *rope.values()):  # one for all layers, or one per layer type
        if isinstance(each, dict) and each.get("rope_type") == "longrope":
            name = "original_max_position_embeddings (its longrope changes beyond)"
            limits[name] = int(each["original_max_position_embeddings"])
    return min(limits.items(), key=lambda item: item[1], default=(name, None))
