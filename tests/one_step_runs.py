"""The problem of ``tests/one_step.py`` as a run of each domain: what calls which.

A run is built by :class:`klrl.train.loop.Training` and takes the steps of its ``train``. Only the
environment, the networks, the prompts and the sampler are replaced, and float32 by float64.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.nn.functional import one_hot

from klrl.config import CONTROL, LANGUAGE, JobConfig
from klrl.control.policy.distributions import Categorical, Params
from klrl.control.policy.networks import Agent, PolicyNet, ValueNet
from klrl.control.run.step import BETA1, Columns
from klrl.language.data import batch as layout
from klrl.language.model.causal_lm import ValueHead
from klrl.language.run.load import Policy
from klrl.language.run.rollout import STATES
from klrl.language.run.scoring import ScoringLayout
from klrl.losses.policy import LossTerms
from klrl.train.loop import Training
from tests.one_step import (
    CHOSEN,
    CONTEXT,
    DOUBLE,
    OLD,
    OLD_VALUE,
    REF,
    SCORE,
    THETA,
    VALUE,
    B,
    D,
    G,
    Numbers,
    V,
    chosen,
    log_p,
)

# ---------------------------------------------------------------------------- one run, for both

#: Where both domains keep what a step (a token) is worth, [B, 1, 1] or [B, R, 1].
POSITIONS = {
    "reward": ("next", "reward"),
    "applied": ("next", "kl_penalty"),
    "advantage": "advantage",
    "value_target": "value_target",
    "state_value": "state_value",
}


@dataclass
class OneStep:
    """A run before its first iteration."""

    training: Training
    batch: TensorDict
    heads: list[nn.Linear]  # over one-hot contexts: to the logits; with a critic to the values too
    ref_log_prob: Callable[[TensorDict], Tensor]  # [B], of a rollout that is annotated
    gradient: Callable[[nn.Parameter], Tensor]  # as its optimiser got it
    spoil: Callable[[TensorDict], None] = lambda batch: None  # overwrites padding


@torch.no_grad()
def load(heads: list[nn.Linear], logits: Tensor, value: Tensor) -> None:
    """Set the heads over one-hot features, so that their weights are the numbers themselves."""
    for head, table in zip(heads, (logits.T, value[None]), strict=False):
        head.weight.copy_(table)
        head.bias.zero_()


class KeptLoss:
    """A policy loss that keeps its last numbers."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, scored: Any, beta: Tensor, kl_coef: Tensor, *rest: Any) -> LossTerms:
        terms: LossTerms = self._loss(scored, beta, kl_coef, *rest)
        kl_old = terms.measured["kl/old/exact"]
        real = kl_old if scored.mask is None else kl_old[scored.mask]
        self.numbers = {"loss": terms.total.detach(), "kl_old/minibatch": real.detach().mean()}
        return terms


class WideColumns(Columns):
    """The rows of a minibatch in float64."""

    def __init__(self, example: Mapping[str, Tensor]) -> None:
        self.shapes = {key: (value.shape[1:], value.dtype) for key, value in example.items()}
        self.widths = [shape.numel() for shape, _ in self.shapes.values()]


@contextmanager
def in_float64() -> Iterator[None]:
    """Where a run converts to float32 (a minibatch, metrics), the numbers stay float64."""
    columns = patch("klrl.control.run.update.Columns", WideColumns)
    with patch.object(Tensor, "float", Tensor.double), columns:
        yield


def move_to_theta(steps: Any, heads: list[nn.Linear]) -> None:
    """Start every pass over the rollout at THETA, as if steps had been taken."""
    minibatches = steps.minibatches

    def moved(frames: Any) -> Any:
        load(heads, THETA, VALUE)
        return minibatches(frames)

    steps.minibatches = moved


@in_float64()
def iterate(run: OneStep) -> Numbers:
    """One iteration, as in :meth:`klrl.train.loop.Training.train`; its numbers."""
    training, parts, batch = run.training, run.training.parts, run.batch
    steps = parts.learner.steps
    loss = steps.loss = KeptLoss(steps.loss)
    load(run.heads, OLD, OLD_VALUE)
    move_to_theta(steps, run.heads)
    run.spoil(batch)
    measured = parts.charge_kl(batch)
    run.spoil(batch)
    parts.estimate_advantage(batch)
    run.spoil(batch)
    learned = training.learn(batch)
    training.counters.iteration, training.counters.frames = 1, B
    row = training.make_row(batch, measured, learned, 1.0)
    numbers = {f"row/{name}": torch.tensor(value, dtype=DOUBLE) for name, value in row.items()}
    numbers["beta_after"] = torch.tensor(parts.learner.beta_rule.beta, dtype=DOUBLE)
    return numbers | loss.numbers | gradients(run) | positions(run)


