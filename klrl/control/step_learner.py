"""The update of a control run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from klrl.config import Config, factory
from klrl.control.actor import Agent
from klrl.control.compiled import Prepared, check_inputs, choose, package_path, prepare
from klrl.control.networks import in_order, linears
from klrl.control.step import Adam, Columns, Problem
from klrl.losses import line_search
from klrl.losses.beta import BetaRule
from klrl.losses.policy import make_loss
from klrl.train.learner import Learned, require_finite


class Learner:
    """PPO's update: policy and critic from one rollout, then beta from its KL.

    The gradient steps themselves are :mod:`klrl.control.step`'s, run as
    :mod:`klrl.control.compiled` prepares them; nothing waits for the device between two
    minibatches.

    Args:
        config: the job.
        agent: the networks, changed in place; their parameters become views of one tensor.
        reference_estimator: how the loss charges KL(policy||reference), if it does.
        mode: how the step is to run: auto, false, jit or aot.

    Attributes:
        mode: how it will run, false, jit or aot: known before the first rollout.
    """

    def __init__(
        self,
        config: Config,
        agent: Agent,
        reference_estimator: str | None = None,
        mode: str = "false",
    ) -> None:
        self.config, self.agent = config, agent
        self.loss = make_loss(config.loss, agent.family, reference_estimator)
        self._metrics = (*self.loss.measures, "grad_norm")
        self.beta_rule: BetaRule = self.loss.beta_rule()
        self.parameters = in_order(agent)
        self.optimizer: Adam = factory("optim", config.optim, config.domain)(
            config.optim, self.parameters
        )
        #: Told what the step is, at the first minibatch.
        self.say: Callable[[str], None] = lambda _: None
        self._columns: Columns | None = None
        self._prepared: Prepared | None = None
        chosen = choose(
            mode, config, self.optimizer.flat.device, lambda: package_path(*self.foresee())
        )
        self.mode, self._why = chosen.mode, chosen.why

    def foresee(self) -> tuple[Problem, tuple[Tensor, ...]]:
        """What a step is built from, and arguments laid out as the first minibatch's will be.

        No random number is used up; the numbers in the arguments mean nothing.
        """
        count = self.config.frames_per_iteration // self.config.learner.minibatches
        with torch.random.fork_rng(devices=[]):
            frames = self._flatten(one_frame(self.agent))
            frames |= self.loss.draw(frames)
        columns = Columns(frames)
        rows = frames["advantage"].new_zeros(count, sum(columns.widths))
        return self._problem(columns), (*self.optimizer.tensors, rows, rows.new_zeros(3))

    def _problem(self, columns: Columns) -> Problem:
        return Problem(self.agent, self.loss, self.optimizer.settings, columns)

    def update(self, batch: TensorDictBase, progress: float, kl_coef: float = 0.0) -> Learned:
        """Learn from a rollout.

        Args:
            batch: [N, T], with advantages; annotated where the loss charges KL to the reference.
            progress: share of the run that is over, 0..1, for the learning rate.
            kl_coef: ``kl.coef``, for a loss that charges KL to the reference.

        Raises:
            NonFiniteError: a loss or a gradient is NaN or infinite.
        """
        lr, beta = self._lr(progress), self.beta_rule.beta
        frames = self._flatten(batch)
        actor_before = [p.detach().clone() for p in self.agent.policy_net.parameters()]
        coefficients = frames["advantage"].new_tensor([lr, beta, kl_coef])
        made: list[Tensor] = []
        epochs = 0
        while epochs < self.config.learner.epochs:
            epochs += 1
            made += self._epoch(frames, coefficients)
            if self.loss.target_kl and self.kl_old(frames) > 1.5 * self.loss.target_kl:
                break
        metrics = torch.stack(made).double().cpu()
        require_finite(metrics, self._metrics, self.config.learner.minibatches)
        kl_old = self.kl_old(frames)
        if not self.beta_rule.every_forward:
            self.beta_rule.update(kl_old)  # on the KL before a line search
        alpha, kl_old = self._hold(frames, actor_before, kl_old)
        means = dict(zip(self._metrics, metrics.mean(0).tolist(), strict=True))
        count = len(frames["advantage"]) // self.config.learner.minibatches
        terms = self.loss.weighted(means, count, kl_coef)
        return Learned(
            **terms,
            kl_old=kl_old,
            alpha=alpha,
            beta=beta,
            grad_norm=means["grad_norm"],
            lr=lr,
            epochs=epochs,
        )

    def _hold(
        self, frames: dict[str, Tensor], actor_before: list[Tensor], kl: float
    ) -> tuple[float, float]:
        """``loss.line_search``: bring KL(old||new) to its target; (alpha, KL) as it ends."""
        loss = self.loss
        if not line_search.due(loss.line_search, kl, loss.dtarg):
            return 1.0, kl
        parameters = list(self.agent.policy_net.parameters())
        return line_search.search(
            parameters, actor_before, lambda: self.kl_old(frames), kl, loss.dtarg
        )

    def _epoch(self, frames: dict[str, Tensor], coefficients: Tensor) -> list[Tensor]:
        """One pass: every frame once, shuffled, in equal parts; the metrics of each step."""
        frames = {**frames, **self.loss.draw(frames)}
        count = frames["observation"].shape[0]
        # The order comes from the CPU's generator, the same on every device.
        order = torch.randperm(count).to(frames["observation"].device)
        if self._columns is None:
            self._columns = Columns(frames)
        rows = self._columns.pack(frames)[order]
        minibatches = rows.chunk(self.config.learner.minibatches)
        state = self.optimizer.tensors
        prepared = self._prepare((*state, minibatches[0], coefficients))
        if not self.beta_rule.every_forward:
            return [prepared.step(*state, part, coefficients) for part in minibatches]
        made = []
        for part in minibatches:
            coefficients[1] = self.beta_rule.beta
            made.append(prepared.step(*state, part, coefficients))
            self.beta_rule.update(float(made[-1][self._metrics.index("kl_old")]))
        return made

    def _prepare(self, example: tuple[Tensor, ...]) -> Prepared:
        """The step, made at the first minibatch; later ones must look like it."""
        if self._prepared is None:
            assert self._columns is not None
            problem = self._problem(self._columns)
            self._prepared = prepare(self.mode, problem, example, self.say)
            self._example = example
            told = self._prepared.told
            self.say(told if self._why is None else f"{told}; {self._why}")
        check_inputs(self._example, example)
        return self._prepared

    @torch.no_grad()
    def kl_old(self, frames: dict[str, Tensor]) -> float:
        """Mean KL(old||new) over a rollout in closed form, nats per frame."""
        keys = self.agent.family.param_keys
        outputs = self.agent.policy_net.of_normalized(frames["observation"])
        new = dict(zip(keys, outputs, strict=True))
        return float(self.agent.family.kl({key: frames[key] for key in keys}, new).mean())

    def _flatten(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """[N, T, ...] -> [N T, ...], advantages and values without their last dimension.

        Observations come out normalised: the statistics stand still until the next rollout.
        """
        family = self.agent.family
        keys = ("action_log_prob", "advantage", "value_target", "state_value")
        flat = {
            key: batch.get(key).flatten(0, 1)
            for key in (*keys, *family.param_keys, family.sample_key)
        }
        for key in ("advantage", "value_target", "state_value"):
            flat[key] = flat[key].squeeze(-1)
        if self.loss.reference_estimator is not None:
            for key in ("log_prob", *family.param_keys):
                flat[f"ref_{key}"] = batch.get(("ref", key)).flatten(0, 1)
        with torch.no_grad():
            observation = batch.get("observation").flatten(0, 1)
            flat["observation"] = self.agent.policy_net.normalizer(observation)
        return flat

    def _lr(self, progress: float) -> float:
        """Linear from lr to lr_floor."""
        c = self.config.optim
        return c.lr + (c.lr_floor - c.lr) * min(progress, 1.0)


@torch.no_grad()
def one_frame(agent: Agent) -> TensorDict:
    """A rollout [1, 1] laid out as every annotated one of this policy; its numbers mean nothing."""
    family = agent.family
    first = linears(agent.policy_net.trunk)[0]
    observation = first.weight.new_zeros(1, 1, first.in_features)
    outputs = (torch.ones_like(out) for out in agent.policy_net(observation))
    params = dict(zip(family.param_keys, outputs, strict=True))
    log_prob, value = observation.new_zeros(1, 1), observation.new_zeros(1, 1, 1)
    estimates = dict.fromkeys(("advantage", "value_target", "state_value"), value)
    return TensorDict(
        {
            "observation": observation,
            **params,
            family.sample_key: family.sample(params, 1)[0],
            "action_log_prob": log_prob,
            **estimates,
            "ref": {**params, "log_prob": log_prob},
        },
        [1, 1],
    )
