"""The reference pi_ref (a frozen policy with its own normaliser), and the rules that update it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, Self, TypeAlias, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictSequential
from torch import Tensor, nn
from torch.distributions import Distribution

from klrl.config import EMAReferenceConfig, PeriodicReferenceConfig, ReferenceConfig

T = TypeVar("T")
ModuleT = TypeVar("ModuleT", bound=nn.Module)


def freeze(actor: ModuleT, *, requires_grad: bool = False) -> ModuleT:
    """Copy a policy with its parameters and buffers; put the copy into evaluation mode.

    The copy has its own observation normaliser, so it remains the same function while the live
    policy's statistics change.
    """
    return deepcopy(actor).requires_grad_(requires_grad).eval()


def flat_policy(model: T) -> T:
    """Flatten a policy whose last part is itself a policy; return any other policy unchanged.

    The result shares the weights. Without flattening, tensordict 0.14.3's ``get_dist`` would skip
    the inner policy's network and read the sampling policy's parameters from the data: every KL
    would be 0.
    """
    if not isinstance(model, ProbabilisticTensorDictSequential):
        return model
    *trunk, last = model.module.children()
    if not isinstance(last, ProbabilisticTensorDictSequential):
        return model
    parts: list[nn.Module] = []
    for part in trunk:
        # In TorchRL's example of KLPENPPOLoss, an earlier part also contains the last part.
        inner = list(part.module.children()) if isinstance(part, TensorDictSequential) else []
        parts += inner[: inner.index(last)] if last in inner else [part]
    parts += flat_policy(last).module.children()
    return ProbabilisticTensorDictSequential(*parts, partial_tolerant=model.partial_tolerant)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put every submodule into evaluation mode; restore each mode afterwards."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class FrozenPolicy(nn.Module):
    """Wrapper of pi_ref inside a transform, a loss or a run; it acts as the wrapped policy.

    ``.to(...)`` moves the wrapped policy, and ``state_dict`` includes it. But a module around the
    wrapper does not list the policy's parameters, and its ``.train()`` does not change the policy's
    mode. Attributes that the wrapper lacks are looked up in the policy.

    Args:
        module: the policy; not copied (:meth:`copy_of` copies it).
        own: True freezes ``module``. False is for a policy that others use too: only during calls,
            it is put into evaluation mode.
        requires_grad: with ``own``, whether the weights require gradients. Modules around the
            wrapper then list them as parameters.
    """

    def __init__(self, module: nn.Module, *, own: bool = True, requires_grad: bool = False) -> None:
        super().__init__()
        self.module = module = flat_policy(module)
        self.own, self._listed = own, requires_grad
        self.training = False
        if own:
            module.requires_grad_(requires_grad).eval()

    @staticmethod
    def copy_of(policy: nn.Module, *, requires_grad: bool = False) -> FrozenPolicy:
        """Wrap a frozen copy of a policy; return a FrozenPolicy unchanged unless requires_grad."""
        if isinstance(policy, FrozenPolicy) and not requires_grad:
            return policy
        return FrozenPolicy(
            freeze(policy, requires_grad=requires_grad), requires_grad=requires_grad
        )

    @staticmethod
    def shared(policy: T) -> T | FrozenPolicy:
        """Wrap a shared policy without a copy; return anything that is not a module unchanged."""
        if isinstance(policy, nn.Module) and not isinstance(policy, FrozenPolicy):
            return FrozenPolicy(policy, own=False)
        return policy

    @property
    def frozen_params(self) -> TensorDict:
        """A view of the policy's parameters and buffers, nested like its modules."""
        return TensorDict.from_module(self.module)

    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """pi_ref(.|s)."""
        with self._evaluating():
            return self.module.get_dist(tensordict)  # type: ignore[operator]

    def log_prob(self, tensordict: TensorDictBase, **how: object) -> Tensor:
        """log pi_ref(a|s)."""
        with self._evaluating():
            return self.module.log_prob(tensordict, **how)  # type: ignore[operator]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The policy's forward."""
        with self._evaluating():
            return self.module(*args, **kwargs)

    def _evaluating(self) -> AbstractContextManager[None]:
        return nullcontext() if self.own else evaluating(self.module)

    def train(self, mode: bool = True) -> Self:
        """Do nothing: the policy keeps its mode."""
        return self

    @property
    def named_parameters(self) -> Callable[..., Iterator[tuple[str, nn.Parameter]]]:
        """The policy's ``named_parameters``; outer modules may not list these parameters."""
        return self.module.named_parameters

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """List only the wrapper, unless ``requires_grad``: outer modules list parameters by it."""
        listed = super().named_modules(memo, prefix, remove_duplicate)
        return listed if self._listed else iter([(prefix, self)])

    def __getattr__(self, name: str) -> Any:
        # While the wrapper is copied or unpickled, it has no module yet.
        own = name == "module" or name.startswith("__")
        return super().__getattr__(name) if own else getattr(self.module, name)

    def __getitem__(self, index: int) -> nn.Module:
        return self.module[index]  # type: ignore[index]