def gradients(run: OneStep) -> Numbers:
    """By the table of logits [D, V], and of values [D] where there is a critic."""
    numbers = {"gradient/logits": run.gradient(run.heads[0].weight).T}
    if len(run.heads) == 2:
        numbers["gradient/values"] = run.gradient(run.heads[1].weight)[0]
    return numbers


def positions(run: OneStep) -> Numbers:
    """What the rollout holds of each row's only step, [B]."""
    batch, kl = run.batch, run.training.parts.kl
    keys = {name: key for name, key in POSITIONS.items() if key in batch.keys(include_nested=True)}
    if kl is not None and not kl.charges_reward:
        keys.pop("applied", None)  # language writes what would be charged
    numbers = {name: batch[key][:, 0].flatten() for name, key in keys.items()}
    return numbers if kl is None else numbers | {"ref_log_prob": run.ref_log_prob(batch)}


# ----------------------------------------------------------------------------------- control


class Features(nn.Linear):
    """The observation itself: a layer without weights."""

    def __init__(self) -> None:
        super().__init__(D, D)
        del self.weight, self.bias

    def forward(self, observation: Tensor) -> Tensor:
        return observation


class OwnChoices(Categorical):
    """Draws the rollout's own choices: every one as often as pi_old takes it."""

    def sample(self, params: Params, samples: int) -> Tensor:
        return CHOSEN[None]


def control_agent() -> Agent:
    """Linear policy and critic over one-hot observations [D]."""
    policy = PolicyNet(nn.Identity(), nn.Sequential(Features()), V, None).to(DOUBLE)
    value = ValueNet(nn.Identity(), policy.trunk).to(DOUBLE)
    family = OwnChoices()
    sampler = ProbabilisticTensorDictModule(
        in_keys=list(family.param_keys),
        out_keys=["action"],
        distribution_class=family.distribution,
        return_log_prob=True,
    )
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(policy, ["observation"], list(family.param_keys)), sampler
    )
    critic = TensorDictModule(value, ["observation"], ["state_value"])
    return Agent(actor, critic, family, None)


def control_batch() -> TensorDict:
    """B episodes of one step [B, 1]."""
    ones, observation = torch.ones(B, 1, 1, dtype=torch.bool), one_hot(CONTEXT, D).to(DOUBLE)
    return TensorDict(
        {
            "observation": observation[:, None],
            "logits": OLD[CONTEXT][:, None],
            "action": CHOSEN[:, None],
            "action_log_prob": chosen(log_p(OLD))[:, None],
            "next": {
                "observation": torch.full((B, 1, D), 7.0, dtype=DOUBLE),
                "reward": chosen(SCORE)[:, None, None],
                "done": ones,
                "terminated": ones,
                "truncated": ~ones,
                "episode_reward": chosen(SCORE)[:, None, None],
                "step_count": ones.long(),
            },
        },
        [B, 1],
    )


def control_run(config: JobConfig) -> OneStep:
    """A control run without an environment, whose reference is at REF."""
    agent = control_agent()
    heads = [agent.policy_net.head, agent.value_net.head]
    load(heads, REF, VALUE)
    instead = {
        "make_copies": lambda *_, **__: SimpleNamespace(
            notes=[], simulators=SimpleNamespace(longest_episode=None)
        ),
        "make_agent": lambda *_, **__: agent,
        "preflight_checks": lambda *_, **__: [],
    }
    with patch.multiple("klrl.control.run.build", **instead):
        training = Training(config)
    steps = training.parts.learner.steps

    def gradient(parameter: nn.Parameter) -> Tensor:
        """From Adam's first moment, which is g (1 - BETA1^n) after n equal gradients."""
        adam, sizes = steps.optimizer, [p.numel() for p in steps.parameters]
        each = (adam.exp_avg / (1 - BETA1**adam.count)).split(sizes)
        index = [p is parameter for p in steps.parameters].index(True)
        return each[index].view(parameter.shape)

    def ref_log_prob(batch: TensorDict) -> Tensor:
        return batch["ref", "log_prob"].flatten()

    return OneStep(training, control_batch(), heads, ref_log_prob, gradient)


# ---------------------------------------------------------------------------------- language


class OneHotStates(nn.Module):
    """After a prompt's last token, V + context, the one-hot context; elsewhere garbage: padding."""

    def __init__(self) -> None:
        super().__init__()
        garbage = torch.full((V, D), 1e3, dtype=DOUBLE)
        self.register_buffer("of_token", torch.cat([garbage, torch.eye(D, dtype=DOUBLE)]))

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.of_token[input_ids])


