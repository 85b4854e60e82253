"""The batch of a language rollout: a TensorDict [B], one row per response.

Each prompt has G responses, in adjacent rows. P and R are the lengths of prompts and responses with
padding. Masks depend on positions, not on token ids, so no EOS is lost if pad == eos. Log-probs are
in nats, at the sampling temperature; they are 0 outside the response.

| key | shape | what |
|---|---|---|
| ("tokens", "prompt") | [B, P] | left-padded |
| ("tokens", "response") | [B, R] | right-padded, EOS included |
| ("tokens", "full") | [B, P+R] | prompt, then response |
| ("masks", "all_attention_mask") | [B, P+R] | bool: real tokens |
| ("masks", "all_assistant_mask") | [B, P+R] | bool: tokens of the response, EOS included |
| ("log_probs", "full") | [B, P+R] | log pi_old |
| ("sampler", "log_probs") | [B, P+R] | log mu, if mu, the sampling policy, is not pi_old |
| ("next", "ref_log_probs", "full") | [B, P+R] | log pi_ref |
| ("next", "reward_raw") | [B, 1, 1] | the score of the whole response |
| ("next", "reward") | [B, R, 1] | score at the last token, else 0; minus any charged coef * KL |
| advantage | [B, R, 1] | advantage of each token |
| ("next", "done"), ("next", "truncated") | [B, 1] | done: always True; truncated: no EOS |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

ATTENTION = ("masks", "all_attention_mask")
ASSISTANT = ("masks", "all_assistant_mask")
LOG_PROBS = ("log_probs", "full")
SAMPLER_LOG_PROBS = ("sampler", "log_probs")
REF_LOG_PROBS = ("next", "ref_log_probs", "full")
SCORE = ("next", "reward_raw")
REWARD = ("next", "reward")


@dataclass(frozen=True)
class Responses:
    """G responses to each of N prompts: B = N x G rows; the rows of a prompt are adjacent.

    Attributes:
        tokens: [B, R] int64, right-padded, EOS included.
        mask: [B, R] bool, True at tokens, False at padding.
        log_probs: [B, R] log softmax(logits / temperature) of the tokens, nats, 0 at padding.
        truncated: [B] bool, True if there was no EOS within ``max_new_tokens``.
        states: [B, R, D] hidden states that predict the tokens, if the sampler stores them;
            undefined at padding.
    """

    tokens: Tensor
    mask: Tensor
    log_probs: Tensor
    truncated: Tensor
    states: Tensor | None = None


def make_batch(
    prompt: Tensor, prompt_mask: Tensor, responses: Responses, group_size: int
) -> TensorDict:
    """Make the batch of a rollout, without scores, from N left-padded prompts [N, P].

    ``prompt_mask`` [N, P] is nonzero at real tokens.
    """
    prompt = prompt.repeat_interleave(group_size, 0)
    prompt_mask = prompt_mask.bool().repeat_interleave(group_size, 0)
    size = prompt.shape[0]
    batch = TensorDict({}, batch_size=[size], device=prompt.device)
    batch["tokens", "prompt"] = prompt
    batch["tokens", "response"] = responses.tokens
    batch["tokens", "full"] = torch.cat([prompt, responses.tokens], 1)
    batch[ATTENTION] = torch.cat([prompt_mask, responses.mask], 1)
    batch[ASSISTANT] = torch.cat([torch.zeros_like(prompt_mask), responses.mask], 1)
    batch[LOG_PROBS] = pad_to_full(batch, responses.log_probs)
    batch["next", "done"] = torch.ones(size, 1, dtype=torch.bool, device=prompt.device)
    batch["next", "truncated"] = responses.truncated.unsqueeze(-1)
    return batch


def prompt_length(batch: TensorDictBase) -> int:
    """Return P, the padded length of the prompts."""
    return batch["tokens", "prompt"].shape[1]


def response_mask(batch: TensorDictBase) -> Tensor:
    """Return the mask [B, R] of real response tokens."""
    return batch[ASSISTANT][:, prompt_length(batch) :]


def response_part(batch: TensorDictBase, key: tuple[str, ...]) -> Tensor:
    """Return the response part [B, R] of an entry [B, P+R]."""
    return batch[key][:, prompt_length(batch) :]


def pad_to_full(batch: TensorDictBase, value: Tensor) -> Tensor:
    """Extend values at response tokens [B, R] to [B, P+R], with 0 at prompt tokens."""
    return torch.nn.functional.pad(value, (prompt_length(batch), 0))


def set_scores(batch: TensorDictBase, scores: Tensor) -> None:
    """Write one score per response [B] to ("next", "reward_raw") [B, 1, 1]."""
    batch[SCORE] = scores.reshape(-1, 1, 1)


def take_prompts(batch: TensorDictBase, prompts: Tensor, group_size: int) -> TensorDictBase:
    """Return a copy of all rows of the prompts with these indices [n], [n x G]."""
    rows = prompts[:, None] * group_size + torch.arange(group_size, device=prompts.device)
    return batch[rows.reshape(-1)]


def shortened(batch: TensorDictBase) -> TensorDictBase:
    """Cut off the padding after the longest response of a batch [B], in place."""
    mask, width = response_mask(batch), batch["tokens", "response"].shape[1]
    cut, widths = width - int(mask.sum(1).max()), (width, width + prompt_length(batch))
    for key, value in batch.items(include_nested=True, leaves_only=True) if cut else ():
        if value.ndim > 1 and value.shape[1] in widths and key != ("tokens", "prompt"):
            batch[key] = value[:, : value.shape[1] - cut]
    return batch
