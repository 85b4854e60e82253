"""``learner.micro_batch``: the gradient of a minibatch, added up over its parts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from klrl.language.run.scoring import ScoringLayout
from klrl.runs.resume import stored_config
from klrl.train.learner import Coefficients
from klrl.train.loop import Training
from tests.runs.commands import rows_of

COMMON = ("device=cpu", "actor.dtype=float64", "learner.minibatches=1", "kl.coef=0.3")
COEFFICIENTS = Coefficients(lr=0.0, beta=0.7, kl_ref=0.3)


def gradients(
    training: Training, batch, size: int | None, tokens: int | None = None
) -> tuple[list, torch.Tensor]:
    """What a step gives the optimiser, and what it measured, at ``learner.micro_batch=size``.

    ``tokens``: at ``learner.tokens_per_batch``.
    """
    steps, given = training.parts.learner.steps, []
    training.config.learner.micro_batch = size
    steps.layout = replace(steps.layout, shared=steps.layout.shared and not tokens, tokens=tokens)

    def step(lr: float) -> torch.Tensor:
        given.extend(p.grad.clone() for p in steps.policy.parameters)
        steps.optimizer.zero_grad()
        return torch.zeros((), dtype=torch.float64)

    real, steps.optimizer.clipped_step = steps.optimizer.clipped_step, step
    try:
        torch.manual_seed(0)
        (minibatch,) = steps.minibatches(batch)
        measured = steps.step(minibatch, COEFFICIENTS)
    finally:
        steps.optimizer.clipped_step = real
    return given, measured


def moved(config) -> tuple[Training, TensorDict]:
    """A rollout with advantages, all of whose first prompt's responses were cut off, and one more.

    The policy has moved since: no ratio is 1, no KL is 0.
    """
    training, generator = Training(config), torch.Generator()
    batch = training.parts.rollout(0).collect()
    training.parts.charge_kl(batch)
    training.parts.estimate_advantage(batch)
    assert len(set(batch["masks", "all_assistant_mask"].sum(1).tolist())) > 1
    group = config.collector.group_size
    batch["next", "truncated"] = (torch.arange(len(batch)) <= group).unsqueeze(1)
    frames = training.parts.learner.steps.lay_out(batch)
    with torch.no_grad():
        for p in training.parts.policy.parameters:
            p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return training, frames


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_responses_that_were_cut_off_are_left_out(job, reduction: str) -> None:
    words = (*COMMON, f"loss.reduction={reduction}", "loss.normalize_advantage=false")
    training, frames = moved(job(*words, "loss.mask_truncated=true"))
    cut = frames["next", "truncated"].squeeze(-1)
    found, _ = gradients(training, frames, None)
    frames["advantage"][cut] += 100.0
    again, _ = gradients(training, frames, None)
    torch.testing.assert_close(again, found, rtol=0, atol=0)
    training.config.loss.mask_truncated = False
    spoilt, _ = gradients(training, frames, None)
    assert max(float((a - b).abs().max()) for a, b in zip(spoilt, found, strict=True)) > 1e-3
    frames["masks", "all_assistant_mask"][cut] = False
    without, _ = gradients(training, frames, None)
    torch.testing.assert_close(without, found, rtol=1e-10, atol=1e-12)


def test_the_kl_of_an_update_is_that_of_all_responses(job) -> None:
    """What the loss leaves out counts in KL(old||new), by a sum over the vocabulary."""
    training, frames = moved(job(*COMMON, "loss.mask_truncated=true"))
    steps = training.parts.learner.steps
    policy = steps.layout.next_tokens(steps.policy.model, frames, 1.0)
    log_old, log_new = (
        each.head(each.states).log_softmax(-1).detach() for each in (steps._old(frames), policy)
    )
    per_token = (log_old.exp() * (log_old - log_new)).sum(-1)
    mask = frames["masks", "all_assistant_mask"][:, -per_token.shape[1] :]
    ended = mask & ~frames["next", "truncated"]
    assert steps.kl_old(frames) == pytest.approx(float(per_token[mask].mean()), rel=1e-9)
    assert float(per_token[ended].mean()) != pytest.approx(float(per_token[mask].mean()), rel=1e-3)


@pytest.mark.parametrize("size", [None, 1])
def test_the_entropy_is_that_of_all_responses_where_all_were_cut_off(job, size) -> None:
    """It read 0 nats, as of a policy that collapsed."""
    training, frames = moved(job(*COMMON, "loss.mask_truncated=true"))
    frames["next", "truncated"] = torch.ones(len(frames), 1, dtype=torch.bool)
    found, measured = gradients(training, frames, size)
    assert max(float(g.abs().max()) for g in found) == 0.0
    mask = frames["masks", "all_assistant_mask"]
    expected = -frames["log_probs", "full"][mask].mean()
    assert float(expected) > 1.0
    place = training.parts.learner.steps.loss.measures.index("policy/entropy")
    torch.testing.assert_close(measured[place].double(), expected.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "words",
    [
        ["loss.reduction=token"],
        ["loss.reduction=sequence", "loss.normalize_advantage=false"],
        ["loss.reduction=response"],
        ["loss.reduction=token", "loss.mask_truncated=true"],
        ["loss.reduction=sequence", "loss=klpen", "loss.kl_old=exact"],
        ["loss=klpen", "loss.kl_old=exact", "kl.placement=loss", "kl.estimator=exact"],
        ["loss.reduction=token", "loss=klpen", "loss.kl_old=sampled", "loss.entropy_coeff=0.1"],
        ["advantage.baseline=leave_one_out", "kl.placement=loss", "kl.estimator=exact"],
        ["advantage.baseline=normalized_shaped", "kl.placement=reward"],
        ["advantage.baseline=normalized", "kl.placement=loss", "kl.estimator=k2"],
        ["advantage.baseline=normalized", "kl.placement=split", "kl.estimator=exact"],
        ["advantage=gae", "loss.reduction=sequence", "loss.normalize_advantage=true"],
        ["advantage=gae", "kl.placement=loss", "kl.estimator=k3", "loss.normalize_advantage=true"],
    ],
    ids=" ".join,
)
def test_the_gradient_is_the_minibatchs(job, words: list[str]) -> None:
    """Normalised by the tokens, rows and spread of the whole minibatch, not of a part."""
    training, frames = moved(job(*COMMON, *words))
    whole, measured = gradients(training, frames, None)
    assert max(float(g.abs().max()) for g in whole) > 1e-3
    for size in (1, 3):  # of four prompts: the last part is smaller
        parts, told = gradients(training, frames, size)
        torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(told, measured, rtol=1e-6, atol=1e-7)
    packed, told = gradients(training, frames, None, 10**6)  # all in one forward
    torch.testing.assert_close(packed, whole, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(told, measured, rtol=1e-6, atol=1e-7)
    largest = max(float(g.abs().max()) for g in whole)
    for tokens in (1, 30, 61):  # one row, a few
        parts, told = gradients(training, frames, None, tokens)
        torch.testing.assert_close(parts, packed, rtol=1e-10, atol=1e-12 * largest)
        torch.testing.assert_close(told, measured, rtol=1e-6, atol=1e-7)


def test_the_tokens_of_a_micro_batch_are_counted_with_their_padding(job) -> None:
    training, frames = moved(job(*COMMON, "learner.tokens_per_batch=40"))
    steps, fed = training.parts.learner.steps, []
    assert not steps.layout.shared
    states = ScoringLayout.states

    def counted(layout, model, batch):
        mask = batch["masks", "all_attention_mask"]
        fed.append((len(batch), int(mask.sum(1).max()), batch["tokens", "response"].shape[1]))
        return states(layout, model, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScoringLayout, "states", counted)
        (minibatch,) = steps.minibatches(frames)
        steps.step(minibatch, COEFFICIENTS)
        steps.kl_old(frames)
    assert sum(rows for rows, _, _ in fed) == 2 * len(frames)
    assert all(rows * longest <= 40 or rows == 1 for rows, longest, _ in fed)
    longest = frames["masks", "all_assistant_mask"].sum(1)
    widths = [width for _, _, width in fed[: len(fed) // 2]]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < int(longest.max())  # no state of padding is computed
    smallest = [longest.tolist().count(int(n)) for n in longest.unique()]
    assert len(fed) < 2 * sum(smallest)


@pytest.mark.integration
@pytest.mark.parametrize("key", ["micro_batch", "tokens_per_batch"])
def test_a_run_that_ran_out_of_memory_goes_on_in_parts(exits, key: str) -> None:
    assert exits("hydra.run.dir=run")[0] == 0
    before = len(rows_of(Path("run")))
    assert exits("resume=run", "frames=64", f"learner.{key}=1")[0] == 0
    assert len(rows_of(Path("run"))) > before
    assert getattr(stored_config(Path("run")).learner, key) == 1