class OneHotLM(nn.Module):
    """A causal LM whose next token depends on the last one alone."""

    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=D))
    base_model_prefix = "base_model"

    def __init__(self) -> None:
        super().__init__()
        self.base_model = OneHotStates()
        self.head = nn.Linear(D, V, dtype=DOUBLE)

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.base_model(input_ids).last_hidden_state))

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def language_batch(width: int) -> TensorDict:
    """B responses of one token, [B, width]; what follows it is padding."""
    prompt = torch.stack([torch.zeros(D, dtype=torch.long), V + torch.arange(D)], 1)
    tokens = torch.full((B, width), V - 1)
    tokens[:, 0] = CHOSEN
    real = torch.zeros(B, width, dtype=torch.bool)
    real[:, 0] = True
    log_probs = torch.zeros(B, width, dtype=DOUBLE)
    log_probs[:, 0] = chosen(log_p(OLD))
    done = torch.zeros(B, dtype=torch.bool)
    responses = layout.Responses(tokens, real, log_probs, truncated=done)
    batch = layout.make_batch(prompt, torch.ones_like(prompt), responses, G)
    layout.set_scores(batch, chosen(SCORE))
    states = torch.zeros(B, width, D, dtype=DOUBLE)
    states[:, 0] = one_hot(CONTEXT, D)
    batch[STATES] = states
    return batch


def spoil_padding(batch: TensorDict, fill: float) -> None:
    """Put ``fill`` wherever a number stands behind a response's only token."""
    for key in batch.keys(include_nested=True, leaves_only=True):
        value = batch[key]
        if value.is_floating_point() and value.ndim > 1 and value.shape[1] > 1:
            value[:, -1] = fill


def language_training(config: JobConfig, policy: Policy) -> Training:
    """A language run of this policy, without a task, a sampler and a preflight."""
    packed = ScoringLayout(G, shared=False)
    prompts = SimpleNamespace(take=lambda count: None)
    task = SimpleNamespace(
        chat=False,
        notes=(),
        evaluations=None,
        check=lambda *_: [],
        trial_batch=lambda *_: None,
        stream=lambda *_: prompts,
    )
    instead = {
        "make_task": lambda *_: task,
        "preflight_checks": lambda *_, **__: (packed, packed, []),
    }
    make_policy = patch("klrl.language.run.load.make_policy", lambda *_, **__: policy)
    with make_policy, patch.multiple("klrl.language.run.build", **instead):
        return Training(config)


def kept_gradients(training: Training) -> Callable[[nn.Parameter], Tensor]:
    """The gradients of the last step, which the update drops."""
    optimizer, kept = training.parts.learner.steps.optimizer, dict[nn.Parameter, Tensor]()
    drop = optimizer.zero_grad

    def keep_and_drop() -> None:
        kept.update((p, p.grad) for p in optimizer.param_groups[0]["params"])
        drop()

    optimizer.zero_grad = keep_and_drop
    return kept.__getitem__


def language_run(config: JobConfig, fill: float | None = None) -> OneStep:
    """A language run whose reference is at REF; with ``fill`` its rows end in padding."""
    model = OneHotLM()
    critic = ValueHead(model) if config.advantage.name == "gae" else None
    heads = [model.head] if critic is None else [model.head, critic.linear]
    load(heads, REF, VALUE)
    tokenizer = SimpleNamespace(pad_token_id=0)
    causal = SimpleNamespace(
        model=model, tokenizer=tokenizer, eos=(), prompt_limit=lambda response: None
    )
    training = language_training(config, Policy(causal, critic))
    reference = training.parts.reference
    if fill is not None and reference is not None:
        # Of pi_ref alone: NaN in the learning policy's states would reach its weights by itself.
        reference.module.base_model.of_token[:V] = fill

    def ref_log_prob(batch: TensorDict) -> Tensor:
        return layout.response_part(batch, layout.REF_LOG_PROBS)[:, 0]

    run = OneStep(training, language_batch(1), heads, ref_log_prob, kept_gradients(training))
    if fill is not None:
        run.batch, run.spoil = language_batch(2), lambda batch: spoil_padding(batch, fill)
    return run


#: Metrics that only one domain records, beside a response's KLs (``_seq``).
OWN = ("time/", "frames", "samples", "reward/truncated", "reward/equal_groups")
RUNS: dict[str, Callable[[JobConfig], OneStep]] = {CONTROL: control_run, LANGUAGE: language_run}


def shared(numbers: Numbers) -> Numbers:
    """Those that both domains give."""
    own = tuple(f"row/{name}" for name in OWN)
    return {k: v for k, v in numbers.items() if not k.startswith(own) and not k.endswith("_seq")}
