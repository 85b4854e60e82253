"""A loss of the user's, called by its convention.

Two conventions, told apart by an argument for an actor (docs/doctor.md):

- a plain function of tensors [N, steps], which are given by the names of its arguments;
- a LossModule class, or a function that builds one, from an actor (a critic, a reference, a
  coefficient); the module is called on a TensorDict.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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
#: The loss of a batch of episodes, a scalar; with other padding if it is asked for.
LossOfBatch = Callable[[Rollouts, bool], Tensor]

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
ACTORS = ("actor_network", "actor", "policy")
CRITICS = ("critic_network", "critic", "value_network")
REFERENCES = ("reference", "ref_actor", "ref_policy", "ref_model", "reference_policy")
COEFS = ("ref_kl_coef", "ref_kl_coeff", "kl_to_ref_coeff", "kl_coef", "kl_coeff", "coef", "coeff")
#: Terms of a LossModule that are no part of the objective.
NOT_COUNTED = ("loss_critic", "loss_value", "loss_entropy")


@dataclass
class UserLoss:
    """A function, or what builds a LossModule, with the keywords that the user gives it."""

    name: str
    call: Callable[..., Any]
    settings: Mapping[str, object]
    placement: str
    divergence: str | None = None  # as the user named it

    @property
    def charges(self) -> bool:
        """Whether the loss itself has a KL's part."""
        return self.placement != "reward" and self.divergence != "none"


@dataclass
class FunctionLoss(UserLoss):
    """A plain function of tensors, called with the arguments of :data:`ARGUMENTS` that it has.

    With ``placement="reward"``, or without a divergence, only a required ``coef`` is given.
    """

    coef = COEF

    def __post_init__(self) -> None:
        name = self.name
        canonical = {other: key for key, others in ARGUMENTS.items() for other in (key, *others)}
        free = _free(name, self.call, self.settings, canonical)
        given = {p.name: canonical[p.name] for p in free if p.name in canonical}
        missing = [p.name for p in free if p.name not in given and p.default is p.empty]
        _refuse(name, missing, f"it gives {', '.join(ARGUMENTS)}: rename it, or ")
        if not self.charges:  # the loss has nothing to charge, unless it insists
            optional = {p.name for p in free if p.default is not p.empty}
            given = {k: v for k, v in given.items() if v != "coef" or k not in optional}
        self._given, takes = given, given.values()
        takes_ref = {"ref_log_probs", "ref_logits"} & set(takes)
        # Which policy it penalises the distance to; rewards are charged with that to ref.
        self.to = "ref" if takes_ref or self.placement != "loss" else "old"
        self.described = f"a function of {', '.join(takes)}"
        self.has_return = bool({"rewards", "advantages"} & set(takes))  # else a penalty alone
        if not {"log_probs", "logits"} & set(takes):
            raise ConfigError(
                f"--loss {name}: takes neither log_probs nor logits, so it has no gradient; take "
                "one of them, or an actor for a LossModule"
            )
        if "coef" not in takes and self.charges:
            if self.has_return:
                raise ConfigError(
                    f"--loss {name}: takes no coef; take it, or give --placement reward where the "
                    "rewards are charged with the KL before, or --divergence none without a KL"
                )
            self.coef = 1.0

    def on(self, problem: Problem, coef: float) -> LossOfBatch:
        """The loss of batches of a problem."""

        def loss(episodes: Rollouts, other_padding: bool = False) -> Tensor:
            numbers = problem.numbers(episodes, coef, self.placement)
            return self._of(numbers.other_padding() if other_padding else numbers, coef)

        return loss

    def _of(self, numbers: Numbers, coef: float) -> Tensor:
        known = {"coef": coef, "actions": numbers.episodes.actions.clone()}
        values = {  # copies: the user's code may write into them
            key: known[name] if name in known else getattr(numbers, name).clone()
            for key, name in self._given.items()
        }
        with in_one_line(f"--loss {self.name}"):
            value = self.call(**values, **self.settings)
        return _scalar(self.name, value)

    def at_logits(self, problem: Problem, coef: float) -> Tensor:
        """The gradient of the batch's loss at the logits of each step, [N, steps, actions]."""
        numbers = problem.numbers(problem.everything, coef, self.placement)
        logits = numbers.logits.detach().requires_grad_()
        (grad,) = torch.autograd.grad(self._of(replace(numbers, logits=logits), coef), logits)
        return grad


