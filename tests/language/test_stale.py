"""``collector.staleness`` and ``collector.dtype``: a sampler mu that is not the trained policy."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from klrl.base.errors import ConfigError
from klrl.base.seeds import derived_seed
from klrl.kl.measure import mean_kl
from klrl.language.data.batch import (
    LOG_PROBS,
    SAMPLER_LOG_PROBS,
    SCORE,
    response_mask,
    response_part,
)
from klrl.language.model.causal_lm import model_dtype
from klrl.language.run import stale
from klrl.language.run.parts import LanguageParts
from klrl.language.run.rollout import sample
from klrl.language.run.verify import table_of
from klrl.runs.folder import RunFolder
from klrl.runs.state import decode, encode
from klrl.train import stale as rooms
from klrl.train.loop import Training
from tests.language.toys import of_tokens, truth
from tests.runs.commands import samples_of

FAST = ("kl=none", "optim.lr=0.003", "optim.lr_floor=0", "learner.minibatches=1")


def iterate(training, rollout):
    """One iteration: what the rollout had, what the row says, and the model before the update."""
    batch = rollout.collect()
    before = deepcopy(training.parts.policy.model)
    training.parts.charge_kl(batch)
    row = dict(training.parts.rewards(batch).own)
    training.parts.estimate_advantage(batch)
    scored = training.parts.learner.steps
    frames = scored.lay_out(batch)
    found = scored.score(frames)
    training.learn(batch)
    return batch, row, before, found


def exact_kl(one, other, batch) -> float:
    """KL(one||other) per token, by plain transformers."""
    pairs = zip(truth(one, batch), truth(other, batch), strict=True)
    return float(torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in pairs]).mean())


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_rollout_is_that_of_the_policy_of_n_updates_ago(job, staleness: int) -> None:
    words = ("loss=dppo", "loss.measure=kl_exact", "actor.dtype=float64")
    training = Training(job(*FAST, *words, f"collector.staleness={staleness}"))
    rollout, policies, served = training.parts.rollout(0), [], []
    for iteration in range(staleness + 2):
        batch, row, before, found = iterate(training, rollout)
        policies.append(before)
        lag = min(iteration, staleness)
        mu = policies[iteration - lag]
        assert row["sampler/lag"] == lag
        mask = response_mask(batch)
        log_mu, old = (response_part(batch, key) for key in (SAMPLER_LOG_PROBS, LOG_PROBS))
        torch.testing.assert_close(log_mu, of_tokens(truth(mu, batch), batch), rtol=0, atol=1e-6)
        torch.testing.assert_close(old, of_tokens(truth(before, batch), batch), rtol=0, atol=1e-6)
        kl = exact_kl(mu, before, batch)
        assert row["kl/sampler/exact"] == pytest.approx(kl, rel=1e-6, abs=1e-9)
        assert (kl > 1e-4) == (lag > 0)
        ratio = (old - log_mu)[mask].double()
        assert row["kl/sampler/k3"] == pytest.approx(
            float((ratio.exp() - 1 - ratio).mean()), abs=1e-9
        )
        assert row["kl/sampler/max"] == pytest.approx(float(ratio.abs().max()), abs=1e-9)
        assert float(found.sampler_divergence[mask].mean()) == pytest.approx(kl, rel=1e-6, abs=1e-9)
        # The iteration's own prompts and seed, whenever it was sampled.
        served.append(training.parts.collector.scored_prompts)
        collector = training.config.collector
        prompts = training.parts.task.stream(
            training.parts.policy.causal.tokenizer,
            training.parts.policy.causal.prompt_limit(collector.max_new_tokens),
        )
        prompts.served = iteration * collector.prompts
        asked = prompts.take(collector.prompts)
        assert served[-1][:: collector.group_size] == asked.prompts
        now = training.parts.policy.model.state_dict()
        kept = {name: value.clone() for name, value in now.items()}
        training.parts.policy.model.load_state_dict(mu.state_dict())
        seed = derived_seed(training.config.seed, "sample", iteration)
        again = sample(training.parts.policy, training.parts.sampler, asked, training.config, seed)
        training.parts.policy.model.load_state_dict(kept)
        assert torch.equal(again["tokens", "response"], batch["tokens", "response"])
        assert batch[SCORE].shape == (len(batch), 1, 1)


def test_the_sampler_computes_in_its_own_precision(job) -> None:
    training = Training(job(*FAST, "collector.dtype=bfloat16", "loss.sampler_weight=mask"))
    model, rollout = training.parts.policy.model, training.parts.rollout(0)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        plain = model(ids).logits
    batch, row, before, found = iterate(training, rollout)
    log_mu, old = (response_part(batch, key) for key in (SAMPLER_LOG_PROBS, LOG_PROBS))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = of_tokens(truth(before, batch), batch)
    full = of_tokens(truth(before, batch), batch)
    torch.testing.assert_close(old.double(), full, rtol=0, atol=1e-4)
    gap = float((log_mu - full).abs().max())
    assert gap > 1e-3
    assert float((log_mu - rounded).abs().max()) < gap
    assert row["kl/sampler/max"] == pytest.approx(gap, abs=1e-4)
    assert 0 < row["kl/sampler/exact"] < 1e-3
    assert row["sampler/lag"] == 0
    with torch.no_grad():
        assert torch.equal(before(ids).logits, plain)
    assert torch.equal(found.log_mu, log_mu)


def test_a_model_with_adapters_is_sampled_in_another_precision(job) -> None:
    training = Training(job(*FAST, "collector.dtype=bfloat16", "actor.lora.r=2"))
    model = training.parts.policy.model
    for _ in range(2):
        row = iterate(training, training.parts.rollout(0))[1]
        assert row["kl/sampler/max"] > 1e-4
        assert model_dtype(model) == torch.float32


@pytest.mark.parametrize(
    "words",
    [["collector.staleness=2"], ["collector.staleness=1", "collector.dtype=bfloat16", "loss=dppo"]],
)
def test_a_restored_queue_has_the_same_rollouts(job, words) -> None:
    training = Training(job(*FAST, *words))
    rollout = training.parts.rollout(0)
    for _ in range(3):
        iterate(training, rollout)
    copied, tensors = (
        stale.StaleResponses(training.parts.policy.model, training.config.collector),
        {},
    )
    copied.load_state_dict(decode(encode(rollout.state_dict(), tensors), tensors))
    assert len(copied.waiting) == training.config.collector.staleness
    for one, other in zip(rollout.waiting, copied.waiting, strict=True):
        assert (one["served"], one["updates"]) == (other["served"], other["updates"])
        assert (TensorDict(one["batch"]) == TensorDict(other["batch"])).all()
        assert (TensorDict(one["head"]) == TensorDict(other["head"])).all()


def test_the_queue_takes_at_most_half_of_the_memory(job, monkeypatch) -> None:
    config = job("kl=none", "collector.staleness=3")
    monkeypatch.setattr(rooms, "memory", lambda device: 10**4)
    with pytest.raises(ConfigError, match=r"^collector.staleness=3: .*, more than half of"):
        Training(config)


def test_samples_have_the_log_probs_of_their_weights_and_of_the_sampler(job, monkeypatch) -> None:
    policies, charge_kl = [], LanguageParts.charge_kl

    def kept(parts, batch):
        policies.append(deepcopy(parts.policy.model))
        return charge_kl(parts, batch)

    monkeypatch.setattr(LanguageParts, "charge_kl", kept)
    config = job(*FAST, "collector.staleness=2", "frames=64", "optim.lr=0.03")
    Training(config).train(RunFolder(Path("run")))
    for sample_ in samples_of(Path("run")):
        iteration, ids = sample_["iteration"], sample_["response_ids"]
        final = iteration == len(policies)  # drawn at the end, by the last policy
        mu = iteration - 1 - (0 if final else min(iteration - 1, 2))
        at = sample_["weights"] // config.frames_per_iteration
        assert at == iteration - 1
        for name, policy in (("log_probs", at), ("sampler_log_probs", mu)):
            true = table_of(policies[policy], sample_, 1.0)[range(len(ids)), ids]
            recorded = torch.tensor(sample_[name], dtype=torch.float64)
            torch.testing.assert_close(recorded, true, rtol=0, atol=1e-5)


def test_estimates_of_the_references_kl_are_of_the_policy_not_of_the_sampler() -> None:
    """In float64, over all tokens of one state: k1's mean is the KL of pi."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    mu, old, ref = logits.log_softmax(-1)
    r = old - ref
    # Each token as often as mu draws it: the mean over positions becomes the sum over tokens.
    found = mean_kl(r, r, 7 * mu.exp() * r, weight=(old - mu).exp())["kl/ref/k1"]
    assert float(found) == pytest.approx(float((old.exp() * r).sum()), abs=1e-12)


@pytest.mark.parametrize(
    ("words", "anchor"),
    [
        ([], "old"),
        (["collector.staleness=1"], "sampler"),
        (["collector.staleness=1", "loss.anchor=old"], "old"),
        (["collector.staleness=1", "loss.sampler_weight=truncate"], "old"),
        (["loss.anchor=sampler"], "sampler"),
        (["collector.staleness=1", "loss=klpen"], "old"),
        (["loss=dppo"], "sampler"),
    ],
)
def test_the_anchor_is_the_sampler_where_it_is_stale(job, words, anchor) -> None:
    assert job(*words).anchor == anchor


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["loss=dppo"], "loss=dppo divides by the sampler"),
        (["loss=custom", "loss.target=x:Own"], "loss=custom may read the sampler: scored.log_mu"),
    ],
)
def test_a_loss_without_an_anchor_is_told_none(job, words, line: str) -> None:
    config = job(*words, "collector.staleness=1")
    [told] = rooms.room(config, 10, torch.device("cpu"), "")
    assert told.partition("; ")[2] == line
