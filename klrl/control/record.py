"""One line of metrics.jsonl of a control run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDictBase

from klrl.control.kl import KL_KEY, RAW_REWARD_KEY
from klrl.kl.charge import ReferenceKL
from klrl.runs.checkpoint import Counters
from klrl.runs.metrics import Row, check_row
from klrl.train.learner import Learned
from klrl.train.row import learned_row


def make_row(
    counters: Counters,
    batch: TensorDictBase,
    kl: ReferenceKL | None,
    measured: Mapping[str, torch.Tensor],
    learned: Learned,
    klpen: bool,
    seconds: float,
) -> Row:
    """One line of ``metrics.jsonl``; names and units in :mod:`klrl.runs.metrics`.

    Args:
        counters: of the iteration that was just done.
        batch: its rollout [N, T], charged.
        kl: KL(policy||reference) of the run, None for ``kl=none``.
        measured: that KL of the rollout by every estimator.
        learned: what the update gave.
        klpen: whether the loss has a beta.
        seconds: what the iteration took.
    """
    after = batch.get("next")
    shaped = _mean(after.get("reward"))
    row: Row = {
        "iteration": counters.iteration,
        "frames": counters.frames,
        "reward/raw": shaped,
        "reward/shaped": shaped,
        "kl/ref/coef": 0.0,
        "kl/ref/penalty": 0.0,
        **learned_row(learned, klpen),
        "time/iteration": seconds,
        "time/frames_per_second": batch.numel() / seconds,
    }
    row.update({f"kl/ref/{name}": float(value) for name, value in measured.items()})
    if kl is not None:
        row["kl/ref/coef"] = kl.coef
        if kl.charges_reward:
            row["reward/raw"] = _mean(after.get(RAW_REWARD_KEY))
            row["kl/ref/penalty"] = kl.coef * _mean(after.get(KL_KEY))
        if kl.loss_estimator is not None:
            row["loss/kl_ref"] = learned.kl_ref
    row.update(_episodes(after))
    return check_row(row)


def _mean(value: torch.Tensor) -> float:
    """Mean in float64: the ledger's identity holds to rounding of the rewards themselves."""
    return float(value.double().mean())


def _episodes(after: TensorDictBase) -> Row:
    """Return and length of the episodes that ended in a rollout; nothing where none did."""
    ended = after.get("done")
    if not ended.any():
        return {"reward/episodes": 0}
    return {
        "reward/episode": _mean(after.get("episode_reward")[ended]),
        "reward/episode_length": _mean(after.get("step_count")[ended]),
        "reward/episodes": int(ended.sum()),
    }
