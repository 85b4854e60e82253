"""KLPENPPOLoss and ClipPPOLoss as TorchRL LossModules, for TorchRL's own trainers and loops.

TorchRL computes its loss terms; klrl can add the KL to a reference, and updates beta itself
(:meth:`KLPENPPOLoss.update_beta`). TorchRL 0.14.1's KLPENPPOLoss changes beta inside ``forward``,
even in evaluation. The gradient then has the new beta, but the loss the old one.
:func:`_mended` prevents this.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torchrl.objectives
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    dispatch,
)
from torch import Tensor
from torch.distributions import Distribution, Independent

from klrl.kl.coefficient import KeepsCoefficient
from klrl.kl.estimators import ESTIMATORS, exact_kl, sum_beyond
from klrl.kl.policies import (
    Key,
    as_key,
    keep_pre_tanh,
    leaves,
    require_policy,
    require_reference,
    score,
    under_keys_of,
    where_kept,
)
from klrl.kl.reference import FrozenPolicy, flat_policy
from klrl.kl.saturated import any_lost
from klrl.kl.shapes import add_heads
from klrl.losses.beta import doubling, multiplied
from klrl.losses.terms import reference_kl

_RENAMED = {"entropy_coef": "entropy_coeff", "critic_coef": "critic_coeff"}


if TYPE_CHECKING:
    from torchrl.objectives import PPOLoss as _PPOLoss
    from torchrl.trainers import Trainer
else:
    _PPOLoss = object  # TorchRL's metaclass would add PPOLoss's forward to the mixin


class _WithReference(KeepsCoefficient, _PPOLoss):
    """Base of the two losses below; adds the term ref_kl_coef * KL(policy||reference)."""

    coefficient_name = "ref_kl_coef"
    actor_network: ProbabilisticTensorDictSequential
    reference: FrozenPolicy | None
    ref_kl_coef: Tensor
    _in_keys: list[Key] | None
    _out_keys: list[Key] | None

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential | None = None,
        critic_network: TensorDictModule | None = None,
        *,
        reference: ProbabilisticTensorDictSequential | None = None,
        ref_kl_coef: float | Tensor = 0.0,
        ref_kl_coeff: float | Tensor | None = None,
        ref_kl_estimator: str = "exact",
        **kwargs: Any,
    ) -> None:
        actor_network, critic_network = _networks(actor_network, critic_network, kwargs)
        kwargs = {_RENAMED.get(name, name): value for name, value in kwargs.items()}
        super().__init__(actor_network, critic_network, **kwargs)
        known = (*ESTIMATORS, "exact")
        if ref_kl_estimator not in known:
            raise ValueError(
                f"ref_kl_estimator={ref_kl_estimator}: choose one of {', '.join(known)}"
            )
        if reference is not None:
            require_policy("reference", reference)
            require_reference("reference", reference)
        self.reference = None if reference is None else FrozenPolicy.copy_of(reference)
        self.ref_kl_estimator = ref_kl_estimator
        self.keep_coefficient(ref_kl_coef, ref_kl_coeff)
        self._set_in_keys()

    def _set_in_keys(self) -> None:
        super()._set_in_keys()
        reference = getattr(self, "reference", None)  # not yet there in the constructor
        if reference is not None:
            self._in_keys = list(dict.fromkeys([*(self._in_keys or ()), *reference.in_keys]))

    @property
    def out_keys(self) -> list[Key]:
        """The keys whose values a call with keyword arguments returns, in order."""
        if self._out_keys is None:
            keys = [key for key in super().out_keys if key != "loss_critic" or self._has_critic]
            more = () if self.reference is None else ("loss_kl_ref", "kl_ref")
            self._out_keys = [*keys, *more]
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values: list[Key]) -> None:
        self._out_keys = values

    def _of_frames(self, data: TensorDictBase) -> TensorDictBase:
        """Copy: actions under the actor's keys, samples before tanh, one log-prob per frame."""
        key, dims = self.tensor_keys.sample_log_prob, self._frame_dims(data)
        data = under_keys_of(self.actor_network, data.copy(), _listed(self.tensor_keys.action))
        keep_pre_tanh(self.actor_network, data, _listed(key))
        stored = None if isinstance(key, list) else data.get(key, None)  # TorchRL adds a list's
        return data if stored is None else data.set(key, sum_beyond(stored, dims))

    def _add_reference_kl(self, out: TensorDict, data: TensorDictBase) -> TensorDict:
        if self.reference is None:
            return out
        kl = self._per_frame(self._reference_kl(self.reference, data), data)
        out.set("kl_ref", self._reduce_loss(kl.detach(), data, reduction="mean"))
        return out.set("loss_kl_ref", self.ref_kl_coef.to(kl) * self._reduce_loss(kl, data))

    def _reference_kl(self, reference: FrozenPolicy, data: TensorDictBase) -> Tensor:
        """Compute KL(policy||reference) of every frame."""
        if self.ref_kl_estimator == "exact":
            with self._live_parameters():
                dist = self.actor_network.get_dist(data.copy())
            with torch.no_grad():
                ref_dist = reference.get_dist(data.copy())
            return exact_kl(dist, ref_dist)
        dims = self._frame_dims(data)
        new = leaves(self._get_cur_log_prob(data.copy())[0])
        with torch.no_grad():
            ref = [
                score(reference, under_keys_of(reference, data, _listed(self.tensor_keys.action)))
            ]
        old = [data.get(key) for key in _listed(self.tensor_keys.sample_log_prob)]
        heads = (sum_beyond(add_heads(each), dims) for each in (new, old, ref))
        return reference_kl(self.ref_kl_estimator, *heads)

    def _get_cur_log_prob(self, tensordict: TensorDictBase, params: Any = None) -> Any:
        # Read the sample before tanh, since TorchRL's inverse of tanh fails for saturated actions.
        known = tensordict.copy()  # super() overwrites the sampling policy's parameters
        log_prob, dist, composite = super()._get_cur_log_prob(tensordict, params)
        dist = dist.base_dist if isinstance(dist, _Joint) else dist
        if hasattr(self.actor_network, "dist_sample_keys"):
            log_prob = where_kept(self.actor_network, known, dist, log_prob)
        if isinstance(log_prob, Tensor):
            log_prob = self._per_frame(log_prob, tensordict)
        return log_prob, dist, composite

    def _get_entropy(self, dist: Distribution, adv_shape: torch.Size) -> Tensor | TensorDictBase:
        entropy = super()._get_entropy(dist, adv_shape)  # of a composite: with its batch shape
        joint = isinstance(entropy, Tensor)
        return sum_beyond(entropy, len(adv_shape)).unsqueeze(-1) if joint else entropy

    def _frame_dims(self, data: TensorDictBase) -> int:
        """Count the batch dimensions, and that of agents if each agent has an advantage."""
        like = data.get(self.tensor_keys.advantage, None)
        if like is None:  # TorchRL will compute it, in the reward's shape
            like = data.get(as_key(("next", self.tensor_keys.reward)), None)
        return data.ndim if like is None else max(data.ndim, like.ndim - 1)

    def _per_frame(self, value: Tensor, data: TensorDictBase) -> Tensor:
        """Sum a KL or log-prob over all dimensions after the first :meth:`_frame_dims`."""
        dims = self._frame_dims(data)
        if value.ndim < dims:
            raise ValueError(
                f"a KL or log-prob (a composite's is summed over agents) is {list(value.shape)}, "
                f"the advantage has {dims + 1} dimensions: give the data a batch dimension for "
                "agents, or one advantage for the team"
            )
        return sum_beyond(value, dims)

    def _live_parameters(self) -> AbstractContextManager[object]:
        if not self.functional:
            return nullcontext()
        return self.actor_network_params.to_module(self.actor_network)


