"""The names of everything that is recorded, each declared once.

One row of ``metrics.jsonl`` is one iteration. KLs and entropies are in nats per frame, means over
the rollout; rewards are per frame, before any scaling for the learner. For language a frame is a
token (means over valid tokens), an episode a response, and the x-axis counts samples, that is
responses; the suffix ``_seq`` says: summed over a response, mean over responses. Every row
satisfies reward/shaped == reward/raw - kl/ref/penalty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from klrl.learner import Learned

#: name -> what it is
METRICS: dict[str, str] = {
    "iteration": "rollouts so far",
    "frames": "environment steps so far, all copies counted; the x-axis",
    "samples": "language: responses so far; the x-axis",
    "reward/episode": "mean unshaped return of the episodes that ended in this rollout",
    "reward/episode_length": "their mean length, frames",
    "reward/episodes": "how many ended",
    "reward/gold": "language: mean gold score per response, beside a reward that is not it",
    "reward/truncated": "language: share of responses cut off at collector.max_new_tokens",
    "reward/raw": "mean reward per frame as the environment gave it",
    "reward/shaped": "mean reward per frame after the KL was charged",
    "eval/return": "mean return of deterministic episodes in fresh environments",
    "eval/return_std": "its standard deviation over the episodes",
    "eval/gold": "language: mean gold score of the evaluation, beside a reward that is not it",
    "kl/ref/exact": "KL(policy||reference) in closed form; language: over the whole vocabulary",
    "kl/ref/k1": "KL(policy||reference) by k1, the sampled log-ratio",
    "kl/ref/k2": "KL(policy||reference) by k2",
    "kl/ref/k3": "KL(policy||reference) by k3",
    **{
        f"kl/ref/{name}_seq": f"language: the same by {name}, summed over a response"
        for name in ("exact", "k1", "k2", "k3")
    },
    "kl/ref/coef": "coefficient of KL(policy||reference), reward per nat",
    "loss/kl_ref": "coef times KL(policy||reference) as the loss charged it (loss, split)",
    "kl/ref/penalty": "what was charged: coef times the KL that was applied, reward per frame",
    "kl/old/exact": "KL(old||new) after the update, in closed form",
    "kl/old/beta": "coefficient of KL(old||new) during the update",
    "loss/objective": "minus the policy's gain, penalty included",
    "loss/critic": "the critic's loss, weighted",
    "loss/entropy": "minus the weighted entropy bonus",
    "policy/entropy": "entropy of the action distribution; language: mean -log pi of the samples",
    "learner/grad_norm": "gradient norm before clipping",
    "learner/lr": "learning rate",
    "learner/epochs": "passes over the rollout",
    "learner/alpha": "share of the actor's step that loss.line_search kept",
    "time/frames_per_second": "frames of this iteration over its seconds",
    "time/samples_per_second": "language: samples of this iteration over its seconds",
    "time/iteration": "seconds of this iteration",
}

#: The metrics that measure the machine, not the run: they differ between two equal runs.
TIMES = ("time/frames_per_second", "time/samples_per_second", "time/iteration")

Row = dict[str, float]


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


def check_row(row: Row) -> Row:
    """Refuse names that are not declared above."""
    unknown = sorted(set(row) - set(METRICS))
    if unknown:
        raise KeyError(f"metric {unknown[0]}: declare it in klrl/metrics.py")
    return row
