"""Reads the input tokens of TorchRL's LLM wrappers, and computes their log-probs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch
from tensordict import TensorDictBase, set_list_to_stack
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from klrl.base.context import check_length
from klrl.envs.llm.transforms.kl.rows import lengths, pad_rows, read_value, to_rows
from klrl.envs.llm.transforms.kl.tokens import (
    ATTENTION_KEY,
    Encoded,
    Tokenizer,
    encode_history,
    encode_text,
    encode_tokens,
    template_of,
)
from klrl.kl.policies import Key, as_key
from klrl.kl.reference import evaluating

if TYPE_CHECKING:
    from torchrl.data.llm import History

#: A ``torchrl.modules.llm`` wrapper. Its class is not imported, since the import takes seconds.
Wrapper: TypeAlias = TensorDictModuleBase


def full_key(key: Key, name: str) -> Key:
    """Return a key of token log-probs; warn unless it is a tuple that ends in "full"."""
    key = as_key(key)
    if not is_full(key):
        warnings.warn(f"{name}={key}: TorchRL expects a tuple that ends in 'full'", stacklevel=4)
    return key


def is_full(key: Key) -> bool:
    """Whether a key is a tuple that ends in "full"."""
    return isinstance(key, tuple) and key[-1] == "full"


def mask_key(key: Key) -> Key:
    """Return the key of the charged tokens' mask: ("log_probs", "full") -> "log_probs_mask".

    The mask cannot be inside "log_probs", since an environment's "log_probs" is a TensorClass with
    fixed fields.
    """
    parts = key if isinstance(key, tuple) else (key,)
    *above, last = parts[:-1] or parts
    return as_key((*above, f"{last}_mask"))


def check_wrapper(model: Wrapper, name: str, assistant_only: bool) -> None:
    """Refuse a wrapper that generates, returns no log-probs, or cannot mark assistant tokens."""
    if not getattr(model, "return_log_probs", True):
        raise ValueError(f"{name}.return_log_probs=False: wrap it with return_log_probs=True")
    if getattr(model, "generate", False):
        raise ValueError(f"{name}.generate=True: wrap it with generate=False, to score tokens")
    if assistant_only and model.input_mode != "history":
        raise ValueError(
            f"{name}.input_mode={model.input_mode!r}: assistant tokens are known only in "
            "input_mode='history'; set assistant_only=False"
        )


def temperature_of(model: Wrapper) -> float:
    """Return the temperature in the wrapper's ``generate_kwargs``, default 1."""
    temperature = (getattr(model, "generate_kwargs", None) or {}).get("temperature")
    return 1.0 if temperature is None else float(temperature)


def encode(
    model: Wrapper,
    tensordict: TensorDictBase,
    *,
    tokenizer: Tokenizer | None,
    template: Mapping[str, object],
    assistant_only: bool,
    history_key: Key | None = None,
) -> Encoded:
    """Read the tokens and masks of a wrapper's input [B], according to its input mode and keys.

    ``tokenizer`` and ``history_key`` replace those of the wrapper; ``template`` has arguments of
    ``apply_chat_template`` for history mode.
    """
    if tensordict.ndim != 1:
        raise RuntimeError(
            f"batch size {tuple(tensordict.batch_size)}: token log-probs need one dimension; "
            "pass tensordict.reshape(-1)"
        )
    tokenizer = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
    key = as_key(model.in_keys[0])
    if model.input_mode == "tokens":
        attention_key = getattr(model, "attention_mask_key", "attention_mask")
        return encode_tokens(tensordict, key, attention_key, tokenizer)
    if history_key is not None:
        key = as_key((history_key, "full"))
    full = _entry(tensordict, key)
    if full is None:
        raise KeyError(f"no {model.input_mode} at {key} to score")
    prompt = _entry(tensordict, (*key[:-1], "prompt")) if isinstance(key, tuple) else None
    if model.input_mode == "text":
        assert tokenizer is not None
        return encode_text(full, prompt, tokenizer, getattr(model, "tokenizer_kwargs", {}))
    rendering = {**template_of(model, tokenizer), **template}
    if "chat_template" in template or "chat_template_name" in template:
        rendering = dict(template)
    with set_list_to_stack(True):
        return encode_history(full, prompt, tokenizer, rendering, assistant_only)


def _entry(tensordict: TensorDictBase, key: Key) -> History | list[str] | None:
    parts = key if isinstance(key, tuple) else (key,)
    entry = tensordict
    for part in parts:
        entry = entry.get(part, None) if entry is not None else None
    if hasattr(entry, "apply_chat_template") or entry is None:
        return entry
    return entry.tolist() if hasattr(entry, "tolist") else entry


