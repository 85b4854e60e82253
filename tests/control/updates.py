"""Updates to learn from, for tests."""

import torch

from klrl.control.run.kl import SAMPLER_LOG_PROB
from klrl.control.run.step import Columns, StepParts, draw
from klrl.train.loop import Training
from tests.agents import moved_rollout

CPU = torch.device("cpu")


def made(settings, *words: str):
    """An experiment with a charged rollout; weights away from the reference's."""
    torch.manual_seed(0)
    config = settings("kl.coef=0.3", "optim.lr=0.003", "learner.epochs=1", *words)
    experiment = Training(config)
    batch = moved_rollout(experiment, by=0.1)
    if experiment.config.reads_sampler:  # of a sampler that is not the policy
        batch[SAMPLER_LOG_PROB] = batch["action_log_prob"] + 0.4 * torch.randn(batch.shape)
    experiment.parts.charge_kl(batch)
    experiment.parts.estimate_advantage(batch)
    return experiment, batch


def minibatch(experiment: Training, batch) -> tuple[StepParts, list[torch.Tensor]]:
    """What a step is built from, and arguments for it."""
    steps = experiment.parts.learner.steps
    frames = steps.lay_out(batch)
    frames |= draw(steps.loss, experiment.parts.agent.family, frames)
    columns = Columns(frames)
    rows = columns.pack(frames)[: batch.numel() // 2]
    coefficients = torch.tensor([0.003, 0.7, 0.3])
    problem = StepParts(experiment.parts.agent, steps.loss, steps.optimizer.settings, columns)
    return problem, [*steps.optimizer.tensors, rows, coefficients]


def learn(settings, mode: str, *words: str) -> tuple[torch.Tensor, dict, list[str]]:
    """Parameters, metrics and what was said after 104 steps: 13 epochs of 8 minibatches."""
    experiment, batch = made(
        settings, *words, f"learner.compile={mode}", "learner.epochs=13", "learner.minibatches=8"
    )
    told: list[str] = []
    experiment.parts.learner.steps.say = told.append
    learned = experiment.parts.learner.update(batch, 0.0, 0.3)
    assert told[-1].startswith("update: ")
    return experiment.parts.learner.steps.optimizer.flat.clone(), learned, told
