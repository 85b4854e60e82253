"""KLPENPPOLoss and ClipPPOLoss as TorchRL LossModules, for TorchRL's own trainers and loops.

TorchRL computes the terms; klrl moves beta (``klrl/losses/beta.py``) and can add the KL to a
reference. TorchRL 0.14.1's KLPENPPOLoss moves beta inside ``forward``: in evaluation too, and
between the loss and its gradient. The one place where that is held back is :func:`_beta_held`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torchrl.objectives
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor

from klrl.kl.estimators import exact_kl
from klrl.kl.policies import refuse_nested_policy
from klrl.kl.reference import freeze
from klrl.losses.beta import factor
from klrl.losses.functional import reference_kl

_RENAMED = {"entropy_coef": "entropy_coeff", "critic_coef": "critic_coeff"}


class _WithReference:
    """What both losses share: old spellings, and coef * KL(policy||reference) as a further term."""

    actor_network: ProbabilisticTensorDictSequential

    def _take_reference(
        self,
        reference: ProbabilisticTensorDictSequential | None,
        coeff: float,
        estimator: str,
    ) -> None:
        if estimator not in ("exact", "k1", "k2", "k3"):
            raise ValueError(f"ref_kl_estimator={estimator}: choose exact, k1, k2 or k3")
        # Outside the parameters: an optimiser over loss.parameters() must not move it.
        self.__dict__["reference"] = None if reference is None else freeze(reference)
        self.ref_kl_estimator = estimator
        self.register_buffer("ref_kl_coeff", torch.tensor(float(coeff)))  # type: ignore[attr-defined]

    def _add_reference_kl(self, out: TensorDict, data: TensorDictBase) -> TensorDict:
        reference = self.__dict__["reference"]
        if reference is None:
            return out
        with self._live_parameters():
            dist = self.actor_network.get_dist(data.copy())
        with torch.no_grad():
            ref_dist = reference.get_dist(data.copy())
        if self.ref_kl_estimator == "exact":
            kl = exact_kl(dist, ref_dist)
        else:
            keys = self.tensor_keys  # type: ignore[attr-defined]
            action, old = data.get(keys.action), data.get(keys.sample_log_prob)
            log_probs = dist.log_prob(action), old, ref_dist.log_prob(action)
            kl = reference_kl(self.ref_kl_estimator, *log_probs)
        out.set("kl_ref", kl.detach().mean())
        reduced = kl.sum() if self.reduction == "sum" else kl.mean()  # type: ignore[attr-defined]
        if self.reduction == "none":  # type: ignore[attr-defined]
            reduced = kl
        return out.set("loss_kl_ref", self.ref_kl_coeff.to(kl) * reduced)  # type: ignore[attr-defined]

    def _live_parameters(self) -> Any:
        if not self.functional:  # type: ignore[attr-defined]
            return nullcontext()
        return self.actor_network_params.to_module(self.actor_network)  # type: ignore[attr-defined]


class KLPENPPOLoss(_WithReference, torchrl.objectives.KLPENPPOLoss):
    """w A - beta KL(old||new), with a beta that moves once per iteration, bounded.

    Values and gradients are TorchRL's at the same beta. No forward moves beta: call
    :meth:`update_beta` once per iteration with the KL of the whole rollout, or register
    :class:`klrl.losses.BetaHook` with a TorchRL trainer. The data must hold the parameters of the
    distribution that sampled it (``return_log_prob=True`` policies write them).

    Args:
        actor_network: the policy.
        critic_network: the critic.
        dtarg: target of KL(old||new), nats per frame.
        beta: its first coefficient.
        increment: factor above 1.5 dtarg, >= 1.
        decrement: factor below dtarg / 1.5, in (0, 1].
        beta_min: lower bound.
        beta_max: upper bound.
        beta_update: ``iteration``, or ``forward`` for TorchRL's rule (in training with gradient).
        reference: a policy to stay near; copied and frozen.
        ref_kl_coeff: weight of KL(policy||reference), per nat.
        ref_kl_estimator: exact, or k1, k2, k3 with the ratio to the policy that sampled.
        **kwargs: as TorchRL's: samples_mc_kl, entropy_bonus, samples_mc_entropy, entropy_coeff,
            critic_coeff, loss_critic_type, normalize_advantage, separate_losses, reduction,
            functional, clip_value, ... The old spellings entropy_coef and critic_coef are taken.

    Raises:
        ValueError: increment < 1, decrement > 1, bounds that do not hold beta, an unknown
            beta_update or estimator; an actor that ends in another policy.
        KeyError: the data lacks the parameters of the distribution that sampled it.
    """

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        critic_network: TensorDictModule | None = None,
        *,
        dtarg: float = 0.01,
        beta: float = 1.0,
        increment: float = 2.0,
        decrement: float = 0.5,
        beta_min: float = 1e-4,
        beta_max: float = 1e4,
        beta_update: str = "iteration",
        reference: ProbabilisticTensorDictSequential | None = None,
        ref_kl_coeff: float = 0.0,
        ref_kl_estimator: str = "exact",
        **kwargs: Any,
    ) -> None:
        refuse_nested_policy("actor_network", actor_network)
        if beta_update not in ("iteration", "forward"):
            raise ValueError(f"beta_update={beta_update}: choose iteration or forward")
        if not 0 < beta_min <= beta <= beta_max:
            raise ValueError(
                f"beta={beta}: give 0 < beta_min={beta_min} <= beta <= beta_max={beta_max}"
            )
        if not increment >= 1:
            raise ValueError(f"increment={increment}: give a number >= 1")
        if not 0 < decrement <= 1:
            raise ValueError(f"decrement={decrement}: give a number in (0, 1]")
        super().__init__(
            actor_network,
            critic_network,
            dtarg=dtarg,
            beta=float(beta),  # TorchRL cannot halve an integer buffer
            increment=increment,
            decrement=decrement,
            **_new_spellings(kwargs),
        )
        self.beta_min, self.beta_max, self.beta_update = beta_min, beta_max, beta_update
        self._take_reference(reference, ref_kl_coeff, ref_kl_estimator)

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """The loss terms of a minibatch (``loss_*``), ``kl`` and what TorchRL logs."""
        self._require_parameters(tensordict)
        with _beta_held(self):
            out = super().forward(tensordict)
        if self.beta_update == "forward" and self.training and torch.is_grad_enabled():
            self.update_beta(float(out["kl"].mean()))
        return self._add_reference_kl(out, tensordict)

    def update_beta(self, kl: float | Tensor) -> float:
        """Move beta by the documented rule, on the KL(old||new) of one iteration; returns it.

        Args:
            kl: mean over the whole rollout after the update, nats per frame.
        """
        moved = float(self.beta) * factor(
            float(kl), self.dtarg, float(self.increment), float(self.decrement)
        )
        self.beta.fill_(min(max(moved, self.beta_min), self.beta_max))
        return float(self.beta)

    @torch.no_grad()
    def kl_old_new(self, tensordict: TensorDictBase) -> Tensor:
        """Mean KL(old||new) of a rollout in closed form, nats per frame; moves nothing."""
        self._require_parameters(tensordict)
        old = self.actor_network.build_dist_from_params(tensordict)
        with self._live_parameters():
            new = self.actor_network.get_dist(tensordict.copy())
        return exact_kl(old, new).mean()

    def _require_parameters(self, tensordict: TensorDictBase) -> None:
        keys = self.actor_network.dist_params_keys
        missing = [key for key in keys if tensordict.get(key, None) is None]
        if missing:
            raise KeyError(
                f"the data lacks {missing}: KL(old||new) needs the parameters of the distribution "
                "that sampled it; collect with the actor, or store what it writes"
            )


class ClipPPOLoss(_WithReference, torchrl.objectives.ClipPPOLoss):
    """TorchRL's clipped PPO, with KL(policy||reference) as a further term where it is asked for.

    Args:
        actor_network: the policy.
        critic_network: the critic.
        reference: a policy to stay near; copied and frozen.
        ref_kl_coeff: weight of KL(policy||reference), per nat.
        ref_kl_estimator: exact, or k1, k2, k3 with the ratio to the policy that sampled.
        **kwargs: as TorchRL's ClipPPOLoss; old spellings are taken.

    Raises:
        ValueError: an unknown estimator, or an actor that ends in another policy.
    """

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        critic_network: TensorDictModule | None = None,
        *,
        reference: ProbabilisticTensorDictSequential | None = None,
        ref_kl_coeff: float = 0.0,
        ref_kl_estimator: str = "exact",
        **kwargs: Any,
    ) -> None:
        refuse_nested_policy("actor_network", actor_network)
        super().__init__(actor_network, critic_network, **_new_spellings(kwargs))
        self._take_reference(reference, ref_kl_coeff, ref_kl_estimator)

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """The loss terms of a minibatch (``loss_*``) and what TorchRL logs."""
        return self._add_reference_kl(super().forward(tensordict), tensordict)


class BetaHook:
    """Moves a :class:`KLPENPPOLoss`'s beta once per iteration of a TorchRL trainer.

    >>> hook = BetaHook(loss)
    >>> hook.register(trainer)

    Attributes:
        kl: KL(old||new) of the last iteration, nats per frame.
    """

    def __init__(self, loss: KLPENPPOLoss) -> None:
        self.loss = loss
        self.kl = float("nan")
        self._batch: TensorDictBase | None = None

    def register(self, trainer: Any, name: str = "beta") -> None:
        """Keep each rollout, and move beta after its optimisation steps."""
        trainer.register_module(name, self)
        trainer.register_op("batch_process", self.keep)
        trainer.register_op("post_steps", self.move)

    def keep(self, batch: TensorDictBase) -> TensorDictBase:
        """Remember the rollout that is about to be learned from."""
        self._batch = batch
        return batch

    def move(self) -> None:
        """Measure KL(old||new) on it and move beta."""
        if self._batch is not None:
            self.kl = float(self.loss.kl_old_new(self._batch))
            self.loss.update_beta(self.kl)
            self._batch = None

    def state_dict(self) -> dict[str, Any]:
        """Nothing: beta is a buffer of the loss."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load nothing: :meth:`state_dict` is empty."""


@contextmanager
def _beta_held(loss: KLPENPPOLoss) -> Iterator[None]:
    """Let TorchRL's forward multiply beta by 1: it would move it between loss and gradient."""
    factors = loss.increment, loss.decrement
    loss.increment = loss.decrement = 1.0
    try:
        yield
    finally:
        loss.increment, loss.decrement = factors


def _new_spellings(kwargs: dict[str, Any]) -> dict[str, Any]:
    both = [old for old, new in _RENAMED.items() if old in kwargs and new in kwargs]
    if both:
        raise ValueError(f"{both[0]}: given beside {_RENAMED[both[0]]}; give one of them")
    return {_RENAMED.get(name, name): value for name, value in kwargs.items()}