#: Values of :attr:`ReferenceRule.source`: the live policy, a different policy, the live policy
#: without its adapters.
THE_POLICY, OTHER_POLICY, NO_ADAPTERS = "policy", "other", "adapters"


class ReferenceRule:
    """``reference=initial``: never changes the reference. Base class of all update rules."""

    source = THE_POLICY  # where the first reference comes from
    moves = False  # whether the rule ever changes the reference

    def __init__(self, config: ReferenceConfig) -> None:
        self.config = config

    def update(self, reference: nn.Module, actor: nn.Module, iteration: int) -> None:
        """Change the frozen policy in place; ``actor`` is the live policy after ``iteration``."""


class OtherPolicyReference(ReferenceRule):
    """``reference=checkpoint``, ``model`` and ``custom``: a different policy, never changed."""

    source = OTHER_POLICY


class AdapterOffReference(ReferenceRule):
    """``reference=adapter_off``: the policy without its adapters, never changed."""

    source = NO_ADAPTERS


class EMAReference(ReferenceRule):
    """ref <- decay * ref + (1 - decay) * policy, once per iteration.

    The normaliser's statistics are averaged too, since weights need the normaliser that they were
    trained with.
    """

    config: EMAReferenceConfig
    moves = True

    @torch.no_grad()
    def update(self, reference: nn.Module, actor: nn.Module, iteration: int) -> None:
        """Average every floating-point tensor with the policy's."""
        policy, moved = actor.state_dict(), set()
        for name, value in reference.state_dict().items():
            # A tied weight has two names, but must be averaged only once.
            if value.is_floating_point() and value.data_ptr() not in moved:
                value.lerp_(policy[name].to(value), 1 - self.config.decay)
                moved.add(value.data_ptr())


class PeriodicReference(ReferenceRule):
    """ref <- policy, every ``every`` iterations."""

    config: PeriodicReferenceConfig
    moves = True

    @torch.no_grad()
    def update(self, reference: nn.Module, actor: nn.Module, iteration: int) -> None:
        """Copy the policy's state if an update is due."""
        if iteration % self.config.every == 0:
            reference.load_state_dict(actor.state_dict())


#: A policy, and its description in the manifest, from which a resumed run rebuilds the networks;
#: None if the settings suffice.
Loaded: TypeAlias = tuple[nn.Module, Mapping[str, object] | None]


class FrozenReference(FrozenPolicy):
    """pi_ref of a run: a frozen policy, and the rule that updates it.

    Args:
        rule: updates the reference after an iteration.
        module: the policy; not copied.
        own: whether the reference has its own weights; if not, ``module`` is the live policy.
        checkpointed: whether checkpoints must include the reference.
        description: entry of the manifest from which a resumed run rebuilds the reference's
            networks; None if the settings suffice.
    """

    def __init__(
        self,
        rule: ReferenceRule,
        module: nn.Module,
        *,
        own: bool = True,
        checkpointed: bool = True,
        description: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(module, own=own)
        self.rule, self.checkpointed, self.description = rule, checkpointed, description

    @classmethod
    def start(
        cls,
        rule: ReferenceRule,
        policy: nn.Module,
        load_other: Callable[[], Loaded],
        *,
        checkpointed: bool = True,
    ) -> Self:
        """Make the reference of a live policy, according to ``rule.source``.

        ``load_other`` loads a different policy; it is called only if the source is OTHER_POLICY.
        """
        if rule.source == NO_ADAPTERS:
            return cls(rule, policy, own=False, checkpointed=checkpointed)
        if rule.source == OTHER_POLICY:
            module, description = load_other()
            return cls(rule, module, checkpointed=checkpointed, description=description)
        assert rule.source == THE_POLICY, rule.source
        return cls(rule, freeze(policy), checkpointed=checkpointed)

    def move(self, actor: nn.Module, iteration: int) -> None:
        """Apply the rule after an iteration; ``actor`` is the live policy."""
        self.rule.update(self.module, actor, iteration)

    @property
    def bytes(self) -> int:
        """Bytes of the reference's own weights; tied weights count once."""
        tensors = self.module.state_dict().values() if self.own else ()
        held = {value.data_ptr(): value.numel() * value.element_size() for value in tensors}
        return sum(held.values())
