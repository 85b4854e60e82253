"""Random causal LMs, prompts and rollouts for the language tests, and the truth about them.

The truth goes through plain transformers: one sequence at a time, no padding, no cache, no mask.
"""

from collections.abc import Iterator

import torch
from tensordict import TensorDict
from torch import Tensor

from klrl.language.data.batch import Responses, make_batch
from tests.transforms.llm_toys import FAMILIES, network

__all__ = ["FAMILIES", "network"]

EOS, PAD, GROUP = 2, 0, 3


def prompts(seed: int = 0, lengths: tuple[int, ...] = (3, 7, 5), pads: int = 0):
    """Left-padded prompts [N, P] with ``pads`` columns more than needed, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths) + pads
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(3, 200, (length,), generator=generator)
        mask[row, width - length :] = True
    return ids, mask


def rollout(
    seed: int = 0, group_size: int = GROUP, pads: int = 0, tail: int = 0, pad: int = PAD
) -> TensorDict:
    """A batch with random tokens: responses of 1 to 6 tokens, some truncated at 6.

    ``pads`` more columns on the left and ``tail`` more on the right change nothing but padding;
    ``pad`` is the id that fills it.
    """
    ids, mask = prompts(seed, pads=pads)
    ids = ids.masked_fill(~mask, pad)
    generator = torch.Generator().manual_seed(seed + 1)
    size, longest = len(ids) * group_size, 6
    lengths = torch.randint(1, longest + 2, (size,), generator=generator)
    lengths[:3] = torch.tensor([1, longest + 1, longest])
    truncated = lengths > longest
    lengths = lengths.clamp_max(longest)
    tokens = torch.randint(3, 200, (size, longest), generator=generator)
    tokens = torch.nn.functional.pad(tokens, (0, tail), value=pad)
    real = torch.arange(longest + tail) < lengths[:, None]
    ends = (torch.arange(longest + tail) == (lengths - 1)[:, None]) & ~truncated[:, None]
    tokens = tokens.masked_fill(ends, EOS).masked_fill(~real, pad)
    found = Responses(tokens, real, torch.zeros(tokens.shape), truncated)
    return make_batch(ids, mask, found, group_size)


def rows(batch: TensorDict) -> Iterator[tuple[Tensor, Tensor]]:
    """(prompt, response) of every row, without padding."""
    width = batch["tokens", "prompt"].shape[1]
    for row in batch.unbind(0):
        attention, assistant = (
            row["masks", "all_attention_mask"],
            row["masks", "all_assistant_mask"],
        )
        yield (
            row["tokens", "full"][:width][attention[:width]],
            row["tokens", "full"][assistant],
        )


def truth(model, batch: TensorDict, temperature: float = 1.0, grad: bool = False) -> list[Tensor]:
    """Log softmax(logits / T) over the vocabulary for each response token: B tables [n_i, V]."""
    tables = []
    for prompt, response in rows(batch):
        ids = torch.cat([prompt, response])
        with torch.set_grad_enabled(grad):
            logits = model(input_ids=ids[None], use_cache=False).logits[0].double()
        tables.append((logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1])
    return tables


def of_tokens(tables: list[Tensor], batch: TensorDict) -> Tensor:
    """The entries [B, R] of the response tokens, 0 at padding."""
    tokens = batch["tokens", "response"]
    rows = zip(tables, tokens, strict=True)
    chosen = [table.gather(-1, row[: len(table), None]).squeeze(-1) for table, row in rows]
    width = tokens.shape[1]
    return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in chosen])
