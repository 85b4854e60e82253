"""A loss of the user's, called by its convention.

Two conventions, told apart by an argument for an actor (docs/doctor.md):

- a plain function of tensors [N, steps], which are given by the names of its arguments;
- a LossModule class, or a function that builds one, from an actor (a critic, a reference, a
  coefficient); the module is called on a TensorDict.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import one_hot

from klrl.base.errors import ConfigError
from klrl.config.own.find import arguments
from klrl.doctor.problems import DOUBLE, Numbers, Problem, Rollouts
from klrl.doctor.user_code import in_one_line, load

#: Reward per nat.
COEF = 0.5
#: Arguments of a function, and other spellings.
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "log_probs": ("log_prob", "logprobs", "logps", "new_log_probs"),
    "ref_log_probs": ("ref_log_prob", "ref_logprobs", "ref_logps", "reference_log_probs"),
    "old_log_probs": ("old_log_prob", "old_logprobs", "old_logps", "sample_log_probs"),
    "rewards": ("reward",),
    "advantages": ("advantage",),
    "mask": ("masks", "response_mask", "completion_mask"),
    "coef": ("coeff", "kl_coef", "kl_coeff", "beta"),
    "logits": (),
    "ref_logits": ("reference_logits",),
    "old_logits": (),
    "actions": ("tokens",),
}
#: Arguments that build a LossModule.
MODULES: Mapping[str, tuple[str, ...]] = {
    "actor": ("actor_network", "actor", "policy"),
    "critic": ("critic_network", "critic", "value_network"),
    "reference": ("reference", "ref_actor", "ref_policy", "ref_model", "reference_policy"),
    "coef": (
        *("ref_kl_coef", "ref_kl_coeff", "kl_to_ref_coeff"),
        *("kl_coef", "kl_coeff", "coef", "coeff"),
    ),
}
#: Terms of a LossModule that are no part of the objective.
NOT_COUNTED = ("loss_critic", "loss_value", "loss_entropy")


class Loss(ABC):
    """A function, or what builds a LossModule, with the keywords that the user gives it."""

    described: str  # its convention
    has_return = True  # else it is a penalty alone
    coef = COEF
    to = "ref"  # which policy it penalises the distance to

    def __init__(
        self, name: str, call: Callable[..., Any], settings: Mapping[str, object], placement: str,
        divergence: str | None = None,
    ) -> None:  # fmt: skip
        self.name, self.call, self.settings, self.placement = name, call, settings, placement
        self.setting = f"--loss {name}"
        #: Whether the loss itself has a KL's part.
        self.charges = placement != "reward" and divergence != "none"
        self._take()

    @abstractmethod
    def _take(self) -> None:
        """Read the arguments of the call; refuse what cannot be given."""

    @abstractmethod
    def value(self, numbers: Numbers, coef: float) -> Tensor:
        """The loss of a batch, a scalar."""

    def at_logits(self, problem: Problem, coef: float) -> Tensor:
        """The gradient of the batch's loss at the logits of each step, [N, steps, actions]."""
        numbers = problem.numbers(problem.everything, coef, self.placement)
        return self._at(numbers.logits, numbers, coef)

    def _at(self, logits: Tensor, numbers: Numbers, coef: float) -> Tensor:
        value = self.value(numbers, coef)
        return torch.autograd.grad(value, logits, materialize_grads=True)[0]

    def gradient(
        self, problem: Problem, episodes: Rollouts, coef: float, other_padding: bool = False
    ) -> Tensor:
        """At the policy's parameters, flat; refused if it is not finite."""
        numbers, at = problem.numbers(episodes, coef, self.placement), problem.parameters
        value = self.value(numbers.other_padding() if other_padding else numbers, coef)
        grads: Sequence[Tensor | None] = []
        if value.requires_grad:
            with in_one_line(self.setting):
                grads = torch.autograd.grad(value, at, allow_unused=True)
        if all(grad is None for grad in grads):
            raise ConfigError(
                f"{self.setting}: its value has no gradient in the policy; look for detach() or "
                "no_grad()"
            )
        ends = zip(at, grads, strict=True)
        flat = torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in ends])
        for wrong in flat[~flat.isfinite()][:1]:
            raise ConfigError(
                f"{self.setting}: its gradient is {float(wrong)}; look for log 0 and 0 / 0"
            )
        return flat

    def _free(self, given: Collection[str]) -> dict[str, bool]:
        """The keywords that the settings leave open, and whether each has a default.

        Those that the doctor gives are not the user's.
        """
        takes, anything = _arguments(self.name, self.call)
        for key, setting in self.settings.items():
            if key not in takes and not anything:
                told = f"{self.setting} has no such argument; it has {', '.join(takes)}"
                raise ConfigError(f"{key}={setting}: {told}")
            if key in given:
                raise ConfigError(f"{key}={setting}: the doctor gives it; leave it out")
        return {
            name: p.default is not p.empty for name, p in takes.items() if name not in self.settings
        }

    def _refuse(self, missing: Sequence[str], remedy: str = "") -> None:
        """What a loss asks for and is not given."""
        for each in missing:
            raise ConfigError(
                f"{self.setting}: asks for {each}, which the doctor does not have; {remedy}give it "
                f"behind as {each}=VALUE"
            )

    def _scalar(self, value: object, said: str = "returned") -> Tensor:
        remedy = "the loss to be minimised"
        if not isinstance(value, Tensor):
            told = f"{type(value).__name__}; return a tensor, {remedy}"
        elif value.numel() != 1:
            told = f"a tensor of shape {tuple(value.shape)}; return one number, {remedy}"
        elif not value.isfinite().all():
            told = f"{value.item()}; look for log 0 and 0 / 0"
        else:
            return value.reshape(())
        raise ConfigError(f"{self.setting}: {said} {told}")