class KLPENPPOLoss(_WithReference, torchrl.objectives.KLPENPPOLoss):
    """PPO with the penalty beta * KL(old||new); beta is bounded, and changes once per iteration.

    Values and gradients equal TorchRL's at the same beta. By default no forward changes beta: call
    :meth:`update_beta` once per iteration with the KL of the whole rollout, or register
    :class:`klrl.losses.BetaHook` with a TorchRL trainer. The data must contain the parameters of
    the sampling distribution, which an actor writes when it samples.

    Args:
        actor_network: the policy.
        critic_network: the critic.
        dtarg: target of KL(old||new), nats per frame.
        beta: initial coefficient of KL(old||new).
        increment: factor on beta if the KL is above 1.5 dtarg, >= 1.
        decrement: factor on beta if the KL is below dtarg / 1.5, in (0, 1].
        beta_min: lower bound of beta.
        beta_max: upper bound of beta.
        beta_update: ``iteration``: only :meth:`update_beta` changes beta. ``forward``: each forward
            in training mode changes it too, by the minibatch's KL.
        reference: a policy to stay near; copied and frozen. A
            :class:`~klrl.kl.reference.FrozenPolicy` is not copied.
        ref_kl_coef: weight of KL(policy||reference) in the loss, per nat; ``normalize_advantage``
            does not rescale this term. The weight may be changed later.
        ref_kl_coeff: alias of ``ref_kl_coef``.
        ref_kl_estimator: exact; or k1, k2, k3, weighted by pi_theta / pi_old.
        **kwargs: arguments of TorchRL's loss: samples_mc_kl, entropy_bonus, samples_mc_entropy,
            entropy_coeff, critic_coeff, loss_critic_type, normalize_advantage, separate_losses,
            reduction, functional, clip_value, ... The old spellings entropy_coef and critic_coef
            are accepted.
    """

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential | None = None,
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
        ref_kl_coef: float | Tensor = 0.0,
        ref_kl_coeff: float | Tensor | None = None,
        ref_kl_estimator: str = "exact",
        **kwargs: Any,
    ) -> None:
        if beta_update not in ("iteration", "forward"):
            raise ValueError(f"beta_update={beta_update}: choose iteration or forward")
        if kwargs.get("delay_actor"):
            raise ValueError(
                "delay_actor=True: the penalised KL would not be KL(old||new), which adapts beta; "
                "drop it, or use ClipPPOLoss"
            )
        if not 0 < beta_min <= beta <= beta_max:
            raise ValueError(
                f"beta={beta}: give 0 < beta_min={beta_min} <= beta <= beta_max={beta_max}"
            )
        super().__init__(
            actor_network,
            critic_network,
            dtarg=dtarg,
            beta=float(beta),  # TorchRL cannot halve an integer beta
            increment=increment,
            decrement=decrement,
            reference=reference,
            ref_kl_coef=ref_kl_coef,
            ref_kl_coeff=ref_kl_coeff,
            ref_kl_estimator=ref_kl_estimator,
            **kwargs,
        )
        self.beta_min, self.beta_max, self.beta_update = beta_min, beta_max, beta_update

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Compute the loss terms of a minibatch (``loss_*``), ``kl`` and TorchRL's metrics."""
        self._require_parameters(tensordict)
        old = self.actor_network.build_dist_from_params(tensordict)
        if isinstance(old, CompositeDistribution) and any_lost(old, tensordict, "of its heads"):
            warnings.warn(
                "KL(old||new) of a composite is sampled, and draws of its TanhNormal lie on the "
                "bounds, where their log-prob is lost: use ClipPPOLoss, or float64",
                stacklevel=2,
            )
        tensordict = self._of_frames(tensordict)
        more = len(old.batch_shape) - self._frame_dims(tensordict)
        with _mended(self, more):
            out = super().forward(tensordict)
        if self.beta_update == "forward" and self.training and torch.is_grad_enabled():
            self.update_beta(self._reduce_loss(out["kl"], tensordict, reduction="mean"))
        return self._add_reference_kl(out, tensordict)

    def update_beta(self, kl: float | Tensor) -> float:
        """Multiply beta by ``increment``, ``decrement`` or 1, within bounds; return the new beta.

        ``kl`` is the mean KL(old||new) of an iteration's whole rollout after the update, nats per
        frame. A KL that is not finite is ignored with a warning.
        """
        increment, decrement = float(self.increment), float(self.decrement)
        factor = partial(doubling, dtarg=self.dtarg, increment=increment, decrement=decrement)
        beta = multiplied(float(self.beta), float(kl), factor, self.beta_min, self.beta_max)
        return float(self.beta.fill_(beta))

    @torch.no_grad()
    def kl_old_new(self, tensordict: TensorDictBase) -> Tensor:
        """Compute the mean KL(old||new) of a rollout in closed form, nats per frame."""
        self._require_parameters(tensordict)
        old = self.actor_network.build_dist_from_params(tensordict)
        with self._live_parameters():
            new = self.actor_network.get_dist(tensordict.copy())
        kl = self._per_frame(exact_kl(old, new), tensordict)
        return self._reduce_loss(kl, tensordict, reduction="mean")

    def _require_parameters(self, tensordict: TensorDictBase) -> None:
        keys = getattr(self.actor_network, "dist_params_keys", [])
        missing = [key for key in keys if tensordict.get(key, None) is None]
        if missing:
            raise KeyError(
                f"the data lacks {missing}: KL(old||new) needs the parameters of the distribution "
                "that sampled the action; collect with the actor, or store all that it writes"
            )


