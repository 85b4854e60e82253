"""What an update adds to a row of metrics.jsonl."""

from __future__ import annotations

from klrl.runs.metrics import Row
from klrl.train.learner import Learned


def learned_row(learned: Learned, klpen: bool) -> Row:
    """What an update adds to a row.

    Args:
        learned: what it gave.
        klpen: whether the loss has a beta.
    """
    row: Row = {
        "kl/old/exact": learned.kl_old,
        "loss/objective": learned.objective,
        "loss/critic": learned.critic,
        "loss/entropy": learned.entropy,
        "policy/entropy": learned.policy_entropy,
        "learner/grad_norm": learned.grad_norm,
        "learner/lr": learned.lr,
        "learner/epochs": learned.epochs,
    }
    return {**row, "kl/old/beta": learned.beta, "learner/alpha": learned.alpha} if klpen else row
