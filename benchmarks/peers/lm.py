"""What the language contenders share: equal work, one thread, no hub, and their line of JSON.

A sample (one response) is what klrl counts as a frame, so that the line has the same keys as
those of the other contenders. Nothing here imports torch, transformers or klrl.
"""

from __future__ import annotations

import argparse
import os
import statistics
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers import common
from benchmarks.peers.common import Clock, report, versions

# Before torch and huggingface_hub are imported: both read them once.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

PACKAGES = (*common.PACKAGES, "transformers", "tokenizers", "accelerate", "datasets", "trl")
#: What is asked, by the columns of a row that tell one question from another.
TASKS = {"sort_digits": ("digits",), "instructions": ("topic", "words")}
#: The reward at the end is the mean over so many iterations, of few over their second half.
LAST = 5


def make_parser(about: str | None) -> argparse.ArgumentParser:
    """The settings that are equal for all contenders; defaults of ``experiment=sort_digits``."""
    parser = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="folder of the base model")
    parser.add_argument("--task", choices=TASKS, default="sort_digits")
    parser.add_argument("--shots", type=int, default=0, help="worked examples before the question")
    parser.add_argument("--prompts", type=int, default=32, help="per iteration")
    parser.add_argument("--group", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--new-tokens", type=int, default=16, help="of a response at most")
    parser.add_argument("--iterations", type=int, default=40, help="the first one is not counted")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--minibatches", type=int, default=4, help="per epoch")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--coef", type=float, default=0.1, help="of k3(policy||reference)")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def checksum(task: str, rows: Sequence[Mapping[str, Any]]) -> int:
    """Of what was asked in the first iteration: equal where the prompts are."""
    questions = [" ".join(str(row[name]) for name in TASKS[task]) for row in rows]
    return zlib.crc32("\n".join(questions).encode())


def finish(
    name: str,
    args: argparse.Namespace,
    clock: Clock,
    rewards: Sequence[float],
    tokens: Sequence[float],
    asked: int,
    **more: Any,
) -> None:
    """Print the line: mean score and mean length (EOS counted) of each iteration's responses.

    ``asked`` is the :func:`checksum` of the first iteration's questions.
    """
    last = min(LAST, max(1, len(rewards) // 2))
    work = argparse.Namespace(env=args.task, n=args.prompts, t=args.group)
    told: dict[str, Any] = {
        "asked": asked,
        "reward_first": round(rewards[0], 4),
        "reward_last": round(statistics.fmean(rewards[-last:]), 4),
        "last": last,
        "tokens": round(statistics.fmean(tokens[1:] or tokens), 2),
        "rewards": [round(reward, 4) for reward in rewards],
        "versions": versions(PACKAGES),
    }
    report(name, work, clock, **told, **more)