class FunctionLoss(Loss):
    """A plain function of tensors, called with the arguments of :data:`ARGUMENTS` that it has.

    With ``placement="reward"``, or without a divergence, only a required ``coef`` is given.
    """

    def _take(self) -> None:
        canonical = {other: key for key, others in ARGUMENTS.items() for other in (key, *others)}
        free = self._free(canonical)
        missing = [key for key, default in free.items() if key not in canonical and not default]
        self._refuse(missing, f"it gives {', '.join(ARGUMENTS)}: rename it, or ")
        self._given = {
            key: canonical[key]
            for key, default in free.items()
            if key in canonical and (self.charges or not default or canonical[key] != "coef")
        }
        takes = self._given.values()
        if self.placement == "loss" and not {"ref_log_probs", "ref_logits"} & set(takes):
            self.to = "old"  # rewards are charged with the distance to ref
        self.described = f"a function of {', '.join(takes)}"
        self.has_return = bool({"rewards", "advantages"} & set(takes))
        if not {"log_probs", "logits"} & set(takes):
            raise ConfigError(
                f"{self.setting}: takes neither log_probs nor logits, so it has no gradient; take "
                "one of them, or an actor for a LossModule"
            )
        if "coef" not in takes and self.charges:
            if self.has_return:
                raise ConfigError(
                    f"{self.setting}: takes no coef; take it, or give --placement reward where the "
                    "rewards are charged with the KL before, or --divergence none without a KL"
                )
            self.coef = 1.0

    def value(self, numbers: Numbers, coef: float) -> Tensor:
        """The function's."""
        values = {  # copies: the user's code may write into them
            key: coef if name == "coef" else getattr(numbers, name).clone()
            for key, name in self._given.items()
        }
        with in_one_line(self.setting):
            value = self.call(**values, **self.settings)
        return self._scalar(value)


