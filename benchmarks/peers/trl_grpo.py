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
from dataclasses import asdict, dataclass, field
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


def train(args: argparse.Namespace, clock: Clock) -> tuple[Score, KLs | None]:
    """Run; the scores, and the KLs of the last iteration where they are asked for."""
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
        kls = watched_kl(trainer, args) if args.truth else None
        trainer.train()
    return score, kls


def score_responses_alone() -> None:
    """Let the fused head leave out what is no response, as on CUDA; the torch kernels stay.

    The name that is replaced decides this alone; the kernels' module has one of its own.
    """
    from trl.trainer import utils

    if not hasattr(utils, "_use_triton"):
        raise SystemExit("this TRL decides otherwise which positions it scores; drop --compact")
    utils._use_triton = lambda device: True


@dataclass
class KLs:
    """KL(policy||reference) in the last iteration, nats."""

    # by TRL, a mean over the tokens of each minibatch, weighted by the ratio
    logged: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)  # of each response
    # over the whole vocabulary, by plain transformers: one response at a time, unpadded; a sum over
    # each response
    exact: list[float] = field(default_factory=list)
    # the same tokens by the estimator that TRL uses, unweighted; likewise
    k3: list[float] = field(default_factory=list)


def watched_kl(trainer: Any, args: argparse.Namespace) -> KLs:
    """Filled while the last iteration is learned from; its time then means nothing."""
    found, compute = KLs(), trainer._compute_loss
    first = (args.iterations - 1) * args.minibatches * args.epochs

    def watched(model: Any, inputs: Any) -> Any:
        watches = trainer.state.global_step >= first
        if watches:
            for own, values in zip(
                (found.tokens, found.exact, found.k3), true_kl(trainer, inputs), strict=True
            ):
                own.extend(values)
        loss = compute(model, inputs)
        if watches:
            found.logged.append(trainer._metrics["train"]["kl"][-1])
        return loss

    trainer._compute_loss = watched
    return found


def true_kl(trainer: Any, inputs: Any) -> tuple[list[float], list[float], list[float]]:
    """Tokens, exact KL and k3 of each response of a minibatch, the last two sums over tokens."""
    import torch

    def log_probs(model: Any, ids: Any, count: int) -> Any:
        logits = model(input_ids=ids[None]).logits[0, -count - 1 : -1].float()
        return (logits / trainer.temperature).log_softmax(-1)

    tokens, exact, k3 = list[float](), list[float](), list[float]()
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    with torch.no_grad():
        for prompt, asked, completion, said in zip(*(inputs[n] for n in names), strict=True):
            answer = completion[said.bool()]
            ids, count = torch.cat([prompt[asked.bool()], answer]), len(answer)
            policy = log_probs(trainer.model, ids, count)
            reference = log_probs(trainer.ref_model, ids, count)
            exact.append(float((policy.exp() * (policy - reference)).sum()))
            log_ratio = (reference - policy).gather(1, answer[:, None])
            k3.append(float((log_ratio.exp() - 1 - log_ratio).sum()))
            tokens.append(count)
    return tokens, exact, k3


def main() -> None:
    clock = Clock()
    parser = make_parser(__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, help="JSON: prompt, and what its score reads"
    )
    parser.add_argument("--truth", action="store_true", help="the true KL of the last iteration")
    parser.add_argument("--compact", action="store_true", help="score response tokens alone")
    args = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):
        score, kls = train(args, clock)
    assert score.asked is not None
    more = {} if kls is None else {"kl": asdict(kls)}
    finish("TRL", args, clock, score.rewards, score.tokens, score.asked, **more)


if __name__ == "__main__":
    main()
