"""Who pi_ref is: a frozen policy with the observation normaliser of its own snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Self, TypeAlias, TypeVar

import torch
from torch import nn

from klrl.config import (
    CheckpointReferenceConfig,
    EMAReferenceConfig,
    PeriodicReferenceConfig,
    ReferenceConfig,
)

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def freeze(actor: ModuleT, *, requires_grad: bool = False) -> ModuleT:
    """Copy a policy, parameters and buffers alike, and detach it from training.

    The copy holds its own observation normaliser, so it stays the function that it is now while
    the live policy's statistics move on.

    Args:
        actor: the policy to copy.
        requires_grad: keep the copy differentiable.
    """
    return deepcopy(actor).requires_grad_(requires_grad).eval()


#: What a reference starts as: the policy, another run's policy, the policy without its adapters.
THE_POLICY, OTHER_RUN, NO_ADAPTERS = "policy", "run", "adapters"


class ReferenceRule:
    """How the reference moves after an iteration: here not at all.

    Args:
        source: what it starts as: :data:`THE_POLICY`, :data:`OTHER_RUN` or :data:`NO_ADAPTERS`.
    """

    #: Whether it ever changes the reference.
    moves = False

    def __init__(self, source: str = THE_POLICY) -> None:
        self.source = source

    def update(self, reference: nn.Module, actor: nn.Module, iteration: int) -> None:
        """Change the reference in place.

        Args:
            reference: the frozen policy.
            actor: the live policy, after the iteration.
            iteration: iterations done.
        """


class EMAReference(ReferenceRule):
    """ref <- decay * ref + (1 - decay) * policy, once per iteration.

    Parameters and the normaliser's mean and standard deviation alike: an average of weights that
    were trained under one normaliser means little under another.

    Args:
        decay: share of the old reference that stays.
    """

    moves = True

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = decay

    @torch.no_grad()
    def update(self, reference: nn.Module, actor: nn.Module, iteration: int) -> None:
        """Move every floating tensor a step towards the policy's."""
        policy = actor.state_dict()
        for name, value in reference.state_dict().items():
            if value.is_floating_point():
                value.lerp_(policy[name].to(value), 1 - self.decay)


class PeriodicReference(ReferenceRule):
    """ref <- policy, every ``every`` iterations.

    Args:
        every: iterations between two resets.
    """

    moves = True

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every

    @torch.no_grad()
    def update(self, reference: nn.Module, actor: nn.Module, iteration: int) -> None:
        """Copy the policy when it is due."""
        if iteration % self.every == 0:
            reference.load_state_dict(actor.state_dict())


def initial(config: ReferenceConfig) -> ReferenceRule:
    """``reference=initial``."""
    return ReferenceRule()


def checkpoint(config: CheckpointReferenceConfig) -> ReferenceRule:
    """``reference=checkpoint``."""
    return ReferenceRule(OTHER_RUN)


def ema(config: EMAReferenceConfig) -> EMAReference:
    """``reference=ema``."""
    return EMAReference(config.decay)


def periodic(config: PeriodicReferenceConfig) -> PeriodicReference:
    """``reference=periodic``."""
    return PeriodicReference(config.every)


def adapter_off(config: ReferenceConfig) -> ReferenceRule:
    """``reference=adapter_off``."""
    return ReferenceRule(NO_ADAPTERS)


#: A frozen policy, and what the manifest holds of it to build its networks again on resume.
Loaded: TypeAlias = tuple[nn.Module, Mapping[str, Any]]


class FrozenReference:
    """pi_ref of a run: a policy in eval mode and without gradients, and the rule that moves it.

    Args:
        rule: moves it after an iteration.
        module: the policy; frozen here, not copied.
        own: whether the weights are its own; else ``module`` is the live policy, left as it is.
        checkpointed: whether a checkpoint must hold it.
        description: what the manifest holds of it, to build it again on resume; None needs none.
    """

    def __init__(
        self,
        rule: ReferenceRule,
        module: nn.Module,
        *,
        own: bool = True,
        checkpointed: bool = True,
        description: Mapping[str, Any] | None = None,
    ) -> None:
        self.rule, self.module, self.own = rule, module, own
        self.checkpointed, self.description = checkpointed, description
        if own:
            module.requires_grad_(False).eval()

    @classmethod
    def start(
        cls,
        rule: ReferenceRule,
        policy: nn.Module,
        load_other: Callable[[], Loaded],
        *,
        checkpointed: bool = True,
    ) -> Self:
        """The reference as its rule says that it starts.

        Args:
            rule: of the choice of ``reference``.
            policy: the live one, as it starts.
            load_other: another run's policy, called where the rule asks for one.
            checkpointed: whether a checkpoint must hold it.
        """
        if rule.source == NO_ADAPTERS:
            return cls(rule, policy, own=False, checkpointed=checkpointed)
        if rule.source == OTHER_RUN:
            module, description = load_other()
            return cls(rule, module, checkpointed=checkpointed, description=description)
        assert rule.source == THE_POLICY, rule.source
        return cls(rule, freeze(policy), checkpointed=checkpointed)

    def move(self, actor: nn.Module, iteration: int) -> None:
        """Move it by its rule after an iteration; arguments as :meth:`ReferenceRule.update`."""
        self.rule.update(self.module, actor, iteration)

    @property
    def bytes(self) -> int:
        """What it holds in memory beside the policy."""
        tensors = self.module.state_dict().values() if self.own else ()
        return sum(value.numel() * value.element_size() for value in tensors)
