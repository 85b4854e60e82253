"""What a language run writes: what a row tells of its rollout, and some responses to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from klrl.config import SamplerConfig
from klrl.kl.charge import ReferenceKL
from klrl.kl.estimators import masked_mean
from klrl.language.batch import REWARD, SCORE, response_mask
from klrl.language.kl import CHARGED, EXACT
from klrl.language.rollout import GOLD
from klrl.runs.metrics import Row
from klrl.train.callbacks import Callback
from klrl.train.row import Rewards

if TYPE_CHECKING:
    from klrl.train.callbacks import Loop


def rewards_of(batch: TensorDictBase, kl: ReferenceKL | None) -> Rewards:
    """Rewards and responses of a rollout [B], charged as ``kl`` says; None for ``kl=none``."""
    mask = response_mask(batch)
    score, tokens = batch[SCORE].flatten().double(), int(mask.sum())
    own: Row = {
        "reward/episode": float(score.mean()),
        "reward/episode_length": tokens / len(batch),
        "reward/episodes": len(batch),
        "reward/truncated": float(batch["next", "truncated"].double().mean()),
    }
    if GOLD in batch.keys(include_nested=True):
        own["reward/gold"] = float(batch[GOLD].double().mean())
    raw, shaped = float(score.sum()) / tokens, _mean(batch[REWARD], mask)
    charged = kl is not None and kl.charges_reward
    return Rewards(raw, shaped, _mean(batch[CHARGED], mask) if charged else 0.0, own)


def _mean(value: torch.Tensor, mask: torch.Tensor) -> float:
    """Mean over valid tokens of [B, R, 1], in float64."""
    return float(masked_mean(value.squeeze(-1).double(), mask))


class ShownSamples(Callback):
    """Some responses: of the first iteration, then every ``collector.samples_every``.

    Args:
        config: the collector group.
    """

    def __init__(self, config: SamplerConfig) -> None:
        self._config = config

    def iterated(self, training: Loop, row: Row, batch: TensorDictBase) -> None:
        """Record them when they are due."""
        every, iteration = self._config.samples_every, training.counters.iteration
        if every and (iteration % every == 0 or iteration == 1):
            training.recorder.samples(self._samples(training, batch))

    def _samples(self, training: Loop, batch: TensorDictBase) -> list[dict[str, Any]]:
        """Entries of ``samples.jsonl``, of different prompts of a rollout [B]."""
        rollout, tokenizer = training.parts.collector, training.parts.policy.causal.tokenizer
        count, mask = self._config.samples_count, response_mask(batch)
        samples = []
        for index in range(0, len(batch), max(1, len(batch) // count))[:count]:
            row, real = batch[index], mask[index]
            ids = row["tokens", "response"][real].tolist()
            sample = {
                "iteration": training.counters.iteration,
                "samples": training.counters.frames,
                "prompt": rollout.scored_prompts[index].content,
                "response": rollout.responses[index],
                "reward": float(row[SCORE].sum()),
                "truncated": bool(row["next", "truncated"].any()),
                "tokens": tokenizer.convert_ids_to_tokens(ids),
            }
            if GOLD in batch.keys(include_nested=True):
                sample["gold"] = float(row[GOLD].sum())
            if EXACT in batch.keys(include_nested=True):
                sample["kl"] = [round(value, 6) for value in row[EXACT][real].tolist()]
            samples.append(sample)
        return samples