class ModuleLoss(Loss):
    """A LossModule, built anew for every batch.

    Where it has no KL to charge it gets neither reference nor coefficient unless it requires them.
    """

    def _take(self) -> None:
        free = self._free([key for role in MODULES if role != "critic" for key in MODULES[role]])
        wanted = ("actor", "reference", "coef") if self.charges else ("actor",)
        #: role -> its name here
        self._given: dict[str, str] = {}
        for role, names in MODULES.items():
            first = next((name for name in names if name in free), None)
            if first and (role in wanted or not free[first]):
                self._given[role] = first
        if self.charges and "coef" not in self._given:
            raise ConfigError(
                f"{self.setting}: takes no coefficient of the KL; name it ref_kl_coef or coef, or "
                "give --placement reward where the rewards are charged with the KL before, or "
                "--divergence none without a KL"
            )
        given = self._given.values()
        self._refuse(sorted(key for key in free if key not in given and not free[key]))
        self.described = self._built_with = f"a LossModule built with {', '.join(given)}"

    def value(self, numbers: Numbers, coef: float) -> Tensor:
        """The sum of the module's terms."""
        problem = numbers.problem
        parts = {
            "actor": _actor(problem.policy),
            "critic": _critic(problem.kind.states),
            "reference": _actor(problem.ref),
            "coef": coef,
        }
        given = {name: parts[role] for role, name in self._given.items()}
        with in_one_line(self.setting):
            out = self.call(**given, **self.settings)(_tensordict(numbers))
        if not isinstance(out, TensorDictBase | Mapping):
            return self._scalar(out)
        terms = [key for key in out.keys() if isinstance(key, str) and key.startswith("loss_")]
        counted = [key for key in terms if key not in NOT_COUNTED]
        left_out = [key for key in terms if key in NOT_COUNTED]
        if not counted:
            raise ConfigError(
                f"{self.setting}: returned no term whose name begins with loss_; name it so, as "
                "TorchRL's losses do"
            )
        self.described = f"{self._built_with}; counted: {', '.join(counted)}"
        self.described += f"; not counted: {', '.join(left_out)}" if left_out else ""
        return torch.stack([self._scalar(out[key], f"{key} is") for key in counted]).sum()

    def _at(self, logits: Tensor, numbers: Numbers, coef: float) -> Tensor:
        """The network gives these logits for the batch."""
        mask, policy = numbers.mask, numbers.problem.policy
        frames = logits if mask.all() else logits[mask]
        # A LossModule works on copies of the network, which keep its hooks.
        handle = policy.register_forward_hook(
            lambda _, __, out: frames if out.shape == frames.shape else out
        )
        try:
            return super()._at(logits, numbers, coef)
        finally:
            handle.remove()


def find_loss(
    name: str, settings: Mapping[str, object], placement: str, divergence: str | None = None
) -> Loss:
    """The loss that ``--loss`` names, with its convention."""
    value = load("--loss", name)
    takes, _ = _arguments(name, value)
    if any(actor in takes for actor in MODULES["actor"]):
        return ModuleLoss(name, value, settings, placement, divergence)
    if inspect.isclass(value):
        raise ConfigError(
            f"--loss {name}: a class without an argument for the actor "
            f"({', '.join(MODULES['actor'])}); give it one, or name a function"
        )
    return FunctionLoss(name, value, settings, placement, divergence)


def _actor(network: nn.Module) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(network, ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )


def _critic(states: int) -> TensorDictModule:
    return TensorDictModule(nn.Linear(states, 1, dtype=DOUBLE), ["observation"], ["state_value"])


def _tensordict(numbers: Numbers) -> TensorDict:
    """The batch as TorchRL's collectors give it: [N, steps], or real frames one behind another."""
    mask = numbers.mask
    last = mask.sum(1, keepdim=True) - 1
    done = torch.zeros_like(mask).scatter(1, last, True)
    observation = one_hot(numbers.states, numbers.problem.kind.states).to(DOUBLE)
    frames = {
        "observation": observation,
        "action": numbers.actions,
        "action_log_prob": numbers.old_log_probs,
        "logits": numbers.old_logits,
        "advantage": numbers.advantages[..., None],
        "value_target": numbers.advantages[..., None],
        "state_value": torch.zeros_like(numbers.advantages)[..., None],
        "next": {
            "observation": observation.roll(-1, 1),
            "reward": numbers.rewards[..., None],
            "done": done[..., None],
            "terminated": done[..., None],
            "ref_log_prob": numbers.ref_log_probs.detach(),
        },
    }
    data = TensorDict(frames, batch_size=mask.shape)
    return data if mask.all() else data[mask]


def _arguments(name: str, value: Any) -> tuple[Mapping[str, inspect.Parameter], bool]:
    """The keywords that it takes, a module's ``forward``'s; and whether it takes any others."""
    return arguments(f"--loss {name}", value.forward if isinstance(value, nn.Module) else value)
