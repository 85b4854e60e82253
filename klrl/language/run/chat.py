"""``kl.apply=step``: charges the KL by a transform, inside TorchRL's chat environment.

DataLoadingPrimer -> ChatEnv -> :class:`ChatPolicy` -> :class:`Score` -> KLRewardTransform or
RetrieveKL, collected by TorchRL's LLMCollector. This way is slow: each model scores the rollout in
a separate forward, with one row per response and all logits in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack, set_list_to_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Composite, Unbounded
from torchrl.data.llm import History
from torchrl.envs import Compose, InitTracker, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer
from torchrl.modules.llm import TransformersWrapper

from klrl.config import LanguageConfig, RetrieveKLConfig
from klrl.envs.llm.transforms.kl.retrieve_kl import RetrieveKL
from klrl.envs.llm.transforms.kl.reward import KLRewardTransform
from klrl.kl.charge import KL_KEY, ReferenceKL
from klrl.language.data.batch import (
    ASSISTANT,
    ATTENTION,
    LOG_PROBS,
    REF_LOG_PROBS,
    REWARD,
    SCORE,
    pad_to_full,
    prompt_length,
)
from klrl.language.data.prompts import PromptBatch
from klrl.language.model.causal_lm import model_device
from klrl.language.run.kl import CHARGED, Reference
from klrl.language.run.load import Policy
from klrl.language.run.rollout import GOLD, PARTS, STATES, PromptRollout

#: Keys of the truncated flag [B, 1]: ChatPolicy writes the first, a batch of klrl has the second.
_CUT, _TRUNCATED = ("old", "truncated"), ("next", "truncated")
#: The keys that the policy writes.
_DRAWN = (
    *(("tokens", "prompt"), ("tokens", "response"), ("tokens", "full")),
    *(ATTENTION, ASSISTANT, LOG_PROBS, STATES, _CUT),
)


def in_environment(
    kl: ReferenceKL, config: LanguageConfig, policy: Policy, reference: Reference
) -> ReferenceKL:
    """Return a :class:`ReferenceKL` whose transform charges the KL in the environment's steps."""
    scoring = partial(_wrapped, TransformersWrapper, policy=policy, generate=False)
    ref = scoring(reference, log_probs_key="ref_log_probs")
    how: dict[str, Any] = {"coef": kl.coef, "temperature": config.collector.temperature}
    transform: Any
    if isinstance(config.kl, RetrieveKLConfig):
        gen = scoring(policy.model, log_probs_key="log_probs")
        # assistant_only=True needs conversations; for token ids, the batch's mask selects tokens.
        transform = RetrieveKL(gen, ref, estimator=kl.estimator, assistant_only=False, **how)
        coef = (transform.computation, "coef")
    else:
        transform = KLRewardTransform(ref, out_keys=["reward", KL_KEY, REF_LOG_PROBS[1:]], **how)
        coef = (transform, "coef")
    return ReferenceKL(coef, kl.estimator, kl.placement, transform, online=True)


def _wrapped(kind: Any, network: Any, *, policy: Policy, **how: Any) -> Any:
    """Wrap a model in a TorchRL wrapper that takes token ids."""
    tokenizer = policy.causal.tokenizer
    return kind(network, tokenizer=tokenizer, input_mode="tokens", pad_output=True, **how)


class ChatPolicy(TransformersWrapper):
    """TorchRL's policy wrapper, with klrl's sampler in place of its own generation.

    When TorchRL 0.14.1's ``TransformersWrapper`` generates, it draws from torch's global generator.
    It sets the first token's log-prob to 0, and ignores the temperature in all log-probs. It finds
    padding by token id, so the EOS is lost if pad == eos. tests/language/test_chat.py fails when
    TorchRL fixes these faults.
    """

    rollout: ChatRollout

    def forward(self, tensordict: TensorDictBase, **how: Any) -> TensorDictBase:
        """Answer every conversation; write tokens, masks, log-probs and states of the answers."""
        drawn, history = self.rollout.answer(tensordict), tensordict["history"]
        said = [[{"role": "assistant", "content": text}] for text in self.rollout.responses]
        # Row by row: TorchRL 0.14.1 cannot extend a batch of conversations of different lengths.
        pairs = zip(history.prompt.unbind(0), History.from_chats(said).unbind(0), strict=True)
        history.full = lazy_stack([prompt.extend(more, inplace=False) for prompt, more in pairs])
        return tensordict.update(drawn.rename_key_(_TRUNCATED, _CUT).exclude("next"))


