"""Estimates the memory of a language job on a device: its network computes on tensors without data.

``klrl plan --memory``. Of a model, config.json and the tokenizer are read, but no weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModelForCausalLM, DynamicCache

from klrl.base.errors import ConfigError
from klrl.config import CheckpointReferenceConfig, LanguageConfig, ModelReferenceConfig, factory
from klrl.language.data.model_files import find_model, read_config, silent
from klrl.language.data.prompts import encode
from klrl.language.data.tasks import make_task
from klrl.language.model import causal_lm, pretrained
from klrl.language.model.vocabulary import CHUNK_ELEMENTS
from klrl.language.run.load import find_base, language_config, of_model
from klrl.language.run.scoring import costs
from klrl.language.run.update import EXACT_MEASURES, prompts_at_a_time
from klrl.losses.policy import make_loss
from klrl.runs.find import find_run

#: The files of a model that are read.
FILES = ("*.json", "*.txt", "*.model", "*.jinja")
#: The parts of an iteration, each with its own peak.
PHASES = ("sampling", "scoring", "learning")


def memory(config: LanguageConfig, ranks: int = 1) -> dict[str, tuple[float, float, float]]:
    """Return what takes memory on each of ``ranks`` devices: bytes in each of :data:`PHASES`.

    Each prompt is taken to be as long as the longest, each response to have
    ``collector.max_new_tokens`` tokens.
    """
    collector = config.collector
    minibatch = collector.prompts // config.learner.minibatches
    if ranks < 1 or minibatch % ranks:
        raise ConfigError(
            f"--ranks={ranks}: does not divide the prompts of a minibatch "
            f"(collector.prompts={collector.prompts} / learner.minibatches); change one of them"
        )
    own, minibatch = collector.prompts // ranks, minibatch // ranks
    part = min(config.learner.micro_batch or minibatch, minibatch)
    prompt, response = _longest_prompt(config), collector.group_size * collector.max_new_tokens
    model, reference = _network(config), _reference(config)
    with FakeTensorMode(), silent():
        model._apply(lambda weight: torch.empty(weight.shape, dtype=weight.dtype))
        causal_lm.unwrapped(model).tie_weights()
        embedding = causal_lm.weight_of(causal_lm.unwrapped(model).get_output_embeddings())
        old_head = embedding.nbytes * embedding.requires_grad
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        cache = DynamicCache(config=causal_lm.unwrapped(model).config)
        with torch.no_grad(), causal_lm.without_dropout(model):
            token = torch.zeros(1, 1, dtype=torch.long)
            state = causal_lm.backbone(model)(token, past_key_values=cache)[0].nbytes
        scoring, _ = _most(model, config, min(own, prompts_at_a_time(config)), prompt, 0)
        learning, forward = _most(model, config, part, prompt, 1 + (part < minibatch))
        vocabulary, logit = len(embedding), causal_lm.model_dtype(model).itemsize
    # A backward pass keeps the logits of the policy and of others that the loss reads, and makes
    # their gradient; those of many tokens are computed again, a quarter of a chunk at a time.
    chunk, tables = CHUNK_ELEMENTS // vocabulary, 2 + len(_read(config))
    logits = (count if (count := part * response) <= chunk else chunk // 4) * vocabulary * logit
    learning = old_head + max(learning, forward + logits * tables) - trained
    states = own * response * state
    kept, waiting = states * _kept(config), states * collector.staleness * ranks
    tokens = own * response + own * prompt * (1 if _shares(model) else collector.group_size)
    keys = sum(
        each.nbytes
        for layer in cache.layers
        for each in vars(layer).values()
        if isinstance(each, Tensor)
    )
    drawn = 3 * own * collector.group_size * vocabulary * torch.float32.itemsize
    return {
        "weights": (sum(p.nbytes for p in model.parameters()),) * 3,
        "reference": (sum(p.nbytes for p in reference),) * 3,
        "gradients": (0, 0, trained),
        "Adam's moments": (2 * trained,) * 3,
        # Those of each token, and all of them at once; the last rollout is still there.
        "hidden states": (
            kept + waiting + 2 * states,
            kept + waiting + states,
            kept + waiting + kept / config.learner.minibatches,
        ),
        "cache": (tokens * keys, 0, 0),
        "activations, logits": (old_head + drawn, old_head + scoring, old_head + learning),
    }


def _kept(config: LanguageConfig) -> int:
    """Return the number of hidden states of each response token that a rollout has."""
    return 1 + config.has_reference + ("sampler" in _read(config))


def _read(config: LanguageConfig) -> list[str]:
    """Return the policies whose distributions the loss reads, beside the policy's."""
    kl = factory("kl", config.kl, config.domain)(config.kl)
    loss, measure = make_loss(config.loss, config.domain, kl), getattr(config.loss, "measure", "")
    reads = (loss.reference_estimator == "exact", loss.kl_old == "exact", measure in EXACT_MEASURES)
    return [who for who, reads in zip(("reference", "old", "sampler"), reads, strict=True) if reads]


