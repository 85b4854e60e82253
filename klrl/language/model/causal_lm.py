"""Finds a causal LM's backbone and head, sets its precision, and adds a value head."""

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
#: Name of an attribute that marks a mixed model (float32 weights, bfloat16 arithmetic).
COMPUTES_IN = "klrl_computes_in"


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """Return the causal LM (with adapters) in a ``peft`` model; return another model unchanged."""
    network: Any = model
    return network.get_base_model() if hasattr(model, "get_base_model") else network


def weight_of(embedding: nn.Module) -> Tensor:
    """Return the weight [V, D] of an input or output embedding, without any adapters."""
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    return weight


def backbone(model: nn.Module) -> Any:
    """Return the network without its head; its output has ``last_hidden_state`` [B, T, D]."""
    network = unwrapped(model)
    name = _backbone_name(network)
    return network.base_model if name is None else network._modules[name]


def _backbone_name(network: PreTrainedModel) -> str | None:
    """Return the name of the child module that is the backbone, or None."""
    if network.base_model_prefix in network._modules:
        return str(network.base_model_prefix)
    embedding = network.get_input_embeddings()
    for name, part in network.named_children():
        holds = part is not embedding and any(module is embedding for module in part.modules())
        if holds or isinstance(part, _Backbone):
            return str(name)
    return None


def head(model: nn.Module) -> Head:
    """Return the map from hidden states to logits; it has an attribute ``weight`` [V, D].

    The map is the output embedding, or an :class:`OwnHead` if logits need further steps.
    """
    network = unwrapped(model)
    embedding = network.get_output_embeddings()
    return embedding if _embedding_alone(network, embedding) else OwnHead(network)


class OwnHead(nn.Module):
    """Applies every step of a causal LM's forward after its backbone.

    Cohere, Granite and Falcon-H1 scale logits, Gemma caps them; other models drop some logits or
    have a layer before the output embedding. This class runs the model's own ``forward`` with a
    stub backbone that returns the given states, so no model needs special code.

    The head's weights are the model's, not copies.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self.shell = _without_backbone(network)

    @property
    def weight(self) -> Tensor:
        """The weight of the output embedding, [V, D]."""
        return weight_of(self.shell.get_output_embeddings())

    def forward(self, states: Tensor) -> Tensor:
        """Compute logits [..., V] from states [..., D]."""
        mixed = getattr(self.shell, COMPUTES_IN, None)
        with torch.autocast(states.device.type, mixed, enabled=mixed is not None):
            logits = _run(self.shell, states.reshape(1, -1, states.shape[-1]))
        return logits.reshape(*states.shape[:-1], -1)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnHead:
        """Copy the head's modules; share the backbone and the config."""
        copied = OwnHead(self.shell)
        for name, module in self.shell.named_children():
            if not isinstance(module, _Backbone):
                setattr(copied.shell, name, deepcopy(module, memo))
        return copied


def _without_backbone(network: PreTrainedModel) -> PreTrainedModel:
    """Return a shallow copy of a causal LM whose backbone is a stub; other modules are shared."""
    shell = copy(network)
    name = _backbone_name(network) or network.base_model_prefix
    shell._modules = {**network._modules, name: _Backbone(backbone(network))}
    return shell


def _run(shell: PreTrainedModel, states: Tensor) -> Tensor:
    """Compute logits [1, n, V] from states [1, n, D]; ``shell`` has a stub backbone."""
    stub = backbone(shell)
    stub.states = states
    ids = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
    try:
        logits: Tensor = shell(input_ids=ids, use_cache=False, return_dict=True).logits
        return logits
    finally:
        stub.states = None


def _embedding_alone(network: PreTrainedModel, embedding: nn.Module) -> bool:
    """Return whether logits are the output embedding applied to the states, with no other step."""
    names = [name for name, module in network.named_children() if module is embedding]
    if len(names) != 1:
        return False
    weight = weight_of(embedding)
    shell, known = _without_backbone(network), _KnownLogits(weight)
    shell._modules[names[0]] = known
    # The embedding must receive exactly these states; the forward must return its known logits.
    states = torch.linspace(-3, 3, weight.shape[-1]).to(weight)
    try:
        with torch.no_grad():
            logits = _run(shell, states.reshape(1, 1, -1))
    except (AttributeError, TypeError, ValueError, RuntimeError, LookupError):
        return True  # cannot test; the preflight compares log-probs with the model's own
    return torch.equal(known.noted.flatten(), states) and torch.equal(
        logits.flatten().to(known.logits), known.logits
    )


class _Backbone(nn.Module):
    """A stub for the ``real`` backbone and its submodules; its forward returns ``states``."""

    states: Tensor | None = None

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        self.__dict__["real"] = real  # not a registered submodule, so it is no part of the head

    def forward(self, *args: Any, **kwargs: Any) -> _States:
        return _States((self.states,))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["real"], name)
        return self if isinstance(value, nn.Module) else value


