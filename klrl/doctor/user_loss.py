"""Calls a user's loss by its convention.

There are two conventions (docs/doctor.md):

- a function of tensors [N, steps]; the names of its arguments say which tensors it takes;
- a LossModule class, or a function that takes an actor and returns a LossModule. Both may also
  take a critic, a reference and a coefficient. The module is called on a TensorDict.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import one_hot

from klrl.base.errors import ConfigError, LossError, with_line
from klrl.base.imports import import_named, named_in
from klrl.base.seeds import generators_kept
from klrl.config.overrides import parse
from klrl.config.own.find import arguments
from klrl.doctor.problems import DOUBLE, KINDS, Numbers, Problem

#: Coefficient of the KL, in reward per nat.
COEF = 0.5
#: Role of a function's argument, which is also its preferred name -> other names for it.
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "log_probs": (
        "log_prob", "logprobs", "logprob", "logps", "per_token_logps", "action_log_probs",
        "new_log_probs",
    ),
    "ref_log_probs": (
        "ref_log_prob", "ref_logprobs", "ref_logprob", "ref_logps", "ref_per_token_logps",
        "base_action_log_probs", "reference_log_probs",
    ),
    "old_log_probs": (
        "old_log_prob", "old_logprobs", "old_logprob", "old_logps", "old_per_token_logps",
        "old_action_log_probs", "sample_log_probs",
    ),
    "rewards": ("reward",),
    "advantages": ("advantage",),
    "mask": ("masks", "response_mask", "completion_mask", "action_mask", "loss_mask"),
    "coef": ("coeff", "kl_coef", "kl_coeff", "kl_loss_coef", "beta"),
    "logits": (),
    "ref_logits": ("reference_logits",),
    "old_logits": (),
    "actions": ("tokens",),
}  # fmt: skip
#: The same for the arguments of a class or function that makes a LossModule.
MODULES: Mapping[str, tuple[str, ...]] = {
    "actor": ("actor_network", "policy"),
    "critic": ("critic_network", "value_network"),
    "reference": ("ref_actor", "ref_policy", "ref_model", "reference_policy"),
    "coef": ("ref_kl_coef", "ref_kl_coeff", "kl_to_ref_coeff", "kl_coef", "kl_coeff", "coeff"),
}
#: Terms of a LossModule that do not belong to the objective.
NOT_COUNTED = ("loss_critic", "loss_value", "loss_entropy")


class Loss:
    """A user's function or LossModule, with the user's keywords.

    Attributes:
        described: its convention and arguments, in words.
        has_return: whether it has a term for the return; else it is a penalty alone.
        coef_name: its argument for the coefficient, in words.
        coef: reward per nat; 1 if the penalty takes no coefficient, 0 if there is no penalty.
        takes_old: whether it takes pi_old's log-probs or logits.
        to: the policy with which the penalty compares pi: ref or old.
    """

    def __init__(
        self, name: str, call: Callable[..., Any], settings: Mapping[str, object], placement: str,
        divergence: str | None = None,
    ) -> None:  # fmt: skip
        self.name, self.call, self.settings, self.placement = name, call, settings, placement
        self.setting, self.divergence = f"--loss {name}", divergence or "reverse"
        of = call.forward if isinstance(call, nn.Module) else call
        takes, takes_all = arguments(self.setting, of)
        if (other := {*settings} - {*takes}) and not takes_all:
            raise ConfigError(f"{self.setting}: takes no {min(other)}; it takes {', '.join(takes)}")
        self.is_module = any(each in takes for each in ("actor", *MODULES["actor"]))
        if inspect.isclass(call) and not self.is_module:
            names = ", ".join(MODULES["actor"])
            raise ConfigError(
                f"{self.setting}: is a class that takes no actor ({names}); add one, or name an "
                f"instance, x = {call.__name__}(...)"
            )
        self._roles = MODULES if self.is_module else ARGUMENTS
        charges = placement != "reward" and divergence != "none"  # the loss itself has a KL term
        #: Name of an argument -> its role.
        self._given = self._gives(takes, () if charges else ("coef", "reference"))
        roles = {role: name for name, role in self._given.items()}
        taken = roles.get("coef", "coef")
        self.coef_name = taken if taken == "coef" else f"{taken}, taken as coef,"
        kind = "a LossModule built with" if self.is_module else "a function of"
        self.described = self._convention = f"{kind} {', '.join(self._given)}"
        self.has_return = bool(roles.keys() & {"rewards", "advantages"}) or self._requires_return()
        of_old = not (self.is_module or roles.keys() & {"ref_log_probs", "ref_logits"})
        self.takes_old = bool(roles.keys() & {"old_log_probs", "old_logits"})
        # A KL in the rewards is always against ref.
        self.to = "old" if of_old and placement == "loss" else "ref"
        self.coef = 1.0 if charges and "coef" not in roles else COEF
        if divergence == "none":
            self.coef = 0.0
        if self.has_return and charges and "coef" not in roles:
            raise ConfigError(
                f"{self.setting}: takes no coef ({', '.join(self._roles['coef'])}); add one, or "
                "give --placement reward if the KL is in the rewards alone, or --divergence none "
                "if there is no KL"
            )
        self._require_penalty()

    def _requires_return(self) -> bool:
        """Return whether this is a LossModule that fails without rewards and advantages."""
        numbers = Problem(KINDS[0], seed=0).batch
        try:
            with generators_kept():
                if self.is_module:
                    self._module(numbers, COEF, "advantage", "value_target", ("next", "reward"))
        except (Exception, SystemExit):  # other errors of the module are raised again later
            return True
        return False

    def _require_penalty(self) -> None:
        """Refuse options that contradict each other, or leave nothing to judge."""
        none, charged = self.divergence == "none", f"--placement {self.placement}"
        option, rewards = f"--divergence {self.divergence}", self.placement != "loss"
        if rewards and none:
            raise ConfigError(f"{option}: {charged} has nothing to charge; leave one of them out")
        if self.placement == "reward" and self.divergence != "reverse":
            words = "charges k1, whose gradient is that of the reverse KL"
            raise ConfigError(f"{option}: {charged} {words}; leave one of them out")
        if not self.has_return and (rewards or none):
            words = (
                "takes neither rewards nor advantages; take one of them, or leave the option out"
            )
            raise ConfigError(f"{charged if rewards else option}: {self.name} {words}")

    def _gives(
        self, takes: Mapping[str, inspect.Parameter], optional: Sequence[str]
    ) -> dict[str, str]:
        """Return name -> role; critics and ``optional`` roles only where there is no default."""
        open_ = {name: p.default is p.empty for name, p in takes.items()}
        given = {}
        for role, others in self._roles.items():
            name = next((each for each in (role, *others) if each in open_), None)
            if name and (open_[name] or role not in ("critic", *optional)):
                given[name] = role
        for each, required in open_.items():
            if required and each not in given and each not in self.settings:
                raise ConfigError(
                    f"{self.setting}: requires {each}, which the doctor does not pass; rename it "
                    f"to one of {', '.join(self._roles)}, or append {each}=VALUE"
                )
        return given

    def parts(self, problem: Problem, at_logits: bool = False) -> dict[str, Tensor]:
        """Compute expected gradients: ``return`` for coef = 0; ``kl``, the change per unit of coef.

        ``whole`` is the gradient at ``self.coef``. A loss that is only a penalty has no ``return``;
        a loss without a penalty has no ``kl``.
        """
        parts = {"whole": self.expected(problem, self.coef, at_logits)}
        if self.has_return:
            parts["return"] = self.expected(problem, 0.0, at_logits)
        if self.coef:
            parts["kl"] = (parts["whole"] - parts.get("return", 0.0)) / self.coef
        return parts

    def expected(self, problem: Problem, coef: float, at_logits: bool = False) -> Tensor:
        """Compute the expected gradient at a coefficient, see :meth:`gradient`."""
        numbers = problem.numbers(problem.everything, coef, self.placement)
        return self.gradient(numbers, coef, at_logits)

    def gradient(self, numbers: Numbers, coef: float, at_logits: bool = False) -> Tensor:
        """Compute the loss's gradient with respect to the policy's table, flattened.

        With ``at_logits``: with respect to the logits of the M steps in the mask, [M, actions].

        Raises:
            ConfigError: the loss is not a finite number, or has no finite gradient.
            LossError: the user's code raises.
        """
        grad = None
        try:
            value, logits = (self._module if self.is_module else self._function)(numbers, coef)
            at = logits if at_logits else numbers.problem.policy.weight
            if value.requires_grad:
                (grad,) = torch.autograd.grad(value, at, allow_unused=True)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise LossError(f"{self.setting}: raised {with_line(error)}") from error
        if grad is None:
            told = "its value has no gradient in the policy; look for detach() or no_grad()"
            raise ConfigError(f"{self.setting}: {told}")
        for wrong in grad[~grad.isfinite()][:1]:
            raise ConfigError(f"{self.setting}: its gradient is {self._undefined(wrong, coef)}")
        if not at_logits:
            return grad.flatten()
        grad, log_p = grad[numbers.mask] if grad.ndim == 3 else grad, numbers.logits[numbers.mask]
        return grad - log_p.detach().exp() * grad.sum(-1, keepdim=True)  # back through log_softmax

    def _function(self, numbers: Numbers, coef: float) -> tuple[Tensor, Tensor]:
        given = {  # copies: the user's code may write into them
            name: coef if role == "coef" else getattr(numbers, role).clone()
            for name, role in self._given.items()
        }
        return self._scalar(self.call(**given, **self.settings), coef), numbers.logits

    def _module(self, numbers: Numbers, coef: float, *gone: NestedKey) -> tuple[Tensor, Tensor]:
        """Return the sum of the module's terms, and the logits of its actor's first call."""
        problem = numbers.problem
        critic = nn.Linear(problem.kind.states, 1, dtype=DOUBLE)
        parts = {
            "actor": _actor(problem.policy),
            "critic": TensorDictModule(critic, ["observation"], ["state_value"]),
            "reference": _actor(problem.ref),
            "coef": coef,
        }
        given = {name: parts[role] for name, role in self._given.items()}
        seen: list[Tensor] = []
        # A LossModule calls a copy of the network; the copy has this hook too.
        handle = problem.policy.register_forward_hook(lambda *x: seen.append(x[-1]))
        try:
            out = self.call(**given, **self.settings)(_tensordict(numbers).exclude(*gone))
        finally:
            handle.remove()
        if not isinstance(out, TensorDictBase | Mapping):
            return self._scalar(out, coef), seen[0]
        terms = [key for key in out.keys() if isinstance(key, str) and key.startswith("loss_")]
        counted = [key for key in terms if key not in NOT_COUNTED]
        left_out = [key for key in terms if key in NOT_COUNTED]
        if not counted:
            told = "no term whose name begins with loss_; name it so, as TorchRL's losses do"
            raise ConfigError(f"{self.setting}: returned {told}")
        self.described = f"{self._convention}; counted: {', '.join(counted)}"
        self.described += f"; not counted: {', '.join(left_out)}" if left_out else ""
        values = [self._scalar(out[key], coef, f"{key} is") for key in counted]
        return torch.stack(values).sum(), seen[0]

    def _undefined(self, value: Tensor, coef: float) -> str:
        at = "" if coef == self.coef else f" at coef={coef:g}"
        return f"{value.item()}{at}; look for log 0 and 0 / 0"

    def _scalar(self, value: object, coef: float, said: str = "returned") -> Tensor:
        if not isinstance(value, Tensor):
            told = f"{type(value).__name__}; return a tensor, the loss to be minimised"
        elif value.numel() != 1:
            shape = tuple(value.shape)
            told = f"a tensor of shape {shape}; return one number, the loss to be minimised"
        elif not value.isfinite().all():
            told = self._undefined(value, coef)
        else:
            return value.reshape(())
        raise ConfigError(f"{self.setting}: {said} {told}")


def load(option: str, name: str) -> Any:
    """Import the object that an option names: ``package.module:name`` or ``path/file.py:name``."""
    setting = f"{option} {name}"
    source, _, wanted = name.rpartition(":")
    if not source or not wanted:
        raise ConfigError(f"{setting}: write package.module:NAME or path/file.py:NAME")
    return named_in(setting, import_named(setting, source), source, wanted)


def settings_of(words: Sequence[str]) -> dict[str, object]:
    """Parse ``NAME=VALUE`` into keywords; values are written as in klrl's settings."""
    for word in words:
        if "=" not in word:
            raise ConfigError(f"{word}: write NAME=VALUE, a keyword of the loss")
    return {each.key: each.parsed.value() for each in parse(words)}


def _actor(network: nn.Module) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(network, ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )


def _tensordict(numbers: Numbers) -> TensorDict:
    """Make a batch as TorchRL's collectors do: [N, steps]; if there is padding, [M] without it."""
    mask = numbers.mask
    last = mask.sum(1, keepdim=True) - 1
    done = torch.zeros_like(mask).scatter(1, last, True)[..., None]
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
            "done": done,
            "terminated": done,
            "ref_log_prob": numbers.ref_log_probs.detach(),
        },
    }
    data = TensorDict(frames, batch_size=mask.shape)
    return data if mask.all() else data[mask]
