"""What must hold before a language run is believed: each check is one line with a number.

Nothing here prints or raises on a failed check; the caller decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from klrl.kl.estimators import masked_mean
from klrl.language.batch import response_mask
from klrl.language.sampler import SpecialTokens
from klrl.language.scoring import AGREEMENT
from klrl.transforms.tokens import MARKS_ASSISTANT

#: Largest KL(pi_0 || pi_ref) in nats per token of two equal policies, by dtype.
SAME_POLICY = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Check:
    """One line of the preflight.

    Attributes:
        name: what was checked.
        value: what was found.
        threshold: the largest value that is right.
        detail: a word on it, or empty.
    """

    name: str
    value: float
    threshold: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the value is at most the threshold; NaN is not."""
        return self.value <= self.threshold

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "FAILED"
        detail = f"; {self.detail}" if self.detail else ""
        return f"{self.name}: {self.value:.3g} (at most {self.threshold:g}) {verdict}{detail}"


def kl_at_start(kl: Tensor, mask: Tensor, dtype: torch.dtype) -> Check:
    """KL(pi_0 || pi_ref), mean per token: 0 where the reference is the policy as it starts.

    Args:
        kl: exact or sampled, per token [B, R] nats.
        mask: [B, R].
        dtype: of the model.
    """
    value = abs(float(masked_mean(kl.detach(), mask)))
    return Check("KL(policy||reference) at the start, nats/token", value, SAME_POLICY[dtype])


def sampled_against_recomputed(
    sampled: Tensor, recomputed: Tensor, mask: Tensor, dtype: torch.dtype
) -> Check:
    """Largest |log pi while sampling - log pi by scoring|, both [B, R] nats at padding whatever.

    A temperature, a top-p, a forgotten first token or dropout on one side alone shows here.
    """
    off = (sampled - recomputed).detach().masked_fill(~mask, 0.0).abs().max()
    return Check("sampled - recomputed log-probs, nats", float(off), AGREEMENT[dtype])


def endings(batch: TensorDictBase, special: SpecialTokens) -> Check:
    """Responses whose EOS is lost or whose truncation is wrong; the risk where pad == eos.

    A response that is not truncated ends with an EOS inside its mask; a truncated one holds none;
    none holds an EOS before its end.
    """
    tokens, mask = batch["tokens", "response"], response_mask(batch)
    eos = torch.tensor(special.eos, device=tokens.device)
    ends = torch.isin(tokens, eos) & mask
    last = mask.sum(1, keepdim=True) - 1
    ended = ends.gather(1, last).squeeze(1)
    wrong = (ended == batch["next", "truncated"].squeeze(-1)) | (ends.sum(1) > ended.long())
    detail = "pad == eos: masks go by position" if special.pad in special.eos else ""
    return Check("responses that lost their EOS", float(wrong.sum()), 0.0, detail)


def same_temperature(sampling: float, **scoring: float) -> Check:
    """Sampling and every scoring use one temperature.

    Args:
        sampling: of the sampler.
        scoring: of each that scores, by name: ``policy=1.0, reference=1.0``.
    """
    off = {name: abs(value - sampling) for name, value in scoring.items()}
    worst = max(off, key=lambda name: off[name])
    detail = f"sampling at {sampling:g}, " + ", ".join(f"{k} at {v:g}" for k, v in scoring.items())
    return Check("temperature of scoring - of sampling", off[worst], 0.0, detail)


def template_marks(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], answer: str, eos: str | None = None
) -> Check:
    """Positions where the template's assistant mask and the mask by position disagree.

    By position, the prompt is the template's with its generation prompt, and the response is the
    answer's own tokens and the EOS. A template without ``{% generation %}`` marks nothing: then
    positions alone are used, and that is said.

    Args:
        tokenizer: of ``transformers``, with a chat template.
        messages: the conversation before the answer.
        answer: what the assistant says.
        eos: the text of the EOS; None for the tokenizer's.
    """
    name = "positions where template and mask disagree"
    eos = tokenizer.eos_token if eos is None else eos
    prompt = _ids(tokenizer, messages, add_generation_prompt=True)["input_ids"]
    response = tokenizer(answer + (eos or ""), add_special_tokens=False)["input_ids"]
    if not MARKS_ASSISTANT.search(tokenizer.chat_template or ""):
        return Check(name, 0.0, 0.0, "the template marks no assistant tokens; positions are used")
    whole = [*messages, {"role": "assistant", "content": answer}]
    rendered = _ids(tokenizer, whole, return_assistant_tokens_mask=True)
    ids, marks = rendered["input_ids"], rendered["assistant_masks"]
    before = _ids(tokenizer, messages, return_assistant_tokens_mask=True)["assistant_masks"]
    # Earlier turns' answers are marked too; they were not produced here.
    marks = [0] * len(before) + list(marks[len(before) :])
    mine = prompt + response
    expected = [0] * len(prompt) + [1] * len(response)
    width = max(len(ids), len(mine))
    wrong = sum(
        _at(marks, i) != _at(expected, i) or (_at(expected, i) == 1 and _at(ids, i) != mine[i])
        for i in range(width)
    )
    return Check(name, float(wrong), 0.0)


def _ids(tokenizer: Any, messages: Sequence[Mapping[str, str]], **kwargs: Any) -> Any:
    return tokenizer.apply_chat_template(
        [dict(message) for message in messages], tokenize=True, return_dict=True, **kwargs
    )


def _at(row: Sequence[int], index: int) -> int:
    return row[index] if index < len(row) else 0
