"""How the exact KL(sampler||policy) grows with the lag, and how wrong its estimates and masks are.

    python -m benchmarks.staleness FILE.jsonl --seeds 200 201   # 7 CPU minutes a seed

A run of ``experiment=sort_digits`` with 64 responses per minibatch, one epoch and L minibatches per
rollout: minibatch k is k updates newer than the policy that sampled it. Every arm scales the gain
r A of a token by a factor without gradient. A line of the file is one run; runs that the file has
are left out. docs/developers/staleness.md is the protocol, docs/results/staleness has the results.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

import klrl
from klrl.kl.estimators import masked_mean
from klrl.language.data.batch import LOG_PROBS, response_part
from klrl.language.model.vocabulary import Against, NextTokens, token_measures
from klrl.language.run.update import LanguageSteps
from klrl.losses.policy import Scored
from klrl.losses.sampler import binary_tv, trusted

SAMPLES, RESPONSES, GROUP = 20_480, 64, 8
#: The score is that of the last samples of the training.
LAST = 2_048
#: The limit of the mean over a response (k3, exact KL; nats), and that of a token (tv).
LIMIT, DELTA = 0.1, 0.1
ARMS = ("none", "clip", "truncate", "k3", "exact", "tv", "tv_exact")
#: The cells of a seed: all lags without a factor, all arms at one lag.
LAGS, ARMS_LAG = (1, 2, 4, 8, 16, 32), 16
CELLS = [("none", lag) for lag in LAGS] + [(arm, ARMS_LAG) for arm in ARMS[1:]]


def mean_of(response: Tensor, mask: Tensor) -> Tensor:
    """Average [B, R] over the tokens of each response; [B, 1]."""
    return (response * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)


def factors(
    log_r: Tensor, log_mu: Tensor, gain: Tensor, far: Mapping[Any, Tensor], mask: Tensor
) -> Any:
    """Return arm -> the factor on a token's gain, [B, R]."""
    r, theta = log_r.exp(), log_r + log_mu
    k3 = r - 1 - log_r
    clipped = ((gain > 0) & (r > 1.2)) | ((gain < 0) & (r < 0.8))
    ones = torch.ones_like(r)
    return {
        "none": ones,
        "clip": (~clipped).to(r),
        "truncate": r.clamp_max(2.0) / r,
        "k3": (mean_of(k3, mask) <= LIMIT).to(r) * ones,
        "exact": (mean_of(far["reverse"], mask) <= LIMIT).to(r) * ones,
        "tv": trusted(theta, log_mu, gain, binary_tv(theta, log_mu) > DELTA).to(r),
        "tv_exact": trusted(theta, log_mu, gain, far["tv"] > DELTA).to(r),
    }


class Measured(LanguageSteps):
    """Measures each minibatch before its step, and scales its gains."""

    arm = "none"
    rows: list[dict[str, float]] = []  # noqa: RUF012 - one run per process
    _factor: Tensor

    def _measures(self, policy: NextTokens, batch: TensorDictBase, mask: Tensor) -> Any:
        measured = super()._measures(policy, batch, mask)
        with torch.no_grad():
            tokens, mu = batch["tokens", "response"], self._old(batch)
            _, [far] = token_measures(
                mu, tokens, mask, [Against(policy, ["reverse", "forward", "tv"])]
            )
            log_mu = response_part(batch, LOG_PROBS).masked_fill(~mask, 0.0)
            log_r = (measured[0] - log_mu).masked_fill(~mask, 0.0)
            gain = batch["advantage"].squeeze(-1)
            each = factors(log_r, log_mu, gain, far.divergence, mask)
            self._factor = each[self.arm]
            self.rows.append(self._row(log_r, far.divergence, each, mask))
        return measured

    @staticmethod
    def _row(log_r: Tensor, far: dict[Any, Tensor], each: dict[str, Tensor], mask: Tensor) -> Any:
        r = log_r.exp()
        k3 = r - 1 - log_r
        split = {
            "split_response": each["k3"] != each["exact"],
            "split_token": each["tv"] != each["tv_exact"],
        }
        tokens = {
            "sampler_policy": far["reverse"],
            "policy_sampler": far["forward"],
            "tv": far["tv"],
            "k1": -log_r,
            "k2": log_r**2 / 2,
            "k3": k3,
            "k3_clamped": k3.clamp(-10, 10),
            "ess": r,
            **{f"kept_{arm}": each[arm] for arm in ("k3", "exact", "tv", "tv_exact")},
            "split_token": split["split_token"],
        }
        row = {name: float(masked_mean(x.double(), mask)) for name, x in tokens.items()}
        row["ess"] = row["ess"] ** 2 / float(masked_mean(r.double() ** 2, mask))
        row["largest"] = float(r[mask].max())
        row["split_response"] = float(split["split_response"][:, 0].double().mean())
        return row

    def score(self, batch: TensorDictBase) -> Scored:
        """Scale the advantages by the arm's factor."""
        scored = super().score(batch)
        return replace(scored, advantage=scored.advantage * self._factor)


def run(arm: str, lag: int, seed: int) -> dict[str, Any]:
    """Run one cell; return its line, with means over iterations for each k."""
    from klrl.language.run import parts

    Measured.arm, Measured.rows = arm, []
    parts.LanguageSteps = Measured  # type: ignore[misc]
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        done = klrl.run(
            *("experiment=sort_digits", f"frames={SAMPLES}", f"seed={seed}", "logger=none"),
            *(f"collector.prompts={RESPONSES // GROUP * lag}", f"collector.group_size={GROUP}"),
            *("learner.epochs=1", f"learner.minibatches={lag}", "loss.clip_epsilon=1000000000"),
            *("eval.every=0", "checkpoint.every=100000"),
            folder=f"{folder}/run",
        )
        rows = done.rows[-(LAST // RESPONSES // lag) :]
    whole = {name: [row[name] for row in Measured.rows] for name in Measured.rows[0]}
    by_k = {name: torch.tensor(x).reshape(-1, lag).mean(0).tolist() for name, x in whole.items()}
    return {
        "arm": arm,
        "lag": lag,
        "seed": seed,
        "score": round(mean(row["reward/episode"] for row in rows), 6),
        "kl_ref": round(mean(row["kl/ref/exact"] for row in rows), 6),
        "cpu_seconds": round(time.process_time() - began, 1),
        "by_k": {name: [float(f"{x:.5g}") for x in each] for name, each in by_k.items()},
    }


def machine() -> dict[str, str]:
    """Return the commit, the processor and the library of linear algebra."""
    git = ["git", "-C", str(Path(__file__).parent)]
    state = subprocess.run(
        [*git, "status", "--porcelain"], capture_output=True, text=True, check=True
    )
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "commit": head.stdout[:12] + ("+" if state.stdout else ""),
        "processor": cpu[0].partition(": ")[2] if cpu else platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def main() -> None:
    """Run the cells that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", nargs="*", type=int, default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = args.file.read_text().splitlines() if args.file.exists() else []
    known = {(c["arm"], c["lag"], c["seed"]) for c in map(json.loads, lines)}
    for seed in args.seeds:
        for arm, lag in CELLS:
            if (arm, lag, seed) not in known:
                cell = {**machine(), **run(arm, lag, seed)}
                with args.file.open("a") as file:
                    file.write(json.dumps(cell) + "\n")


if __name__ == "__main__":
    main()
