"""Access to a causal LM of ``transformers``: backbone, head, position ids, mode, precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy, deepcopy
from functools import wraps
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from klrl.kl.reference import evaluating

#: Hidden states [..., D] -> logits [..., V].
Head: TypeAlias = Callable[[Tensor], Tensor]
#: Attribute of a model whose arithmetic has another dtype than its weights: float32's, bfloat16.
COMPUTES_IN = "klrl_computes_in"


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The causal LM itself; of a ``peft`` model the LM inside, adapters included."""
    network: Any = model
    return network.get_base_model() if hasattr(model, "get_base_model") else network


def weight_of(embedding: nn.Module) -> Tensor:
    """[V, D] of an input or output embedding, which may have adapters."""
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    return weight


def backbone(model: nn.Module) -> Any:
    """The network without its head; its output has ``last_hidden_state`` [B, T, D]."""
    network = unwrapped(model)
    name = _backbone_name(network)
    return network.base_model if name is None else network._modules[name]


def _backbone_name(network: PreTrainedModel) -> str | None:
    """Its name in a causal LM: the family's prefix, or the part that has the input embedding."""
    if network.base_model_prefix in network._modules:
        return str(network.base_model_prefix)
    embedding = network.get_input_embeddings()
    for name, part in network.named_children():
        holds = part is not embedding and any(module is embedding for module in part.modules())
        if holds or isinstance(part, _Backbone):
            return str(name)
    return None


def head(model: nn.Module) -> Head:
    """From hidden states to logits: the output embedding, or :class:`OwnHead` if that is not all.

    Both have a ``weight`` [V, D].
    """
    network = unwrapped(model)
    embedding = network.get_output_embeddings()
    return embedding if _embedding_alone(network, embedding) else OwnHead(network)


class OwnHead(nn.Module):
    """What a causal LM's own forward does behind its backbone: it may scale, shift or cap logits.

    Cohere, Granite and Falcon-H1 scale them, Gemma caps them, others cut them off or have a layer
    before the output embedding. Here the model's own ``forward`` runs with a backbone that returns
    the given states, so that no family needs a rule of its own.

    Args:
        network: a causal LM of ``transformers``; its head's weights are shared, not copied.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self.shell = _without_backbone(network)

    @property
    def weight(self) -> Tensor:
        """[V, D], of the output embedding."""
        return weight_of(self.shell.get_output_embeddings())

    def forward(self, states: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        mixed = getattr(self.shell, COMPUTES_IN, None)
        with torch.autocast(states.device.type, mixed, enabled=mixed is not None):
            logits = _run(self.shell, states.reshape(1, -1, states.shape[-1]))
        return logits.reshape(*states.shape[:-1], -1)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnHead:
        """Copies the head's weights; backbone, config and the like are shared."""
        copied = OwnHead(self.shell)
        for name, module in self.shell.named_children():
            if not isinstance(module, _Backbone):
                setattr(copied.shell, name, deepcopy(module, memo))
        return copied


def _without_backbone(network: PreTrainedModel) -> PreTrainedModel:
    """A causal LM beside the live one, with the same modules but for its backbone."""
    shell = copy(network)
    name = _backbone_name(network) or network.base_model_prefix
    shell._modules = {**network._modules, name: _Backbone(backbone(network))}
    return shell


def _run(shell: PreTrainedModel, states: Tensor) -> Tensor:
    """The logits [1, n, V] that a causal LM's forward makes of states [1, n, D]."""
    stub = backbone(shell)
    stub.states = states
    ids = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
    try:
        logits: Tensor = shell(input_ids=ids, use_cache=False, return_dict=True).logits
        return logits
    finally:
        stub.states = None


def _embedding_alone(network: PreTrainedModel, embedding: nn.Module) -> bool:
    """Whether logits are those of the output embedding, of the backbone's states, unchanged."""
    names = [name for name, module in network.named_children() if module is embedding]
    if len(names) != 1:
        return False
    weight = weight_of(embedding)
    shell, known = _without_backbone(network), _KnownLogits(weight)
    shell._modules[names[0]] = known
    # Known states go in, known logits come out: neither may be changed on the way.
    states = torch.linspace(-3, 3, weight.shape[-1]).to(weight)
    try:
        with torch.no_grad():
            logits = _run(shell, states.reshape(1, 1, -1))
    except (AttributeError, TypeError, ValueError, RuntimeError, LookupError):
        return True  # the preflight compares all heads with the truth
    return torch.equal(known.noted.flatten(), states) and torch.equal(
        logits.flatten().to(known.logits), known.logits
    )


class _Backbone(nn.Module):
    """Stands where the ``real`` backbone stood, and for any part of it; returns ``states``."""

    states: Tensor | None = None

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        self.__dict__["real"] = real  # its weights are none of the head's

    def forward(self, *args: Any, **kwargs: Any) -> _States:
        return _States((self.states,))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["real"], name)
        return self if isinstance(value, nn.Module) else value