@dataclass
class ModuleLoss(UserLoss):
    """A LossModule, built anew for every problem and coefficient.

    Where it has no KL to charge it gets neither reference nor coefficient unless it requires them.
    """

    has_return, coef, to = True, COEF, "ref"

    def __post_init__(self) -> None:
        name = self.name
        free = _free(name, self.call, self.settings, (*ACTORS, *REFERENCES, *COEFS))
        required = {p.name for p in free if p.default is p.empty}
        names = [p.name for p in free]
        self._actor = _first(ACTORS, names)
        critic = _first(CRITICS, names)
        self._critic = critic if critic in required else None
        self._reference, self._coef = _first(REFERENCES, names), _first(COEFS, names)
        if not self.charges:
            self._reference, self._coef = (
                key if key in required else None for key in (self._reference, self._coef)
            )
        elif self._coef is None:
            raise ConfigError(
                f"--loss {name}: takes no coefficient of the KL; name it {COEFS[0]} or coef, or "
                "give --placement reward where the rewards are charged with the KL before, or "
                "--divergence none without a KL"
            )
        _refuse(name, sorted(required - {self._actor, self._critic, self._reference, self._coef}))
        self.counted: list[str] = []  # the terms that were added
        self.left_out: list[str] = []  # those of the critic and of the entropy bonus

    @property
    def described(self) -> str:
        """What it is, in words; complete after a call."""
        given = [key for key in (self._actor, self._critic, self._reference, self._coef) if key]
        told = {"counted": self.counted, "not counted": self.left_out}
        parts = [f"; {what}: {', '.join(names)}" for what, names in told.items() if names]
        return f"a LossModule built with {', '.join(given)}{''.join(parts)}"

    def on(self, problem: Problem, coef: float) -> LossOfBatch:
        """The loss of batches of a problem."""
        module = self._built(problem, coef)

        def loss(episodes: Rollouts, other_padding: bool = False) -> Tensor:
            return self._of(module, problem, problem.numbers(episodes, coef, self.placement))

        return loss

    def _built(self, problem: Problem, coef: float) -> Any:
        given = {
            self._actor: _actor(problem.policy),
            self._critic: _critic(problem.kind.states),
            self._reference: _actor(problem.ref),
            self._coef: coef,
        }
        with in_one_line(f"--loss {self.name}"):
            return self.call(**{key: x for key, x in given.items() if key}, **self.settings)

    def _of(self, module: Any, problem: Problem, numbers: Numbers) -> Tensor:
        with in_one_line(f"--loss {self.name}"):
            out = module(_tensordict(problem, numbers))
        return self._total(out)

    def at_logits(self, problem: Problem, coef: float) -> Tensor:
        """The gradient at the logits of each step, [N, steps, actions]: of zeros added to them."""
        numbers = problem.numbers(problem.everything, coef, self.placement)
        mask = numbers.mask
        zeros = torch.zeros_like(numbers.logits)
        frames = (zeros if mask.all() else zeros[mask]).requires_grad_()
        # A LossModule works on copies of the network, which keep its hooks.
        handle = problem.policy.register_forward_hook(
            lambda _, __, out: out + frames if out.shape == frames.shape else out
        )
        try:
            value = self._of(self._built(problem, coef), problem, numbers)
        finally:
            handle.remove()
        (grad,) = torch.autograd.grad(value, frames, materialize_grads=True)
        return grad if mask.all() else zeros.masked_scatter(mask[..., None], grad)

    def _total(self, out: object) -> Tensor:
        if not isinstance(out, TensorDictBase | Mapping):
            return _scalar(self.name, out)
        terms = [key for key in out.keys() if isinstance(key, str) and key.startswith("loss_")]
        self.counted = [key for key in terms if key not in NOT_COUNTED]
        self.left_out = [key for key in terms if key in NOT_COUNTED]
        if not self.counted:
            raise ConfigError(
                f"--loss {self.name}: returned no term whose name begins with loss_; name it so, "
                "as TorchRL's losses do"
            )
        return torch.stack([_scalar(self.name, out[key], key) for key in self.counted]).sum()