class ClipPPOLoss(_WithReference, torchrl.objectives.ClipPPOLoss):
    """TorchRL's clipped PPO, with KL(policy||reference) as an optional term.

    ``reference`` and ``ref_kl_*`` are as in :class:`KLPENPPOLoss`; the other arguments are
    TorchRL's, including old spellings.
    """

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Compute the loss terms of a minibatch (``loss_*``) and TorchRL's metrics."""
        tensordict = self._of_frames(tensordict)
        return self._add_reference_kl(super().forward(tensordict), tensordict)


class BetaHook:
    """Updates the beta of a :class:`KLPENPPOLoss` once per iteration of a TorchRL trainer.

    >>> hook = BetaHook(loss)
    >>> hook.register(trainer)
    """

    def __init__(self, loss: KLPENPPOLoss) -> None:
        self.loss = loss
        self.kl = float("nan")
        self._batch: TensorDictBase | None = None

    def register(self, trainer: Trainer, name: str = "beta") -> None:
        """Register with a trainer, which then calls :meth:`keep` and :meth:`move`."""
        trainer.register_module(name, self)
        trainer.register_op("batch_process", self.keep)
        trainer.register_op("post_steps", self.move)

    def keep(self, batch: TensorDictBase) -> TensorDictBase:
        """Store the rollout before its optimisation steps."""
        self._batch = batch
        return batch

    def move(self) -> None:
        """After the optimisation steps, measure KL(old||new) on the rollout, and update beta."""
        if self._batch is not None:
            self.kl = float(self.loss.kl_old_new(self._batch))
            self.loss.update_beta(self.kl)
            self._batch = None

    def state_dict(self) -> dict[str, object]:
        """Return an empty dict: beta is a buffer of the loss."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Do nothing: :meth:`state_dict` is empty."""


