"""The longest sequence that a causal LM takes."""

from __future__ import annotations


def check_length(network: object, tokens: int) -> None:
    """Refuse what the positions of a model cannot hold.

    Raises:
        ValueError: prompt and response are longer than the context.
    """
    name, limit = _limit(getattr(network, "config", None))
    if limit is not None and limit < tokens:
        raise ValueError(
            f"{tokens} tokens: more than the model's {name}={limit}; truncate the prompts, or "
            "lower max_new_tokens"
        )


def context_of(config: object) -> int | None:
    """Most tokens of a sequence that a model of this config takes; None if it has no limit.

    With longrope (Ding et al. 2024, arXiv:2402.13753) these are the positions before extension:
    ``transformers`` turns all positions of a batch in another way as soon as one of its rows is
    longer, so that a sequence's log-probs would depend on the other rows.
    """
    return _limit(config)[1]


def _limit(config: object) -> tuple[str, int | None]:
    """The setting of a model's config that limits its context, and its value."""
    name = "max_position_embeddings"
    limit = getattr(config, name, None)
    limits = {name: limit} if limit is not None and limit > 0 else {}  # -1: none
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *rope.values()):  # one for all layers, or one for each of their kinds
        if isinstance(each, dict) and each.get("rope_type") == "longrope":
            name = "original_max_position_embeddings (its longrope changes beyond)"
            limits[name] = int(each["original_max_position_embeddings"])
    return min(limits.items(), key=lambda item: item[1], default=(name, None))
