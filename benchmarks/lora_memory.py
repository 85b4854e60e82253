"""What the reference of a LoRA run costs in memory, and whether its values are right.

    python -m benchmarks.lora_memory            # a few minutes; prints only

Peak resident size of the same run with ``reference=adapter_off``, with ``reference=initial`` (a
frozen second copy) and with no reference at all, in turn, each a process of its own; then the
largest difference between the log-probs of ``adapter_off`` and those of a model loaded anew from
its folder, while the adapters move. Needs /proc, that is Linux.

Targets: adapter_off costs at most a tenth of a model; values are equal to 1e-4 nats.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import table
from benchmarks.watched import status_mb, watch

#: Of a Llama: 101 MB in float32, large beside the noise of a process's size.
SIZES = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1376}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 256}

#: Few and short samples, so that weights outweigh activations.
COMMON = (
    "experiment=sort_digits",
    "actor.lora.r=8",
    "collector.prompts=4",
    "collector.group_size=4",
    "collector.max_new_tokens=8",
    "learner.minibatches=2",
    "frames=64",
    "optim.lr=1e-2",  # the adapters shall move far in four iterations
    "logger=none",
    "device=cpu",
    "threads=1",
    "eval.every=0",
    "checkpoint.every=1000000000",
)
WAYS = {
    "no reference": ("kl=none",),
    "adapter_off": ("kl=retrieve", "reference=adapter_off"),
    "initial": ("kl=retrieve", "reference=initial"),
}
#: Shares of a model's size, and nats.
ENOUGH_MEMORY = 0.1
ENOUGH_VALUE = 1e-4


def save_model(folder: Path) -> float:
    """A Llama of random weights with the tokenizer of sort_digits; its size in MB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.sort_digits_base import make_tokenizer
    from klrl.language.model_files import no_progress_bar

    tokenizer = make_tokenizer()
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "eos")}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SIZES, **ids))
    with no_progress_bar():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20


# ---------------------------------------------------------------------------------------- memory


def peak_mb(words: Sequence[str]) -> float:
    """Highest resident size of a run through the command line."""
    peaks = [0.0]
    watch(words, lambda pid, _: peaks.append(status_mb(pid, "VmHWM") or 0.0), every=0.02)
    return max(peaks)


# ---------------------------------------------------------------------------------------- values


def largest_difference(words: Sequence[str], model: Path) -> tuple[float, float, int]:
    """Log-probs of ``adapter_off`` against a model that was loaded anew, over a whole run.

    Returns:
        (largest difference in nats, KL(policy||reference) of the last iteration in nats per token,
        how many log-probs were compared). The KL shows that the adapters were not at 0.
    """
    import klrl.language.parts
    from klrl.__main__ import compose
    from klrl.config.checks import to_config
    from klrl.runs.folder import RunFolder
    from klrl.train.loop import start

    differences: list[Any] = []
    kl: list[float] = []
    config = to_config(compose(list(words)))
    compared = comparing_parts(model, differences, kl)
    klrl.language.parts.LanguageParts = compared  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        start(config, RunFolder(Path(folder) / "run"))
    largest = max(float(found.abs().max()) for found in differences)
    return largest, kl[-1], sum(found.numel() for found in differences)


def comparing_parts(model: Path, differences: list[Any], kl: list[float]) -> type:
    """klrl's LanguageParts; notes every difference from the separate copy."""
    from transformers import AutoModelForCausalLM

    from klrl.language.batch import REF_LOG_PROBS
    from klrl.language.model_files import no_progress_bar
    from klrl.language.parts import LanguageParts

    with no_progress_bar():
        copy = AutoModelForCausalLM.from_pretrained(model).eval().requires_grad_(False)

    class Comparing(LanguageParts):
        def charge_kl(self, batch: Any) -> Any:
            measured = super().charge_kl(batch)
            asked = batch["masks", "all_assistant_mask"]
            differences.append((batch[REF_LOG_PROBS] - plain_log_probs(copy, batch))[asked])
            kl.append(float(measured["exact"]))
            return measured

    return Comparing


def plain_log_probs(model: Any, batch: Any) -> Any:
    """[B, T] by transformers alone: one padded row per response, logits and all; 0 at the first."""
    import torch

    tokens, attention = batch["tokens", "full"], batch["masks", "all_attention_mask"].long()
    place = (attention.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=attention, position_ids=place).logits
    # The token at t is predicted from those before it.
    found = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(found, (1, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        size = save_model(model)
        words = [*COMMON, f"actor.model={model}"]
        peaks: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(args.rounds):
            for name, more in WAYS.items():
                peaks[name].append(peak_mb([*words, *more]))
        off, kl, count = largest_difference([*words, *WAYS["adapter_off"]], model)
    median = {name: statistics.median(found) for name, found in peaks.items()}
    beyond = {name: value - median["no reference"] for name, value in median.items()}
    rows = [[name, f"{median[name]:,.0f}", f"{beyond[name]:+,.0f}"] for name in WAYS]
    print(f"\na model of {size:.0f} MB, actor.lora.r=8, median of {args.rounds} runs")
    print(table(["reference", "peak resident MB", "beside no reference"], rows))
    print(
        f"adapter_off against a separate copy: {off:.2g} nats at most over {count:,} log-probs; "
        f"KL(policy||reference) in the end {kl:.3g} nats per token"
    )
    if beyond["adapter_off"] > ENOUGH_MEMORY * size or not off <= ENOUGH_VALUE:
        sys.exit(1)


if __name__ == "__main__":
    main()
