"""Who pi_ref is: a frozen policy with the observation normaliser of its own snapshot."""

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
    """Copy a policy, parameters and buffers alike, and detach it from training.

    The copy holds its own observation normaliser, so it stays the function that it is now while
    the live policy's statistics move on.
    """
    return deepcopy(actor).requires_grad_(requires_grad).eval()


def flat_policy(model: T) -> T:
    """A policy whose last part is itself a policy, as one sequence; every other as it is.

    The weights are shared. tensordict 0.14.3's ``get_dist`` skips the network of an inner policy:
    it takes the parameters from the data, where those of the sampling policy are, and every KL
    is 0.
    """
    if not isinstance(model, ProbabilisticTensorDictSequential):
        return model
    *trunk, last = model.module.children()
    if not isinstance(last, ProbabilisticTensorDictSequential):
        return model
    parts: list[nn.Module] = []
    for part in trunk:
        # In KLPENPPOLoss's note the trunk is an ActorCriticOperator, which has the head itself.
        inner = list(part.module.children()) if isinstance(part, TensorDictSequential) else []
        parts += inner[: inner.index(last)] if last in inner else [part]
    parts += flat_policy(last).module.children()
    return ProbabilisticTensorDictSequential(*parts, partial_tolerant=model.partial_tolerant)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Evaluation mode for every submodule; afterwards each has its former mode again."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class FrozenPolicy(nn.Module):
    """pi_ref inside a transform, a loss or a run: it acts as the policy that it holds.

    It moves with ``.to(...)`` and stands in the ``state_dict``, but not among the parameters of
    what holds it, and no ``.train()`` brings its dropout back. Attributes that it lacks are the
    policy's.

    Args:
        module: the policy; frozen here, not copied (:meth:`copy_of` copies).
        own: whether the weights are its own; else ``module`` is someone else's, left as it is and
            asked in evaluation mode.
        requires_grad: whether its own weights are differentiable, and parameters of what holds it.
    """

    module: nn.Module

    def __init__(self, module: nn.Module, *, own: bool = True, requires_grad: bool = False) -> None:
        super().__init__()
        # No submodule: PyTorch lists the parameters of those.
        self.__dict__["module"] = module = flat_policy(module)
        self.own, self._listed = own, requires_grad
        self.training = False
        if own:
            module.requires_grad_(requires_grad).eval()

    @staticmethod
    def copy_of(policy: nn.Module, *, requires_grad: bool = False) -> FrozenPolicy:
        """A frozen copy, as :func:`freeze` makes it; what is frozen already is not copied again."""
        if isinstance(policy, FrozenPolicy) and not requires_grad:
            return policy
        return FrozenPolicy(
            freeze(policy, requires_grad=requires_grad), requires_grad=requires_grad
        )

    @staticmethod
    def shared(policy: T) -> T | FrozenPolicy:
        """Hold someone else's policy without a copy; what is no module is given back."""
        if isinstance(policy, nn.Module) and not isinstance(policy, FrozenPolicy):
            return FrozenPolicy(policy, own=False)
        return policy

    @property
    def frozen_params(self) -> TensorDict:
        """A view of its parameters and buffers, nested as its modules are."""
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
        """Stay frozen."""
        return self

    @property
    def named_parameters(self) -> Callable[..., Iterator[tuple[str, nn.Parameter]]]:
        """The policy's; those of what holds it do not have them."""
        return self.module.named_parameters

    @property
    def named_modules(self) -> Callable[..., Iterator[tuple[str, nn.Module]]]:
        """Itself alone, unless its weights are parameters of what holds it."""
        return self.module.named_modules if self._listed else super().named_modules

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if module is None or name.startswith("__"):  # while it is copied or unpickled
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(module, name)

    def __getitem__(self, index: int) -> nn.Module:
        return self.module[index]  # type: ignore[index]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.module._apply(fn)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, state: dict[str, object], prefix: str, keep_vars: bool) -> None:
        self.module.state_dict(destination=state, prefix=prefix, keep_vars=keep_vars)

    def _load_from_state_dict(
        self,
        state: Mapping[str, object],
        prefix: str,
        local_metadata: Mapping[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        held = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        try:
            result = self.module.load_state_dict(held, strict=False)
        except RuntimeError as error:  # shapes that do not fit
            error_msgs.append(str(error))
            return
        missing_keys += [prefix + key for key in result.missing_keys]
        unexpected_keys += [prefix + key for key in result.unexpected_keys]


#: What a reference starts as: the policy, another run's policy, the policy without its adapters.
THE_POLICY, OTHER_RUN, NO_ADAPTERS = "policy", "run", "adapters"


class ReferenceRule:
    """``reference=initial``: how the reference moves after an iteration, here not at all."""

    source = THE_POLICY  # what it starts as
    moves = False  # whether it ever changes the reference

    def __init__(self, config: ReferenceConfig) -> None:
        self.config = config

    def update(self, reference: nn.Module, actor: nn.Module, iteration: int) -> None:
        """Change the frozen policy in place; ``actor`` is the live one after so many iterations."""


class OtherRunReference(ReferenceRule):
    """``reference=checkpoint``."""

    source = OTHER_RUN


class AdapterOffReference(ReferenceRule):
    """``reference=adapter_off``."""

    source = NO_ADAPTERS


class EMAReference(ReferenceRule):
    """ref <- decay * ref + (1 - decay) * policy, once per iteration.

    Parameters and the normaliser's mean and standard deviation alike: an average of weights that
    were trained under one normaliser means little under another.
    """

    config: EMAReferenceConfig
    moves = True

    @torch.no_grad()
    def update(self, reference: nn.Module, actor: nn.Module, iteration: int) -> None:
        """Move every floating tensor a step towards the policy's."""
        policy, moved = actor.state_dict(), set()
        for name, value in reference.state_dict().items():
            # Tied weights have two names; moved by both, they would keep decay^2.
            if value.is_floating_point() and value.data_ptr() not in moved:
                value.lerp_(policy[name].to(value), 1 - self.config.decay)
                moved.add(value.data_ptr())


class PeriodicReference(ReferenceRule):
    """ref <- policy, every ``every`` iterations."""

    config: PeriodicReferenceConfig
    moves = True

    @torch.no_grad()
    def update(self, reference: nn.Module, actor: nn.Module, iteration: int) -> None:
        """Copy the policy when it is due."""
        if iteration % self.config.every == 0:
            reference.load_state_dict(actor.state_dict())


#: A frozen policy, and what the manifest holds of it to build its networks again on resume.
Loaded: TypeAlias = tuple[nn.Module, Mapping[str, object]]


class FrozenReference(FrozenPolicy):
    """pi_ref of a run: a frozen policy, and the rule that moves it.

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
        """The reference of a live policy as its rule says that it starts.

        ``load_other`` gives another run's policy, where the rule asks for one.
        """
        if rule.source == NO_ADAPTERS:
            return cls(rule, policy, own=False, checkpointed=checkpointed)
        if rule.source == OTHER_RUN:
            module, description = load_other()
            return cls(rule, module, checkpointed=checkpointed, description=description)
        assert rule.source == THE_POLICY, rule.source
        return cls(rule, freeze(policy), checkpointed=checkpointed)

    def move(self, actor: nn.Module, iteration: int) -> None:
        """Move it by its rule after an iteration."""
        self.rule.update(self.module, actor, iteration)

    @property
    def bytes(self) -> int:
        """What it holds in memory beside the policy; tied weights count once."""
        tensors = self.module.state_dict().values() if self.own else ()
        held = {value.data_ptr(): value.numel() * value.element_size() for value in tensors}
        return sum(held.values())