class _States(tuple[Any, ...]):
    """A backbone's output that has states, and None for whatever else a family asks it for."""

    @property
    def last_hidden_state(self) -> Any:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _KnownLogits(nn.Module):
    """An output embedding whose logits are known."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.logits = torch.linspace(-100.0, 100.0, weight.shape[0], device=weight.device)
        self.noted = weight.new_empty(0)

    def forward(self, states: Tensor) -> Tensor:
        self.noted = states
        return self.logits.to(states).expand(*states.shape[:-1], -1)


def model_dtype(model: nn.Module) -> torch.dtype:
    """The dtype that it computes in: that of its parameters, unless it is mixed."""
    mixed: torch.dtype | None = getattr(unwrapped(model), COMPUTES_IN, None)
    return next(model.parameters()).dtype if mixed is None else mixed


def model_device(model: nn.Module) -> torch.device:
    """The device of the parameters."""
    return next(model.parameters()).device


# ------------------------------------------------------------------------------- mixed precision
#
# A bfloat16 number has 8 significant bits: near .01 its spacing is 6e-5, and an Adam step of 1e-6
# is rounded away. So weights, gradients and moments stay in float32, and matrix products take
# copies in bfloat16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.1). The residual stream,
# norms and embeddings stay in float32, and so do log-softmaxes and KLs.


def compute_in_bfloat16(model: nn.Module) -> None:
    """Let a model of float32 weights compute in bfloat16 wherever it is called; its copies too.

    Args:
        model: a causal LM; its backbone and its head are changed in place.
    """
    unmixed: list[Any] = [backbone(model), unwrapped(model).get_output_embeddings()]
    for module in unmixed:
        # A bound method is copied with its module; a closure would go on calling this one.
        module.forward = MethodType(_in_bfloat16(type(module)), module)
    setattr(model, COMPUTES_IN, torch.bfloat16)


def _in_bfloat16(kind: type[nn.Module]) -> Any:
    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(model_device(self).type, torch.bfloat16):
            return kind.forward(self, *args, **kwargs)

    return forward


@contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """Inside, a mixed model computes in float32, as its weights are; others are left alone."""
    network = unwrapped(model)
    mixed = vars(network).pop(COMPUTES_IN, None)
    if mixed is None:
        yield
        return
    parts: list[Any] = [backbone(model), network.get_output_embeddings()]
    forwards = [vars(part).pop("forward") for part in parts]
    try:
        yield
    finally:
        for part, forward in zip(parts, forwards, strict=True):
            part.forward = forward
        setattr(network, COMPUTES_IN, mixed)


def weights_cast_once(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, a trained weight gets its bfloat16 copy at its first use, not at every call.

    Autocast keeps its copies until its outermost context ends. This context is that outermost one;
    it is disabled, so it converts nothing itself. No weight may change inside.
    """
    return torch.autocast(device.type, enabled=False)


def in_low_precision(model: nn.Module) -> bool:
    """Whether rounding shows in its log-probs: it computes in fewer bits than float32."""
    return model_dtype(model).itemsize < torch.float32.itemsize


# ------------------------------------------------------------------------------------------------


def positions(mask: Tensor) -> Tensor:
    """Position ids [B, T] that count only real tokens, so that left padding shifts none."""
    return (mask.long().cumsum(-1) - 1).clamp_min(0)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, except where gradient checkpointing needs the training mode.

    ``transformers`` checkpoints in training mode only; such a model must hold no dropout and no
    other noise (``klrl.language.run.checks`` compares both modes).
    """
    if torch.is_grad_enabled() and checkpoints_gradients(model):
        yield
        return
    with evaluating(model):
        yield


def checkpoints_gradients(model: nn.Module) -> bool:
    """Whether activations are computed again in the backward pass."""
    return bool(getattr(unwrapped(model), "is_activation_checkpointing", False))


def sharing_refused(model: nn.Module) -> str | None:
    """Why, by the model's config, the responses of a prompt cannot share one row; None if they can.

    Sharing needs attention that takes any mask, and keys that only position ids tell apart.
    """
    config = unwrapped(model).config.get_text_config()
    attention = getattr(config, "_attn_implementation", None)
    if attention not in ("sdpa", "eager"):
        return f"attention '{attention}' takes no 4-D mask"
    # Attention is penalised by distance (Press et al. 2022): Bloom, MPT, some Falcons.
    alibi = any(getattr(c, "alibi", False) for c in (config, getattr(config, "attn_config", None)))
    if alibi or config.model_type == "bloom":
        return "its distances go by slot (alibi)"
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # GPT-Neo and others: one setting for all layers, or a list by another name
        windows = ("window", "window_size")
        kinds = [name for name, size in vars(config).items() if name.endswith(windows) and size]
    by_slot = sorted(set(kinds) - {"full_attention"})
    return f"its layers tell keys apart by slot ({', '.join(by_slot)})" if by_slot else None


class ValueHead(nn.Module):
    """V(s_t) = w . h_t + b, from the hidden state h_t that predicts token t. w and b start at 0.

    Args:
        model: the causal LM whose hidden states it reads; gives width and device. The weights
            have its dtype, but float32 at least: they learn.
        detach: keep the critic's gradient out of the policy's network.
    """

    def __init__(self, model: nn.Module, detach: bool = False) -> None:
        super().__init__()
        self.detach = detach
        width = unwrapped(model).config.get_text_config().hidden_size
        dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        self.linear = nn.Linear(width, 1, device=model_device(model), dtype=dtype)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """[B, R, D] -> [B, R], in reward units; 0 at padding, and no gradient from it."""
        # 0 * NaN is NaN in the weights' gradient, and states are undefined at padding.
        states = states.masked_fill(~mask.unsqueeze(-1), 0.0)
        states = (states.detach() if self.detach else states).to(self.linear.weight.dtype)
        value = self.linear(states).squeeze(-1)
        return value.masked_fill(~mask, 0.0)