class Score(Transform):
    """Writes the task's reward of each response [B, 1, 1], and each reward function's score."""

    def __init__(self, score: Callable[[TensorDictBase], TensorDictBase]) -> None:
        super().__init__(out_keys=["reward"])
        self.score = score

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.update(self.score(tensordict))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Declare a reward of one number per response."""
        shape = torch.Size((*reward_spec.shape, 1, 1))
        reward_spec["reward"] = Unbounded(shape=shape, device=reward_spec.device)
        return reward_spec


class ChatRollout(PromptRollout):
    """Makes rollouts in TorchRL's environment, which also scores them and charges the KL.

    ``transform`` charges the KL; the other arguments are those of :class:`PromptRollout`.
    """

    def __init__(self, *args: Any, transform: Transform) -> None:
        super().__init__(*args)
        collector, device = self.config.collector, model_device(self.policy.model)
        size = torch.Size([self.config.frames_per_iteration])
        policy = _wrapped(ChatPolicy, self.policy.model, policy=self.policy, generate=True)
        policy.rollout = self
        loader = DataLoadingPrimer(
            self._draw(),
            primers=Composite(shape=size, device=device),
            batch_size=size,
            repeats=collector.group_size,
        )
        env = ChatEnv(batch_size=size, tokenizer=self.policy.causal.tokenizer, device=device)
        # TorchRL 0.15 appends an InitTracker by itself; 0.14 warns if there is none.
        parts = (InitTracker(), loader, Score(self._scores), transform)
        served = self.prompts.state_dict()
        with set_list_to_stack(True):
            self._collector = LLMCollector(
                TransformedEnv(env, Compose(*parts)),
                policy=policy,
                dialog_turns_per_batch=size[0],
                reset_at_each_iter=True,
            )
        self.prompts.load_state_dict(served)  # put back the prompts that LLMCollector took
        self._batches = iter(self._collector)
        self.built = (self._collector, policy, env, *parts[:-1])

    def collect(self) -> TensorDictBase:
        """Make the next rollout [B], scored and charged."""
        with set_list_to_stack(True):
            collected = next(self._batches)[:, 0]
        batch, after = self._batch(collected), collected["next"]
        scores = (key[1:] for key in (SCORE, PARTS, GOLD))
        batch["next"].update(after.select(*scores, strict=False))
        width = prompt_length(batch)
        batch[REWARD] = after["reward"][:, width:]
        batch[CHARGED] = after[KL_KEY].reshape(len(batch), -1)[:, width:, None]
        ref = after[REF_LOG_PROBS[1:]].reshape(len(batch), -1)
        batch[REF_LOG_PROBS] = pad_to_full(batch, ref[:, width:])
        return batch

    def close(self) -> None:
        """Close the collector and its environment."""
        self._collector.shutdown()

    def _draw(self) -> Iterator[TensorDict]:
        """Yield the next prompts and their token ids, for the environment's DataLoadingPrimer."""
        while True:
            self._taken = prompts = self.prompts.take(self.config.collector.prompts)
            said = (prompt.recorded for prompt in prompts.prompts)
            turns = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in said]
            query = History.from_chats(turns)
            ids = {"tokens": {"prompt": prompts.ids}, "masks": {ATTENTION[1]: prompts.mask}}
            yield TensorDict({"query": query, **ids}, [len(query)])

    def answer(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Sample responses to the environment's prompts, as a batch [B]."""
        every = self.config.collector.group_size
        ids, mask = tensordict["tokens", "prompt"][::every], tensordict[ATTENTION][::every]
        return self.respond(PromptBatch(ids, mask, self._taken.prompts))

    def _scores(self, tensordict: TensorDictBase) -> TensorDictBase:
        batch = self._batch(tensordict)
        self.score(batch)
        self.phase("scoring")
        return batch["next"].exclude("done").set("reward", batch[SCORE])

    def _batch(self, tensordict: TensorDictBase) -> TensorDict:
        """Convert the policy's output to a batch [B] in klrl's layout."""
        device, size = model_device(self.policy.model), tensordict.batch_size
        batch = TensorDict({key: tensordict[key] for key in _DRAWN}, size, device)
        batch.rename_key_(_CUT, _TRUNCATED)
        batch["next", "done"] = torch.ones_like(batch[_TRUNCATED])
        return batch