def _longest_prompt(config: LanguageConfig) -> int:
    task, setting = make_task(config.env, config.seed), f"actor.model={config.actor.model}"
    folder = find_model(find_base(config), wanted=FILES)
    tokenizer = pretrained.load_tokenizer(
        folder, chat=task.chat, setting=setting, say=lambda _: None
    )
    return max(map(len, encode(task.checked, tokenizer, None, task.template)))


def _network(config: LanguageConfig) -> nn.Module:
    """Make the policy's network, with adapters; its weights have no data."""
    actor, setting = config.actor, f"actor.model={config.actor.model}"
    described = read_config(find_model(find_base(config), wanted=FILES), setting)
    dtype = torch.float32 if config.mixed else getattr(torch, actor.dtype)
    lora = actor.lora if actor.lora.r else None
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(described, dtype=dtype)
        checkpoint = actor.gradient_checkpointing
        return pretrained.to_train(network, config.mixed, lora, checkpoint, setting)


def _reference(config: LanguageConfig) -> Iterable[Tensor]:
    """Return the weights of a reference that has its own."""
    if not config.has_reference or config.reference.name == "adapter_off":
        return ()
    if isinstance(config.reference, ModelReferenceConfig):
        config = of_model(config, config.reference.path)
    if isinstance(config.reference, CheckpointReferenceConfig):
        config = language_config(find_run(config.reference.path, "reference.path"))
    return _network(config).parameters()


def _shares(model: nn.Module) -> bool:
    return causal_lm.sharing_refused(model) is None


def _most(
    model: nn.Module, config: LanguageConfig, prompts: int, prompt: int, gradients: int
) -> tuple[int, int]:
    """Return the most bytes that scoring some prompts takes, and those after the last forward.

    Each of ``gradients`` backward passes adds to the same gradients; without any there is no graph.
    """
    group, longest = config.collector.group_size, config.collector.max_new_tokens
    shared, packed = costs(prompt, group, longest)
    if _shares(model) and shared <= packed:
        rows, length = prompts, prompt + group * (longest - 1)
        mask = torch.zeros(rows, 1, length, length, dtype=causal_lm.model_dtype(model))
        more: dict[str, Any] = {"attention_mask": mask, "use_cache": False}
    else:  # without a cache, transformers would look into these tensors, or make a mask
        rows, length = prompts * group, prompt + longest - 1
        more = {"past_key_values": _NoCache(config=causal_lm.unwrapped(model).config)}
    ids = torch.zeros(rows, length, dtype=torch.long)
    with torch.set_grad_enabled(gradients > 0), _Alive(model) as alive:
        for _ in range(max(1, gradients)):
            with causal_lm.without_dropout(model):
                states = causal_lm.backbone(model)(ids, position_ids=ids, **more)[0]
            after = alive.now
            if gradients:
                states.backward(states.detach())
            del states
    return alive.most, after


class _NoCache(DynamicCache):
    """Keeps nothing."""

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return keys, values


class _Alive(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, while they exist."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = WeakIdKeyDictionary({p.untyped_storage(): None for p in model.parameters()})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and (held := each.untyped_storage()) not in self._known:
                self._known[held] = None
                self._add(held.nbytes())
                weakref.finalize(held, self._add, -held.nbytes())
        return made

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)
