"""Estimates the memory of a language job, whose network computes on tensors without data."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModelForCausalLM, DynamicCache

from klrl.base.errors import ConfigError
from klrl.config import LanguageConfig, factory
from klrl.kl.from_logits import PIECE, PIECE_ELSEWHERE
from klrl.language.data.model_files import find_model, read_config, silent
from klrl.language.data.prompts import encode
from klrl.language.data.tasks import make_task
from klrl.language.model import causal_lm
from klrl.language.model.pretrained import load_tokenizer, to_train
from klrl.language.model.vocabulary import CHUNK_ELEMENTS
from klrl.language.run.load import find_base
from klrl.language.run.rollout import EXACT_MEASURES, exact_every
from klrl.language.run.scoring import costs
from klrl.language.run.update import prompts_at_a_time
from klrl.losses.policy import make_loss
from klrl.runs.machine import check_shareable

#: The parts of an iteration, each with its own peak.
PHASES = ("sampling", "scoring", "learning")


def memory(config: LanguageConfig, ranks: int = 1) -> dict[str, tuple[float, ...]]:
    """Return what takes memory on each of ``ranks`` devices: bytes in each of :data:`PHASES`.

    Prompts are taken to be as long as the longest, responses as ``collector.max_new_tokens``.

    Raises:
        ConfigError: a reference with another network, or ranks that cannot share the job.
    """
    minibatch, own = _shares(config, ranks)
    collector, learner, group = config.collector, config.learner, config.collector.group_size
    model, prompt = _network(config)
    with FakeTensorMode(), silent():
        model._apply(lambda weight: torch.empty(weight.shape, dtype=weight.dtype))
        causal_lm.unwrapped(model).tie_weights()
        head = causal_lm.weight_of(causal_lm.unwrapped(model).get_output_embeddings())
        weights = sum(p.nbytes for p in model.parameters())
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        cache = DynamicCache(config=causal_lm.unwrapped(model).config)
        with torch.no_grad(), causal_lm.without_dropout(model):
            states = causal_lm.backbone(model)(torch.zeros(1, 1).long(), past_key_values=cache)[0]
        scoring, _, _ = _scored(model, config, min(own, prompts_at_a_time(config)), prompt, 0)
        part = min(learner.micro_batch or minibatch, minibatch)
        learning, forward, responses = _scored(model, config, part, prompt, minibatch * group)
    read, kind = _read(config), causal_lm.model_dtype(model)
    tables = _tables(config, len(head), responses * collector.max_new_tokens, len(read), kind)
    learning = max(learning, forward + tables) - trained
    state = states.nbytes * own * group * collector.max_new_tokens
    kept = state * (exact_every(config) > 0)
    waiting = kept * (1 + collector.staleness * ranks) + state * len(read - {"old"})
    keys = [each for layer in cache.layers for each in vars(layer).values()]
    row = prompt if causal_lm.sharing_refused(model) is None else prompt * group
    cached = sum(each.nbytes for each in keys if isinstance(each, Tensor)) * own
    old_head = head.nbytes * head.requires_grad
    # Each rollout that waits has the head that sampled it, and so has the latest one.
    waiting_heads = head.nbytes * (collector.staleness + 1) * config.sampled_elsewhere
    return {
        "weights": (weights,) * 3,
        "reference": (weights * (config.has_reference and config.reference.name != "adapter_off"),)
        * 3,
        "gradients": (0, 0, trained),
        "Adam's moments": (2 * trained,) * 3,
        # While a rollout is sampled, the one before is still there.
        "hidden states": (waiting + kept, waiting, waiting * (1 + 1 / learner.minibatches)),
        "cache": (cached * (row + group * collector.max_new_tokens), 0, 0),
        "older heads": (old_head + waiting_heads,) * 3,
        "activations, logits": (3 * own * group * len(head) * 4, scoring, learning + old_head),
    }


def _shares(config: LanguageConfig, ranks: int) -> tuple[int, int]:
    """Return the prompts of a minibatch and of a rollout on one device; refuse wrong ``ranks``."""
    if ranks > 1:
        check_shareable(config)
    prompts = config.collector.prompts
    whole = prompts // config.learner.minibatches
    if ranks < 1 or whole % ranks:
        told = f"does not divide the {whole} prompts of a minibatch; change one of the two"
        raise ConfigError(f"--ranks={ranks}: {told}")
    if config.has_reference and config.reference.name in ("model", "checkpoint"):
        raise ConfigError(f"--memory: reference={config.reference.name}: its size is not read")
    return whole // ranks, prompts // ranks


def _tables(
    config: LanguageConfig, vocabulary: int, tokens: int, read: int, dtype: torch.dtype
) -> int:
    """Return the bytes of the logits of ``tokens``, and of what the loss makes of them.

    A backward pass keeps the logits of the policy and of the ``read`` others, and makes their
    gradient; those of many tokens are computed again, a quarter of a chunk at a time. The entropy
    keeps three tables more.
    """
    chunk = CHUNK_ELEMENTS // vocabulary
    logits = (tokens if tokens <= chunk else chunk // 4) * vocabulary
    entropy = config.loss.entropy_bonus and config.loss.entropy_coeff > 0
    piece = PIECE if config.device == "cpu" else PIECE_ELSEWHERE
    pieces = 4 * min(logits, piece) * 4  # intermediate tables of KLs and their gradient, float32
    return logits * dtype.itemsize * (2 + read + 3 * entropy) + pieces


def _read(config: LanguageConfig) -> set[str]:
    """Return the policies, beside pi_theta, whose distributions the loss reads."""
    loss = make_loss(config.loss, config.domain, factory("kl", config.kl, config.domain)(config.kl))
    exact = {"reference": loss.reference_estimator == "exact", "old": loss.kl_old == "exact"}
    exact["sampler"] = getattr(config.loss, "measure", "") in EXACT_MEASURES
    return {policy for policy, read in exact.items() if read}


def _network(config: LanguageConfig) -> tuple[nn.Module, int]:
    """Make the policy's network, whose weights have no data; return the longest prompt's tokens."""
    actor, task = config.actor, make_task(config.env, config.seed)
    folder, setting = find_model(find_base(config)), f"actor.model={actor.model}"
    tokenizer = load_tokenizer(folder, chat=task.chat, setting=setting, say=lambda _: None)
    dtype = torch.float32 if config.mixed else getattr(torch, actor.dtype)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(read_config(folder, setting), dtype=dtype)
        lora = actor.lora if actor.lora.r else None
        model = to_train(network, config.mixed, lora, actor.gradient_checkpointing, setting)
    return model, max(map(len, encode(task.checked, tokenizer, None, task.template)))


def _scored(
    model: nn.Module, config: LanguageConfig, prompts: int, prompt: int, minibatch: int
) -> tuple[int, int, int]:
    """Return the most bytes while a model scores prompts, those after a forward, and responses.

    If there are more responses in the minibatch, their gradient is added; 0: compute no gradient.
    """
    group, longest = config.collector.group_size, config.collector.max_new_tokens
    rows, length, tokens = prompts * group, prompt + longest - 1, config.learner.tokens_per_batch
    if tokens is not None:
        rows = min(rows, max(1, tokens // length))
    responses, (shared, packed) = rows, costs(prompt, group, longest)
    # Without a cache, transformers would look into these tensors, or make a mask.
    how: dict[str, Any] = {"past_key_values": _NoCache(config=causal_lm.unwrapped(model).config)}
    if tokens is None and causal_lm.sharing_refused(model) is None and shared <= packed:
        rows, length = prompts, prompt + group * (longest - 1)
        mask = torch.zeros(rows, 1, length, length, dtype=causal_lm.model_dtype(model))
        how = {"attention_mask": mask, "use_cache": False}
    ids = torch.zeros(rows, length, dtype=torch.long)
    with torch.set_grad_enabled(minibatch > 0), _Alive(model) as alive:
        for _ in range(1 + (responses < minibatch)):
            with causal_lm.without_dropout(model):
                states = causal_lm.backbone(model)(ids, position_ids=ids, **how)[0]
            forward = alive.now
            if minibatch:
                states.backward(states.detach())
            del states
    return alive.most, forward, responses


class _NoCache(DynamicCache):
    """Keeps nothing."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class _Alive(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, while they exist."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = WeakIdKeyDictionary({p.untyped_storage(): None for p in model.parameters()})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor) and (held := each.untyped_storage()) not in self._known:
                self._known[held] = None
                self._add(held.nbytes())
                weakref.finalize(held, self._add, -held.nbytes())
        return made

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)