class _States(tuple[Any, ...]):
    """A backbone's output: the states, and None for any other attribute."""

    @property
    def last_hidden_state(self) -> Any:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _KnownLogits(nn.Module):
    """An output embedding that stores its input and returns fixed logits."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.logits = torch.linspace(-100.0, 100.0, weight.shape[0], device=weight.device)
        self.noted = weight.new_empty(0)

    def forward(self, states: Tensor) -> Tensor:
        self.noted = states
        return self.logits.to(states).expand(*states.shape[:-1], -1)


def model_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's arithmetic: bfloat16 if mixed, else its parameters' dtype."""
    mixed: torch.dtype | None = getattr(unwrapped(model), COMPUTES_IN, None)
    return next(model.parameters()).dtype if mixed is None else mixed


def model_device(model: nn.Module) -> torch.device:
    """Return the device of the parameters."""
    return next(model.parameters()).device


# ------------------------------------------------------------------------------- mixed precision
#
# A bfloat16 number has 8 significant bits: near .01 its spacing is 6e-5, and an Adam step of 1e-6
# is rounded away. So weights, gradients and moments stay in float32, and matrix products use
# bfloat16 copies (Micikevicius et al. 2018, arXiv:1710.03740, section 3.1). The residual stream,
# norms and embeddings stay in float32, and so do log-softmaxes and KLs.


def compute_in_bfloat16(model: nn.Module) -> None:
    """Make a model with float32 weights compute in bfloat16; its deep copies then do the same.

    The model's backbone and its head are changed in place.
    """
    unmixed: list[Any] = [backbone(model), unwrapped(model).get_output_embeddings()]
    for module in unmixed:
        # A deepcopy rebinds a bound method to the copy; a closure would still call this module.
        module.forward = MethodType(_in_bfloat16(type(module)), module)
    setattr(unwrapped(model), COMPUTES_IN, torch.bfloat16)


def _in_bfloat16(kind: type[nn.Module]) -> Any:
    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(model_device(self).type, torch.bfloat16):
            return kind.forward(self, *args, **kwargs)

    return forward


@contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """Inside this context, a mixed model computes in float32; other models are unchanged."""
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


@contextmanager
def computing_in_bfloat16(model: nn.Module) -> Iterator[None]:
    """Inside this context, a model with float32 weights computes in bfloat16."""
    network, parts = unwrapped(model), [backbone(model), unwrapped(model).get_output_embeddings()]
    compute_in_bfloat16(model)
    try:
        yield
    finally:
        for part in parts:
            del part.forward
        delattr(network, COMPUTES_IN)


def weights_cast_once(device: torch.device) -> AbstractContextManager[Any]:
    """Inside this context, a mixed model casts each trained weight to bfloat16 only once.

    Autocast caches the bfloat16 copies until the outermost autocast context ends. This context is
    the outermost; it is disabled, so it casts nothing itself. Weights must not change inside it.
    """
    return torch.autocast(device.type, enabled=False)


def in_low_precision(model: nn.Module) -> bool:
    """Return whether a model computes in fewer bits than float32."""
    return model_dtype(model).itemsize < torch.float32.itemsize


# ------------------------------------------------------------------------------------------------


def positions(mask: Tensor) -> Tensor:
    """Return position ids [B, T] that count only real tokens; left padding does not shift them."""
    return (mask.long().cumsum(-1) - 1).clamp_min(0)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Inside this context, use evaluation mode, unless gradient checkpointing needs training mode.

    ``transformers`` checkpoints activations only in training mode. The preflight checks that the
    model then computes the same log-probs as in evaluation mode.
    """
    if torch.is_grad_enabled() and checkpoints_gradients(model):
        yield
        return
    with evaluating(model):
        yield


def checkpoints_gradients(model: nn.Module) -> bool:
    """Return whether the backward pass recomputes activations."""
    return bool(getattr(unwrapped(model), "is_activation_checkpointing", False))


def sharing_refused(model: nn.Module) -> str | None:
    """Return why a prompt's responses cannot share one row; None if the model's config allows it.

    Sharing needs attention that accepts any mask and takes positions only from position ids.
    """
    config = unwrapped(model).config.get_text_config()
    attention = getattr(config, "_attn_implementation", None)
    if attention not in ("sdpa", "eager"):
        return f"attention '{attention}' takes no 4-D mask"
    # ALiBi biases attention by distance in the row (Press et al. 2022): Bloom, MPT, some Falcons.
    alibi = any(getattr(c, "alibi", False) for c in (config, getattr(config, "attn_config", None)))
    if alibi or config.model_type == "bloom":
        return "its attention depends on the index in the row (ALiBi)"
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # GPT-Neo and others have no layer_types: search for a window's size
        windows = ("window", "window_size")
        kinds = [name for name, size in vars(config).items() if name.endswith(windows) and size]
    by_slot = sorted(set(kinds) - {"full_attention"})
    return f"its layers select keys by index in the row ({', '.join(by_slot)})" if by_slot else None


class ValueHead(nn.Module):
    """V(s_t) = w . h_t + b, from the hidden state h_t that predicts token t. w and b start at 0.

    Args:
        model: the causal LM that computes h_t. w and b have its width and device; their dtype is
            float64 if its weights are float64, else float32.
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
        """Compute values [B, R], in reward units, from states [B, R, D]; 0 at padding."""
        # States are undefined at padding: a NaN there would make the weights' gradient NaN.
        states = states.masked_fill(~mask.unsqueeze(-1), 0.0)
        states = (states.detach() if self.detach else states).to(self.linear.weight.dtype)
        value = self.linear(states).squeeze(-1)
        return value.masked_fill(~mask, 0.0)
