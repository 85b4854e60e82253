"""Records a language run: the rewards of each rollout, and some responses as samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase

from klrl.base.seeds import derived_seed
from klrl.config import LanguageConfig
from klrl.kl.charge import ReferenceKL
from klrl.kl.estimators import masked_mean
from klrl.language.data.batch import (
    LOG_PROBS,
    REF_LOG_PROBS,
    REWARD,
    SAMPLER_LOG_PROBS,
    SCORE,
    response_mask,
    response_part,
    set_scores,
)
from klrl.language.data.prompts import Prompt, Tokenizer
from klrl.language.run.kl import CHARGED, EXACT
from klrl.language.run.rollout import GOLD, PARTS, ids_of, sample, texts_of
from klrl.runs.metrics import PART, Row
from klrl.train.callbacks import Callback
from klrl.train.loop import Rewards

if TYPE_CHECKING:
    from klrl.train.callbacks import Loop


def rewards_of(batch: TensorDictBase, kl: ReferenceKL | None, group_size: int) -> Rewards:
    """Summarise the rewards of a rollout [B]; ``kl`` is None for ``kl=none``."""
    mask = response_mask(batch)
    score, tokens = batch[SCORE].flatten().double(), int(mask.sum())
    own: Row = {
        "reward/episode": float(score.mean()),
        "reward/episode_length": tokens / len(batch),
        "reward/episodes": len(batch),
        "reward/truncated": float(batch["next", "truncated"].double().mean()),
    }
    if group_size > 1:
        groups = score.unflatten(0, (-1, group_size))
        own["reward/equal_groups"] = float((groups == groups[:, :1]).all(1).double().mean())
    if _has(batch, GOLD):
        own["reward/gold"] = float(batch[GOLD].double().mean())
    for name, part in _parts(batch).items():
        if not part.isnan().all():
            own[f"{PART}{name}"] = float(part.double().nanmean())
    raw, shaped = float(score.sum()) / tokens, _mean(batch[REWARD], mask)
    charged = kl is not None and kl.charges_reward
    return Rewards(raw, shaped, _mean(batch[CHARGED], mask) if charged else 0.0, own)


def _mean(value: torch.Tensor, mask: torch.Tensor) -> float:
    return float(masked_mean(value.squeeze(-1).double(), mask))


def _parts(batch: TensorDictBase) -> dict[str, torch.Tensor]:
    """Return label -> scores of each reward function, if there are several."""
    return dict(batch[PARTS].items()) if _has(batch, PARTS) else {}


def _has(batch: TensorDictBase, key: tuple[str, ...]) -> bool:
    return key in batch.keys(include_nested=True)


def shown_rows(config: LanguageConfig) -> range:
    """Return the rows of a rollout that are recorded as samples."""
    size, count = config.frames_per_iteration, config.collector.samples_count
    return range(0, size, max(1, size // count))[:count]


class ShownSamples(Callback):
    """Records samples at iteration 1, every ``collector.samples_every`` iterations and at the end.

    The field ``weights`` is the number of samples that the policy of ``log_probs`` learned from. It
    drew the response; if another policy did, ``sampler_log_probs`` are that one's. At the end,
    the policy of the last checkpoint draws the responses, so ``klrl verify`` can recompute their
    log-probs. These samples get the next iteration's number, so a resumed run drops them. They have
    no reward, since the policy does not learn from them.
    """

    def __init__(self, config: LanguageConfig) -> None:
        self._config = config

    def iterated(self, training: Loop, row: Row, batch: TensorDictBase) -> None:
        """Record some responses of this rollout, if this iteration records any."""
        every, iteration = self._config.collector.samples_every, training.counters.iteration
        if not every or (iteration % every and iteration != 1):
            return
        rollout = training.parts.collector
        shown = [
            (i, rollout.scored_prompts[i], rollout.responses[i]) for i in shown_rows(self._config)
        ]
        self._record(training, iteration, batch, shown)

    def finished(self, training: Loop) -> None:
        """Draw and record responses of the final policy to the next prompts."""
        collector, parts = self._config.collector, training.parts
        if not collector.samples_every:
            return
        before, iteration = parts.prompts.state_dict(), training.counters.iteration
        prompts = parts.prompts.take(collector.samples_count)
        parts.prompts.load_state_dict(before)  # a resumed run gets these prompts again
        seed = derived_seed(self._config.seed, "sample", iteration)
        batch = sample(parts.policy, parts.sampler, prompts, self._config, seed)
        set_scores(batch, torch.zeros(len(batch), device=batch.device))
        parts.charge_kl(batch)
        del batch[SCORE]
        responses = texts_of(parts.policy, batch)
        rows = range(0, len(batch), collector.group_size)
        shown = [(i, each, responses[i]) for i, each in zip(rows, prompts.prompts, strict=True)]
        self._record(training, iteration + 1, batch, shown)

    def _record(
        self,
        training: Loop,
        iteration: int,
        batch: TensorDictBase,
        shown: Sequence[tuple[int, Prompt, str]],
    ) -> None:
        tokenizer, size = training.parts.policy.causal.tokenizer, self._config.frames_per_iteration
        place = {"iteration": iteration, "samples": iteration * size}
        lines = [
            {**place, "prompt": prompt.recorded, "response": text, **_line(batch[[i]], tokenizer)}
            for i, prompt, text in shown
        ]
        scored_by = {"weights": (iteration - 1) * size}
        training.recorder.samples([{**line, **scored_by} for line in lines])


#: Decimals of recorded log-probs and KLs: about the precision of float32.
_DECIMALS = {"log_probs": 7, "sampler_log_probs": 7, "ref_log_probs": 7, "kl": 6}


def _line(row: TensorDictBase, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the ids, log-probs and scores of one response, a batch [1], for ``samples.jsonl``."""
    (prompt_ids,), (ids,) = ids_of(row)
    line: dict[str, object] = {
        "truncated": bool(row["next", "truncated"].any()),
        "tokens": tokenizer.convert_ids_to_tokens(ids),
        "prompt_ids": prompt_ids,
        "response_ids": ids,
    }
    mask = response_mask(row)
    numbers = {"log_probs": response_part(row, LOG_PROBS)}
    if _has(row, SAMPLER_LOG_PROBS):
        numbers["sampler_log_probs"] = response_part(row, SAMPLER_LOG_PROBS)
    if _has(row, REF_LOG_PROBS):
        numbers["ref_log_probs"] = response_part(row, REF_LOG_PROBS)
    if _has(row, EXACT):
        numbers["kl"] = row[EXACT]
    for name, value in numbers.items():
        line[name] = [round(v, _DECIMALS[name]) for v in value[mask].double().tolist()]
    for name, key in (("reward", SCORE), ("gold", GOLD)):
        if _has(row, key):
            line[name] = float(row[key])
    if parts := _parts(row):
        line["rewards"] = {n: None if part.isnan() else float(part) for n, part in parts.items()}
    return line