def score(
    model: Wrapper, tensordict: TensorDictBase, encoded: Encoded, temperature: float
) -> list[Tensor]:
    """Compute log-probs [T_i] of the encoded tokens, nats; 0 outside ``encoded.scored``."""
    network = getattr(model, "model", None)
    if isinstance(network, nn.Module):
        rows = token_log_probs(network, encoded.ids, encoded.attention, temperature)
    else:
        rows = _score_by_its_own_forward(model, tensordict, encoded, temperature)
    return [row.masked_fill(~kept, 0.0) for row, kept in zip(rows, encoded.scored, strict=True)]


def _score_by_its_own_forward(
    model: Wrapper, tensordict: TensorDictBase, encoded: Encoded, temperature: float
) -> list[Tensor]:
    """Score by the wrapper's own forward, which calls an engine (vLLM, SGLang)."""
    if temperature != 1.0:
        raise ValueError(
            f"temperature={temperature}: {type(model).__name__} scores only at 1; set temperature=1"
        )
    output = model(tensordict.copy())
    value = read_value(output, as_key((model.log_probs_key, "full")))
    if value is None:
        raise KeyError(f"{type(model).__name__} wrote no {(model.log_probs_key, 'full')}")
    rows = to_rows(value)
    mask = read_value(output, ATTENTION_KEY)
    if mask is not None and lengths(to_rows(mask)) == lengths(rows):
        rows = [row[kept.bool()] for row, kept in zip(rows, to_rows(mask), strict=True)]
    if lengths(rows) != [int(mask.sum()) for mask in encoded.attention]:
        raise ValueError(
            f"{type(model).__name__} scored {lengths(rows)} tokens, but its input has "
            f"{[int(mask.sum()) for mask in encoded.attention]}"
        )
    return [
        torch.zeros(mask.shape, dtype=row.dtype).masked_scatter(mask, row)
        for row, mask in zip(rows, encoded.attention, strict=True)
    ]


def arrange(
    rows: list[list[Tensor]], encoded: Encoded, pad_output: bool, side: str
) -> tuple[list[list[Tensor]], bool]:
    """Return per-token rows in the wrapper's output format, and whether they are ragged.

    With ``pad_output``, rows of dense ids are unchanged, and rows of ragged ids are padded on
    ``side``. Without ``pad_output``, padding is removed.
    """
    if not pad_output:
        return [
            [row[mask] for row, mask in zip(field, encoded.attention, strict=True)]
            for field in rows
        ], True
    return (rows if encoded.dense else [pad_rows(field, side) for field in rows]), False


# ---------------------------------------------------------------------------------- log-probs

# The code below replaces the forward of TorchRL 0.14.1's TransformersWrapper. That forward
# - passes the mask as a positional argument, so that GPT-2 takes it for the cache and fails;
# - pads on the left without position ids;
# - takes every token equal to the pad token for padding, so it drops EOS if pad == eos;
# - returns wrong numbers with pad_model_input=False;
# - ignores the temperature, and leaves dropout on in training mode.
# Here the mask shows the padding, and sequences are padded on the right. A causal network ignores
# later tokens, so the log-probs of a sequence depend only on its own tokens.
# tests/transforms/test_llm_upstream.py fails when TorchRL fixes these faults.


def token_log_probs(
    network: nn.Module, ids: list[Tensor], attention: list[Tensor], temperature: float = 1.0
) -> list[Tensor]:
    """Compute log softmax(logits / temperature) of every token given the tokens before it, nats.

    ``network`` is a causal LM of ``transformers``. ``ids`` are B rows [T_i]; ``attention`` is True
    at real tokens; padding may be on both sides. The returned rows [T_i] are float32 or wider, on
    the device of ``ids``. They are 0 at padding and at the first real token, which has no context.
    """
    real = [row[mask] for row, mask in zip(ids, attention, strict=True)]
    empty = [index for index, row in enumerate(real) if row.numel() == 0]
    if empty:
        raise ValueError(f"samples {empty} have no tokens to score")
    check_length(network, max(row.numel() for row in real))
    device = next(network.parameters()).device
    tokens = pad_sequence(real, batch_first=True, padding_value=0).to(device)
    mask = pad_sequence([torch.ones_like(row) for row in real], batch_first=True).to(device)
    with evaluating(network):
        output = network(input_ids=tokens, attention_mask=mask, use_cache=False)
    logits = output.logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    # Logits [B, V, T-1] and targets [B, T-1]: the logits at t - 1 predict token t.
    scored = -cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    return [_spread(*pair) for pair in zip(scored, attention, strict=True)]


def _spread(scored: Tensor, attention: Tensor) -> Tensor:
    """Return log-probs [T]: ``scored`` at the real tokens except the first, 0 elsewhere."""
    positions = attention.nonzero().squeeze(-1)[1:]
    scored = scored[: positions.numel()].to(attention.device)
    spread = torch.zeros(attention.shape, dtype=scored.dtype, device=scored.device)
    return spread.index_put((positions,), scored)
