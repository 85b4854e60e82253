"""Epochs of minibatches over one rollout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor

from klrl.config import AdamWConfig, ClipConfig, Config, KLPENConfig, OptimConfig
from klrl.errors import NonFiniteError
from klrl.losses import BetaRule, line_search, make_beta_rule, make_loss
from klrl.losses.policy import Coefficients, LossTerms
from klrl.models.actor import Agent, trainable

#: What the learner reads of a batch beside the family's parameters and sample.
BATCH_KEYS = ("observation", "action_log_prob", "advantage", "value_target", "state_value")


@dataclass(frozen=True)
class Learned:
    """What one iteration's update gave; means over its minibatches where not said otherwise.

    Attributes:
        objective, critic, entropy: the loss terms as they were minimised.
        policy_entropy: nats per frame.
        kl_ref: coef * KL(policy||reference) as the loss charged it.
        kl_old: KL(old||new) over the whole rollout, after the update, nats per frame.
        alpha: share of the actor's step that was kept (``loss.line_search``).
        beta: the coefficient that the update started with.
        grad_norm: Euclidean norm before clipping.
        lr: the learning rate.
        epochs: passes made (``loss.target_kl`` may end them early).
    """

    objective: float
    critic: float
    entropy: float
    policy_entropy: float
    kl_ref: float
    kl_old: float
    alpha: float
    beta: float
    grad_norm: float
    lr: float
    epochs: int


class Learner:
    """PPO's update: policy and critic from one rollout, then beta from its KL.

    Args:
        config: the job.
        agent: the networks, changed in place.
        reference_estimator: how the loss charges KL(policy||reference), if it does.
    """

    def __init__(
        self, config: Config, agent: Agent, reference_estimator: str | None = None
    ) -> None:
        self.config, self.agent = config, agent
        self.loss = make_loss(config.loss, agent.family, reference_estimator)
        self.beta_rule: BetaRule = make_beta_rule(config.loss)
        self.parameters = trainable(agent)
        self.optimizer = make_optimizer(config.optim, self.parameters)
        self._target_kl = config.loss.target_kl if isinstance(config.loss, ClipConfig) else None

    def update(self, batch: TensorDictBase, progress: float, kl_coef: float = 0.0) -> Learned:
        """Learn from a rollout.

        Args:
            batch: [N, T], with advantages; annotated where the loss charges KL to the reference.
            progress: share of the run that is over, 0..1, for the learning rate.
            kl_coef: ``kl.coef``, for a loss that charges KL to the reference.

        Raises:
            NonFiniteError: a loss or a gradient is NaN or infinite.
        """
        lr, beta = self._anneal(progress), self.beta_rule.beta
        frames = self._flatten(batch)
        actor_before = [p.detach().clone() for p in self.agent.policy_net.parameters()]
        steps: list[tuple[LossTerms, Tensor]] = []
        epochs = 0
        while epochs < self.config.learner.epochs:
            epochs += 1
            made = [self._step(minibatch, kl_coef) for minibatch in self._minibatches(frames)]
            _require_finite(made)
            steps += made
            if self._target_kl and self.kl_old(frames) > 1.5 * self._target_kl:
                break
        kl_old = self.kl_old(frames)
        if not self.beta_rule.every_forward:
            self.beta_rule.update(kl_old)  # on the KL before a line search
        alpha, kl_old = self._hold(frames, actor_before, kl_old)

        def mean(name: str) -> float:
            return float(torch.stack([getattr(terms, name) for terms, _ in steps]).mean())

        return Learned(
            mean("objective"),
            mean("critic"),
            mean("entropy"),
            mean("policy_entropy"),
            kl_ref=mean("kl_ref"),
            kl_old=kl_old,
            alpha=alpha,
            beta=beta,
            grad_norm=float(torch.stack([norm for _, norm in steps]).mean()),
            lr=lr,
            epochs=epochs,
        )

    def _hold(
        self, frames: dict[str, Tensor], actor_before: list[Tensor], kl: float
    ) -> tuple[float, float]:
        """``loss.line_search``: bring KL(old||new) to its target; (alpha, KL) as it ends."""
        loss = self.config.loss
        if not isinstance(loss, KLPENConfig) or not line_search.due(
            loss.line_search, kl, loss.dtarg
        ):
            return 1.0, kl
        parameters = list(self.agent.policy_net.parameters())
        return line_search.search(
            parameters, actor_before, lambda: self.kl_old(frames), kl, loss.dtarg
        )

    def _step(self, minibatch: dict[str, Tensor], kl_coef: float) -> tuple[LossTerms, Tensor]:
        """One gradient step; returns its loss terms and the gradient's norm."""
        observation = minibatch["observation"]
        params = self._params(observation)
        value = self.agent.value_net(observation).squeeze(-1)
        coefficients = Coefficients(
            beta=value.new_tensor(self.beta_rule.beta), kl_ref=value.new_tensor(kl_coef)
        )
        terms = self.loss(params, value, minibatch, coefficients)
        self.optimizer.zero_grad()
        terms.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.optim.max_grad_norm)
        self.optimizer.step()
        if self.beta_rule.every_forward:
            self.beta_rule.update(float(terms.kl_old))
        return terms, norm

    @torch.no_grad()
    def kl_old(self, frames: dict[str, Tensor]) -> float:
        """Mean KL(old||new) over a rollout in closed form, nats per frame."""
        old = {key: frames[key] for key in self.agent.family.param_keys}
        return float(self.agent.family.kl(old, self._params(frames["observation"])).mean())

    def _params(self, observation: Tensor) -> dict[str, Tensor]:
        outputs = self.agent.policy_net(observation)
        return dict(zip(self.agent.family.param_keys, outputs, strict=True))

    def _flatten(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """[N, T, ...] -> [N T, ...], advantages and values without their last dimension."""
        family = self.agent.family
        flat = {
            key: batch.get(key).flatten(0, 1)
            for key in {*BATCH_KEYS, *family.param_keys, family.sample_key}
        }
        for key in ("advantage", "value_target", "state_value"):
            flat[key] = flat[key].squeeze(-1)
        if self.loss.reference_estimator is not None:
            for key in ("log_prob", *family.param_keys):
                flat[f"ref_{key}"] = batch.get(("ref", key)).flatten(0, 1)
        return flat

    def _minibatches(self, frames: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Every frame once, shuffled, in equal parts."""
        count = frames["observation"].shape[0]
        order = torch.randperm(count).to(frames["observation"].device)
        for index in order.chunk(self.config.learner.minibatches):
            yield {key: value[index] for key, value in frames.items()}

    def _anneal(self, progress: float) -> float:
        """Linear from lr to lr_floor."""
        c = self.config.optim
        lr = c.lr + (c.lr_floor - c.lr) * min(progress, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr


def make_optimizer(
    config: OptimConfig, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Adam or AdamW, in torch's fused form."""
    if isinstance(config, AdamWConfig):
        return torch.optim.AdamW(
            parameters, config.lr, eps=config.eps, weight_decay=config.weight_decay, fused=True
        )
    return torch.optim.Adam(parameters, config.lr, eps=config.eps, fused=True)


def _require_finite(steps: list[tuple[LossTerms, Tensor]]) -> None:
    """Name the first term, of the first minibatch of an epoch, that is not finite."""
    names = ("loss/objective", "loss/critic", "loss/entropy", "loss/kl_ref", "gradient")
    values = torch.stack(
        [torch.stack([t.objective, t.critic, t.entropy, t.kl_ref, norm]) for t, norm in steps]
    )
    bad = (~torch.isfinite(values)).nonzero()
    if len(bad):
        minibatch, term = bad[0].tolist()
        raise NonFiniteError(
            f"{names[term]} is {float(values[minibatch, term])} in minibatch {minibatch}; "
            "lower optim.lr or look at the rewards"
        )
