"""``collector=answers``: makes rollouts from the data's prompts and answers, without sampling."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence

from klrl.base.errors import ConfigError
from klrl.config import LanguageConfig
from klrl.kl.estimators import masked_mean
from klrl.language.data.batch import (
    LOG_PROBS,
    Responses,
    make_batch,
    response_mask,
    response_part,
)
from klrl.language.data.prompts import Prompt, PromptBatch, end_of_turn, guarded
from klrl.language.data.tasks import Task
from klrl.language.model.causal_lm import model_device
from klrl.language.run.evaluate import LAYOUT, ROWS, places
from klrl.language.run.load import Policy, template_of
from klrl.language.run.rollout import PromptRollout, rescore
from klrl.runs.metrics import Row
from klrl.train.scores import IN_RUN


class AnswerRollout(PromptRollout):
    """Makes rollouts of the next prompts with their answers, instead of sampled responses."""

    def draw(self, prompts: PromptBatch, first: int) -> TensorDict:
        """Return this process's prompts with their answers, as a batch."""
        return answered(self.policy, prompts, self.config, keep=self.exact)


def answer_ids(
    prompts: Sequence[Prompt], policy: Policy, config: LanguageConfig
) -> list[list[int]]:
    """Return the token ids of each prompt's answer, with EOS at the end.

    Raises:
        ConfigError: no answer, two different ones, or more than ``collector.max_new_tokens`` ids.
    """
    return guarded(
        lambda prompt: _answer_ids(prompt, policy, config),
        prompts,
        lambda prompt: f"{prompt.origin}: the chat template refuses its answer",
        "let it render assistant turns",
    )


def _answer_ids(prompt: Prompt, policy: Policy, config: LanguageConfig) -> list[int]:
    answer, tokenizer = prompt.row.get("answer"), policy.causal.tokenizer
    most = config.collector.max_new_tokens
    if not isinstance(answer, str):
        raise ConfigError(
            f"{prompt.origin}: has no answer to learn; add a field answer with a text, or messages "
            "that end with the assistant's"
        )
    if prompt.turn not in (None, answer):
        raise ConfigError(
            f"{prompt.origin}: its answer is {json.dumps(answer)[:60]}, but the assistant's last "
            f"turn is {json.dumps(prompt.turn)[:60]}; drop one of the two"
        )
    end = end_of_turn(tokenizer, policy.special.eos, prompt, template_of(config))
    ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], end]
    if len(ids) > most:
        raise ConfigError(
            f"collector.max_new_tokens={most}: {prompt.origin} has an answer of {len(ids)} tokens, "
            "EOS included; give more, or drop the row"
        )
    return ids


@torch.no_grad()
def answered(
    policy: Policy, prompts: PromptBatch, config: LanguageConfig, *, keep: bool = False
) -> TensorDict:
    """Return prompts and answers as a batch [B], with the policy's log-probs.

    ``keep``: also with the hidden states.
    """
    device = model_device(policy.model)
    rows = [torch.tensor(ids) for ids in answer_ids(prompts.prompts, policy, config)]
    tokens = pad_sequence(rows, batch_first=True, padding_value=policy.special.pad).to(device)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).bool().to(device)
    truncated = torch.zeros_like(mask[:, 0])
    unscored = Responses(tokens, mask, torch.zeros(tokens.shape, device=device), truncated)
    batch = make_batch(prompts.ids.to(device), prompts.mask.to(device), unscored, 1)
    rescore(batch, policy.model, LAYOUT, ROWS, config.collector.temperature, keep=keep)
    return batch


def held_out(policy: Policy, task: Task, config: LanguageConfig) -> Row:
    """Return the mean negative log-likelihood of evaluation answers, in nats per token.

    Uses the prompts of evaluations during the run, but at most as many as a rollout has.
    """
    place = places(IN_RUN, config.frames_per_iteration, task.evaluations)
    limit = policy.causal.prompt_limit(config.collector.max_new_tokens)
    prompts = task.stream(policy.causal.tokenizer, limit, "eval")
    prompts.served = place.start
    batch = answered(policy, prompts.take(len(place)), config)
    log_prob = masked_mean(response_part(batch, LOG_PROBS).double(), response_mask(batch))
    return {"nll/held_out": -float(log_prob)}