class _Joint(Independent):
    """The distribution of a whole frame: dimensions that the advantage lacks are one event."""


@contextmanager
def _mended(loss: KLPENPPOLoss, more: int) -> Iterator[None]:
    """Keep TorchRL's forward from changing beta; let KLs add over the last ``more`` dimensions."""
    # With dtarg = NaN, TorchRL's comparisons are false, so its forward does not write to beta.
    # torch.compile could not compile such a write.
    dtarg, loss.dtarg = loss.dtarg, math.nan
    # The backward pass reads beta, which update_beta may have changed in place by then.
    beta, loss.beta = loss.beta, loss.beta.clone()

    def joint(make: Callable[..., Distribution], data: TensorDictBase) -> Distribution:
        dist = make(data)  # one of the two methods may call the other
        return dist if isinstance(dist, _Joint) else _Joint(dist, more)

    names, actor = ("get_dist", "build_dist_from_params") if more > 0 else (), loss.actor_network
    actor.__dict__.update({name: partial(joint, getattr(actor, name)) for name in names})
    try:
        yield
    finally:
        loss.dtarg, loss.beta = dtarg, beta
        for name in names:
            del actor.__dict__[name]


def _listed(keys: Key | list[Key]) -> list[Key]:
    return list(keys) if isinstance(keys, list) else [keys]


def _networks(
    actor: TensorDictModule | None, critic: TensorDictModule | None, arguments: dict[str, object]
) -> tuple[ProbabilisticTensorDictSequential, TensorDictModule | None]:
    """Return the networks; the user may also give them as ``actor`` and ``critic``."""
    given = {"actor": actor, "critic": critic}
    for name, value in given.items():
        other = arguments.pop(name, None)
        if value is not None and other is not None:
            raise ValueError(f"{name} and {name}_network name one setting: give one of them")
        given[name] = value if other is None else other
    actor = flat_policy(given["actor"])
    require_policy("actor_network", actor, keys=False)  # as TorchRL does
    return actor, given["critic"]
