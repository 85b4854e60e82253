"""``env.reward=model:FOLDER``: the reward is the logit of a sequence classifier with one label.

klrl runs no code from the folder, and loads weights only from safetensors files.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification

from klrl.base.context import context_of
from klrl.base.errors import ConfigError, in_one_line
from klrl.base.files import expanded
from klrl.language.data.model_files import check_weights, read_tokenizer, read_weights
from klrl.language.data.prompts import NO_ARGUMENTS, Content, Fields, guarded, plain_ids, render

#: Texts per forward; texts of similar length are computed together.
BATCH_SIZE = 32


class RewardModel:
    """A reward function that returns a classifier's logit for each prompt with its response.

    For a plain prompt, the classifier reads prompt + response. A conversation gets the response as
    the assistant's turn, and is rendered by the classifier's chat template.

    ``folder``: written by ``save_pretrained``, with the classifier's tokenizer.
    """

    def __init__(self, folder: str | Path, setting: str) -> None:
        folder = expanded(folder)
        if not folder.is_dir():
            raise ConfigError(f"{setting}: no such folder; give one that save_pretrained wrote")
        check_weights(folder, setting)
        try:
            self._config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # a broken file's errors have no common base
            raise ConfigError(
                f"{setting}: cannot be read ({in_one_line(error)}); give a folder with a sequence "
                "classifier and its tokenizer, both written by save_pretrained"
            ) from error
        self._tokenizer = read_tokenizer(folder, setting)
        if self._config.num_labels != 1:
            raise ConfigError(
                f"{setting}: has {self._config.num_labels} labels; give a sequence classifier with "
                "one label"
            )
        self._folder, self._setting = folder, setting
        self._model: Any = None

    def prepare(self, chat: bool = False) -> None:
        """Read the weights; refuse a tokenizer without the chat template that ``chat`` needs."""
        if chat and not self._tokenizer.chat_template:
            raise ConfigError(
                f"{self._setting}: its tokenizer has no chat template, but prompts are "
                "conversations; add one to the folder, or give plain prompts"
            )
        if self._model is not None:
            return
        model = read_weights(
            AutoModelForSequenceClassification,
            self._folder,
            self._config,
            torch.float32,  # bfloat16 would round logits near 12 to steps of .06
            self._setting,
            "give a model that was trained as a sequence classifier",
        )
        self._model = model.eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[Content],
        responses: Sequence[str],
        rows: Sequence[Fields],
        device: torch.device | None = None,
    ) -> Tensor:
        """Compute the logits [B] of B prompts with their responses, on ``device``; ignore ``rows``.

        Raises:
            ValueError: prompt and response exceed the classifier's context, or have no token.
        """
        self.prepare()
        self._model.to(device or "cpu")
        texts = self._encoded(list(zip(prompts, responses, rows, strict=True)))
        scores = torch.zeros(len(texts))
        by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        for start in range(0, len(by_length), BATCH_SIZE):
            chosen = by_length[start : start + BATCH_SIZE]
            scores[chosen] = self._logits([texts[index] for index in chosen])
        return scores

    def _encoded(self, samples: Sequence[tuple[Content, str, Fields]]) -> list[list[int]]:
        def encode(sample: tuple[Content, str, Fields]) -> list[int]:
            prompt, response, row = sample
            if isinstance(prompt, str):
                return plain_ids(self._tokenizer, prompt + response)[0]
            turns = [*prompt, {"role": "assistant", "content": response}]
            return next(render(self._tokenizer, [(turns, row)], NO_ARGUMENTS))

        what = f"{self._setting}: its tokenizer or chat template refuses a text"
        texts = guarded(encode, samples, lambda _: what, "fix its files")
        most = context_of(self._config.get_text_config())
        for ids in texts:
            if not ids or (most is not None and len(ids) > most):
                told = f"more than the classifier's {most}" if ids else "none to score"
                raise ValueError(f"a text has {len(ids)} tokens, {told}")
        return texts

    def _logits(self, texts: Sequence[list[int]]) -> Tensor:
        """Compute the logits [n] of n lists of token ids, padded on the right."""
        config = self._model.config.get_text_config()
        author = config.pad_token_id
        # A causal classifier scores the last token that differs from the config's pad id. If the
        # config has no pad id, set one that no text contains.
        used = set().union(*texts)
        pad = next(i for i in count() if i not in used) if author is None else author
        rows = [torch.tensor(text) for text in texts]
        ids = pad_sequence(rows, batch_first=True, padding_value=pad)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        device = self._model.device
        config.pad_token_id = pad
        try:
            output = self._model(input_ids=ids.to(device), attention_mask=mask.to(device))
        finally:
            config.pad_token_id = author
        return output.logits[:, 0].float().cpu()