#: By its convention.
Loss = FunctionLoss | ModuleLoss


def find_loss(
    name: str, settings: Mapping[str, object], placement: str, divergence: str | None = None
) -> Loss:
    """The loss that ``--loss`` names, with its convention."""
    value = load("--loss", name)
    takes, _ = _arguments(name, value)
    if _first(ACTORS, list(takes)):
        return ModuleLoss(name, value, settings, placement, divergence)
    if inspect.isclass(value):
        raise ConfigError(
            f"--loss {name}: a class without an argument for the actor ({', '.join(ACTORS)}); "
            "give it one, or name a function"
        )
    return FunctionLoss(name, value, settings, placement, divergence)


def gradient(name: str, value: Tensor, problem: Problem) -> Tensor:
    """The gradient of a loss at the policy's parameters, flat; refused if it is not finite."""
    setting, at = f"--loss {name}", problem.parameters
    grads: Sequence[Tensor | None] = []
    if value.requires_grad:
        with in_one_line(setting):
            grads = torch.autograd.grad(value, at, retain_graph=True, allow_unused=True)
    if all(grad is None for grad in grads):
        raise ConfigError(
            f"{setting}: its value has no gradient in the policy; look for detach() or no_grad()"
        )
    ends = zip(at, grads, strict=True)
    flat = torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in ends])
    if not flat.isfinite().all():
        raise ConfigError(f"{setting}: its gradient is {_example(flat)}; look for log 0 and 0 / 0")
    return flat


def _scalar(name: str, value: object, term: str = "") -> Tensor:
    told, remedy = "", "the loss to be minimised"
    if not isinstance(value, Tensor):
        told = f"{type(value).__name__}; return a tensor, {remedy}"
    elif value.numel() != 1:
        told = f"a tensor of shape {tuple(value.shape)}; return one number, {remedy}"
    elif not value.isfinite().all():
        told = f"{_example(value)}; look for log 0 and 0 / 0"
    if told or not isinstance(value, Tensor):
        raise ConfigError(f"--loss {name}: {f'{term} is' if term else 'returned'} {told}")
    return value.reshape(())


def _example(values: Tensor) -> str:
    """The first of the values that are not finite."""
    values = values.detach().flatten()
    return str(float(values[~values.isfinite()][0]))


def _actor(network: nn.Module) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(network, ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )


def _critic(states: int) -> TensorDictModule:
    return TensorDictModule(nn.Linear(states, 1, dtype=DOUBLE), ["observation"], ["state_value"])


def _tensordict(problem: Problem, numbers: Numbers) -> TensorDict:
    """The batch as TorchRL's collectors give it: [N, steps], or real frames one behind another."""
    mask = numbers.mask
    last = mask.sum(1, keepdim=True) - 1
    done = torch.zeros_like(mask).scatter(1, last, True)
    observation = one_hot(numbers.episodes.states, problem.kind.states).to(DOUBLE)
    frames = {
        "observation": observation,
        "action": numbers.episodes.actions,
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


def _free(
    name: str, value: Any, settings: Mapping[str, object], given: Collection[str]
) -> list[inspect.Parameter]:
    """The keywords that the settings leave open; those that the doctor gives are not the user's."""
    takes, anything = _arguments(name, value)
    for key, setting in settings.items():
        if key not in takes and not anything:
            has = ", ".join(takes)
            raise ConfigError(f"{key}={setting}: --loss {name} has no such argument; it has {has}")
        if key in given:
            raise ConfigError(f"{key}={setting}: the doctor gives it; leave it out")
    return [p for p in takes.values() if p.name not in settings]


def _refuse(name: str, missing: Sequence[str], remedy: str = "") -> None:
    """What a loss asks for and is not given."""
    for each in missing:
        raise ConfigError(
            f"--loss {name}: asks for {each}, which the doctor does not have; {remedy}give it "
            f"behind as {each}=VALUE"
        )


def _first(names: tuple[str, ...], among: list[str]) -> str | None:
    return next((name for name in names if name in among), None)
