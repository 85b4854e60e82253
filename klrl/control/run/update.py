"""The gradient steps of a control run, on minibatches of a flattened rollout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from klrl.config import Config, TRPOConfig, factory
from klrl.control.policy.networks import Agent
from klrl.control.run.compiled import Prepared, decide, kernel_unfit, prepare
from klrl.control.run.kl import SAMPLER_LOG_PROB
from klrl.control.run.step import Adam, Columns, StepParts, check_inputs, draw, score
from klrl.kl.charge import ReferenceKL
from klrl.losses.policy import make_loss
from klrl.train.learner import Coefficients, Steps

Frames = dict[str, Tensor]


class ControlSteps(Steps[Frames, Tensor]):
    """Gradient steps of policy and critic by :mod:`klrl.control.run.step`, eager or compiled.

    No step waits for the device. ``mode`` is auto, false, jit, aot or kernel.
    """

    def __init__(
        self,
        config: Config,
        agent: Agent,
        kl: ReferenceKL | None = None,
        mode: str = "false",
    ) -> None:
        self.config, self.agent = config, agent
        self.loss = make_loss(config.loss, config.domain, kl, config.env.reward_scale)
        self.loss.anchor = config.anchor
        self.parameters = agent.networks.in_order()
        self.optimizer: Adam = factory("optim", config.optim, config.domain)(
            config.optim, self.parameters
        )
        self.say, self.made = lambda _: None, lambda **_: None
        self._columns: Columns | None = None
        self._prepared: Prepared | None = None
        self._coefficients: Coefficients | None = None
        self._coefficients_tensor = self.optimizer.flat.new_zeros(3)
        self._asked = mode
        unfit = partial(kernel_unfit, agent, self.loss)
        self.mode = decide(mode, config, self.optimizer.flat.device, unfit)

    @property
    def actor_parameters(self) -> list[nn.Parameter]:
        """The parameters of the policy network."""
        return list(self.agent.policy_net.parameters())

    def _arguments(self, rows: Tensor) -> tuple[Tensor, ...]:
        return (*self.optimizer.tensors, rows, self._coefficients_tensor)

    def _shuffled(self, frames: Frames) -> tuple[Tensor, int]:
        """Pack frames into rows [N T, C], in random order; return also how many a minibatch has."""
        frames = {**frames, **draw(self.loss, self.agent.family, frames)}
        count = frames["observation"].shape[0]
        # The CPU's generator gives the same order for every device.
        order = torch.randperm(count).to(frames["observation"].device)
        if self._columns is None:
            self._columns = Columns(frames)
        rows = self._columns.pack(frames).index_select(0, order)  # a third of the time of [order]
        size = -(-count // self.config.learner.minibatches)
        self._prepare(self._arguments(rows[:size]), self._columns)
        return rows, size

    def minibatches(self, frames: Frames) -> Sequence[Tensor]:
        """Shuffle all frames into minibatches [B, C]."""
        rows, size = self._shuffled(frames)
        return rows.split(size)

    def epoch(self, frames: Frames, coefficients: Coefficients) -> Tensor:
        """Take a step on each minibatch; the kernel takes all in one call, once it is prepared."""
        if self._prepared is None or self.mode != "kernel":
            return super().epoch(frames, coefficients)
        rows, size = self._shuffled(frames)
        return self.step(rows, coefficients, batch=size)

    def _prepare(self, example: tuple[Tensor, ...], columns: Columns) -> None:
        """Make the step at the first call; later, require minibatches of the same layout."""
        if self._prepared is None:
            problem = StepParts(self.agent, self.loss, self.optimizer.settings, columns)
            made = self._prepared = prepare(self._asked, self.config, problem, example, self.say)
            self._example = example
            self.say(made.description)
            if made.mode != self.mode or made.library:
                self.mode = made.mode
                self.made(compile=made.mode, **({"library": made.library} if made.library else {}))
        check_inputs(self._example, example)

    def step(self, minibatch: Tensor, coefficients: Coefficients, **how: int) -> Tensor:
        """Take a gradient step on rows [B, C]; in the kernel, one on each ``batch`` of them."""
        assert self._prepared is not None
        if coefficients is not self._coefficients:  # copy changed coefficients to the device
            c = self._coefficients = coefficients
            self._coefficients_tensor = minibatch.new_tensor([c.lr, c.beta, c.kl_ref])
        return self._prepared.step(*self._arguments(minibatch), **how)

    @torch.no_grad()
    def kl_old(self, frames: dict[str, Tensor]) -> float:
        """Mean KL(old||new) over a rollout in closed form, nats per frame."""
        keys = self.agent.family.param_keys
        outputs = self.agent.policy_net.of_normalized(frames["observation"])
        new = dict(zip(keys, outputs, strict=True))
        return float(self.agent.family.kl({key: frames[key] for key in keys}, new).mean())

    def positions_per_unit(self, frames: Frames) -> float:
        """Return 1 / (dimensions of an action) if ``dtarg_per`` is action, else 1."""
        per_action = self.loss.dtarg_per == "action"
        return 1 / self.agent.family.dimensions(frames) if per_action else 1.0

    def natural_step(self, frames: Frames, kl_coef: float, target: float) -> None:
        """Take TRPO's policy step on the whole rollout, to KL(old||new) = ``target`` (nats)."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        from klrl.losses.trpo import fisher_product, natural_direction, take_step

        family, config, moved = self.agent.family, self.loss.config, self.actor_parameters
        assert isinstance(config, TRPOConfig)
        batch = {**frames, **draw(self.loss, family, frames)}
        with sdpa_kernel(SDPBackend.MATH):  # its attention has a second derivative
            outputs = self.agent.policy_net.of_normalized(batch["observation"])
        new = dict(zip(family.param_keys, outputs, strict=True))
        scored = score(self.loss, family, new, batch["state_value"], batch)
        zero = scored.advantage.new_zeros(())
        loss = self.loss(scored, zero, zero + kl_coef).total
        old = {key: frames[key] for key in family.param_keys}
        fisher = fisher_product(
            outputs,
            lambda at: family.kl(old, dict(zip(family.param_keys, at, strict=True))).mean(),
            moved,
        )
        step = natural_direction(loss, fisher, moved, config.cg_steps, config.damping)
        take_step(moved, *step, target)

    def lay_out(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Flatten a rollout [N, T, ...] to [N T, ...]; advantages and values to [N T].

        Observations are normalised here, since their statistics are constant during an update.
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
        if (log_mu := batch.get(SAMPLER_LOG_PROB, None)) is not None:
            flat["sampler_log_prob"] = log_mu.flatten(0, 1)
        with torch.no_grad():
            observation = batch.get("observation").flatten(0, 1)
            flat["observation"] = self.agent.policy_net.normalizer(observation)
        return flat
