"""The small base model of ``env=sort_digits``: trained by supervised learning.

    python -m benchmarks.sort_digits_base FOLDER              # makes the one in klrl/language/
    python -m benchmarks.sort_digits_base FOLDER --shots 4    # for prompts with worked examples

The same machine and versions of torch and transformers give the same bits: one thread, one seed.
20 to 60 s.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Rules
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from klrl.base.files import replace_file
from klrl.kl.reference import evaluating
from klrl.language.data.model_files import silent
from klrl.language.data.prompts import Prompt, PromptBatch, PromptStream, Tokenizer
from klrl.language.data.sort_digits import DIGITS, SortDigits, exact
from klrl.runs.progress import duration

#: ChatML. The assistant's tokens, EOS included, are marked as generation.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("pad", "bos", "eos")
VOCABULARY = (
    *("<pad>", "<unk>", "<|im_start|>", "<|im_end|>"),
    *("\n", "user", "assistant", "system"),
    *DIGITS,
)


@dataclass(frozen=True)
class Recipe:
    """The settings of the base model."""

    shortest: int = 4  # fewest digits of a problem
    longest: int = 8  # most digits
    shots: int = 0  # worked examples in a prompt
    # Stop at this share of right answers to held-out prompts; 0: at the first measurement.
    target: float = 0.3
    steps: int = 1000  # most updates
    batch: int = 128  # problems per update
    lr: float = 1e-3  # Adam's, after 50 updates of warm-up
    measure_every: int = 5  # updates between two measurements
    measure_on: int = 512  # held-out prompts; .3 of 512 has a standard error of .02
    hidden: int = 96  # width of the Llama
    layers: int = 3
    heads: int = 4  # of attention, per layer
    context: int = 256  # positions of the Llama
    seed: int = 0  # of weights, problems and samples

    def problems(self, split: str) -> SortDigits:
        """The problems of a split: to learn from, or to measure on."""
        return SortDigits(self.shortest, self.longest, self.shots, self.seed, split)


def recipe_for(shortest: int, longest: int, shots: int) -> Recipe:
    """A recipe that reaches its target with these prompts.

    Every shot is one more answer to learn from, so a batch with shots needs fewer problems.
    """
    recipe = Recipe(shortest, longest, shots)
    return replace(recipe, batch=32) if shots else recipe


def make_tokenizer() -> PreTrainedTokenizerFast:
    """18 tokens: digits, roles, a new line, and four different ones for bos, eos, pad and unk."""
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Rules(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"user|assistant|system|\n|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Train; save model, tokenizer and ``built.json``, and return the content of the last."""
    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), _one_thread():
        torch.manual_seed(recipe.seed)
        model = make_model(recipe, tokenizer)
        summary = train(model, tokenizer, recipe)
    with silent():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    replace_file(folder / "built.json", json.dumps(summary, indent=1))
    return summary


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread: the same sums whatever ``threads`` is, and faster on busy cores than two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def make_model(recipe: Recipe, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A random Llama; 0.33M parameters by default."""
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in SPECIAL}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=8 * recipe.hidden // 3,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        **special,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    return model


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, recipe: Recipe) -> dict[str, Any]:
    """Maximum likelihood of the assistant's turns, until the target is reached.

    Raises:
        RuntimeError: it was not reached in ``recipe.steps`` updates.
    """
    started = time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), recipe.lr, betas=(0.9, 0.98))
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    held_out = PromptStream(recipe.problems("eval"), tokenizer, None).take(recipe.measure_on)
    reward = 0.0
    for step in range(1, recipe.steps + 1):
        loss = _supervised_loss(model, *_dialogues(recipe, tokenizer, step - 1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if step % recipe.measure_every:
            continue
        reward = sampled_accuracy(model, tokenizer, held_out, recipe.longest + 1)
        seconds = time.monotonic() - started
        # On stderr: what a command prints stays clean.
        print(
            f"base model | {step:,} of at most {recipe.steps} updates | "
            f"reward {reward:.2f} of {recipe.target:g} | {duration(seconds)}",
            file=sys.stderr,
            flush=True,
        )
        if reward >= recipe.target:
            return {
                "reward": reward,
                "steps": step,
                "seconds": round(seconds, 1),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "recipe": asdict(recipe),
            }
    raise RuntimeError(
        f"the base model reached reward {reward:.2f} after {recipe.steps} updates, not "
        f"{recipe.target:g}; give its recipe more steps"
    )


def _dialogues(recipe: Recipe, tokenizer: Tokenizer, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Solved problems of one update: ids, attention and assistant mask [B, T], right-padded."""
    problem_at = recipe.problems("train")
    first = step * recipe.batch
    solved = [_solved(problem_at(first + index)) for index in range(recipe.batch)]
    rendered = tokenizer.apply_chat_template(
        solved,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    assistant = torch.as_tensor(rendered["assistant_masks"]).bool()
    return rendered["input_ids"], rendered["attention_mask"], assistant


def _solved(problem: Prompt) -> list[Any]:
    return [*problem.content, {"role": "assistant", "content": problem.row["answer"]}]


def _supervised_loss(
    model: LlamaForCausalLM, ids: Tensor, attention: Tensor, assistant: Tensor
) -> Tensor:
    """Mean -log p of the assistant's tokens in all turns, nats."""
    model.train()
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits
    learned = assistant[:, 1:]
    return cross_entropy(logits[:, :-1][learned], ids[:, 1:][learned])


@torch.no_grad()
def sampled_accuracy(model: Any, tokenizer: Tokenizer, batch: PromptBatch, longest: int) -> float:
    """The gold reward of one sample of at most ``longest`` tokens per prompt, at temperature 1."""
    with evaluating(model):
        full = model.generate(
            input_ids=batch.ids,
            attention_mask=batch.mask.long(),
            max_new_tokens=longest,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
    texts = tokenizer.batch_decode(full[:, batch.ids.shape[1] :], skip_special_tokens=False)
    ended = [text.partition(tokenizer.eos_token) for text in texts]
    responses = [text if eos else "" for text, eos, _ in ended]
    scores = exact([], responses, [prompt.row for prompt in batch.prompts])
    return sum(scores) / len(scores)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name in ("shortest", "longest", "shots"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Recipe, name))
    args = parser.parse_args()
    print(json.dumps(build(recipe_for(args.shortest, args.longest, args.shots), args.folder)))
