"""TRL's GRPOTrainer on the same work, in an environment of its own (requirements-trl.txt).

Its own choices stay where they do not change the work (sampling by ``generate``, fused AdamW).
Changed: float32 and no gradient checkpointing, as in klrl; ``bnpo``, the mean over a minibatch's
tokens; the dataset in its order, so that the prompts are the same. On a CPU TRL puts prompts and
padding through the model's head too, on CUDA response tokens alone; ``--compact`` lets it do so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.common import Clock
from benchmarks.peers.lm import checksum, finish, make_parser


def settings(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Of GRPOConfig."""
    samples = args.prompts * args.group
    return {
        "output_dir": folder,
        "seed": args.seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": args.minibatches * args.epochs,
        "disable_tqdm": True,
        "shuffle_dataset": False,
        # The work: samples per iteration, minibatches, passes.
        "num_generations": args.group,
        "per_device_train_batch_size": samples // args.minibatches,
        "steps_per_generation": args.minibatches,
        "gradient_accumulation_steps": 1,
        "num_iterations": args.epochs,
        "max_steps": args.iterations * args.minibatches * args.epochs,
        "max_completion_length": args.new_tokens,
        "temperature": args.temperature,
        # The objective.
        "beta": args.coef,
        # Weighted by the ratio, as klrl does it: the gradient is that of the KL.
        "use_bias_correction_kl": True,
        "epsilon": 0.2,
        "scale_rewards": "group",
        "loss_type": "bnpo",
        # The step.
        "learning_rate": args.lr,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "adam_epsilon": 1e-5,
        "max_grad_norm": 1.0,
    }


class Score:
    """The task's score as a reward function; keeps what klrl's contender reports."""

    __name__ = "score"

    def __init__(self, task: str) -> None:
        self.task = task
        self.rewards: list[float] = []
        self.tokens: list[float] = []
        self.asked: int | None = None

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> list[float]:
        given = {name: columns[name] for name in COLUMNS[self.task]}
        rows = [{name: given[name][i] for name in given} for i in range(len(completions))]
        if self.asked is None:
            self.asked = checksum(self.task, rows)
        said = [completion[0]["content"] for completion in completions]
        scores = SCORES[self.task](said, rows)
        self.rewards.append(sum(scores) / len(scores))
        self.tokens.append(sum(map(len, completion_ids)) / len(scores))
        return scores


def exact(said: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """1 for the answer, else 0."""
    return [float(a == row["answer"]) for a, row in zip(said, rows, strict=True)]


def followed(said: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """klrl's own, which imports nothing that this environment lacks."""
    from klrl.language.data.instructions import followed_share

    return followed_share((), said, rows)


SCORES = {"sort_digits": exact, "instructions": followed}
#: What they read of a row.
COLUMNS = {"sort_digits": ("digits", "answer"), "instructions": ("topic", "words")}


def train(args: argparse.Namespace, clock: Clock) -> Score:
    """Run; the scores."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    if args.compact:
        score_responses_alone()
    clock.import_seconds = clock.now()
    steps = args.minibatches * args.epochs

    class Lap(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.start()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % steps == 0:
                clock.lap()

    score = Score(args.task)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            reward_funcs=score,
            args=GRPOConfig(**settings(args, folder)),
            train_dataset=Dataset.from_list(json.loads(args.data.read_text())),
            callbacks=[Lap()],
        )
        trainer.train()
    return score


def score_responses_alone() -> None:
    """Let the fused head leave out what is no response, as on CUDA; the torch kernels stay.

    The name that is replaced decides this alone; the kernels' module has one of its own.
    """
    from trl.trainer import utils

    if not hasattr(utils, "_use_triton"):
        raise SystemExit("this TRL decides otherwise which positions it scores; drop --compact")
    utils._use_triton = lambda device: True


def main() -> None:
    clock = Clock()
    parser = make_parser(__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, help="JSON: prompt, and what its score reads"
    )
    parser.add_argument("--compact", action="store_true", help="score response tokens alone")
    args = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):
        score = train(args, clock)
    assert score.asked is not None
    finish("TRL", args, clock, score.rewards, score.tokens, score.asked)


if __name__ == "__main__":
    main()
