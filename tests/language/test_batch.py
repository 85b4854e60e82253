"""The layout of the language batch, and the preflight's checks."""

import pytest
import torch

from klrl.language.data.batch import (
    ASSISTANT,
    ATTENTION,
    LOG_PROBS,
    SCORE,
    Responses,
    make_batch,
    pad_to_full,
    response_part,
    set_scores,
    take_prompts,
)
from klrl.language.model.vocabulary import response_log_probs
from klrl.language.run import preflight
from klrl.language.run.kl import charge
from klrl.language.run.record import rewards_of
from klrl.language.run.sampler import CacheSampler, Decoding, SpecialTokens
from klrl.language.run.scoring import ScoringLayout
from tests.language.toys import EOS, GROUP, PAD, network, prompts, rollout

SPECIAL = SpecialTokens((EOS,), PAD)


def small():
    """Two prompts x 2: lengths 2 and 1, responses of 3, 1, 2 and 3 tokens; the last truncated."""
    prompt = torch.tensor([[5, 6], [0, 7]])
    prompt_mask = torch.tensor([[1, 1], [0, 1]])
    tokens = torch.tensor([[8, 9, 2], [2, 0, 0], [9, 2, 0], [8, 8, 8]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool()
    log_probs = torch.full((4, 3), -1.5).masked_fill(~mask, 0.0)
    truncated = torch.tensor([False, False, False, True])
    return prompt, prompt_mask, Responses(tokens, mask, log_probs, truncated)


def test_the_layout_by_hand() -> None:
    batch = make_batch(*small(), 2)
    assert batch.batch_size == (4,)
    assert batch["tokens", "full"].tolist() == [
        [5, 6, 8, 9, 2],
        [5, 6, 2, 0, 0],
        [0, 7, 9, 2, 0],
        [0, 7, 8, 8, 8],
    ]
    assert batch[ATTENTION].int().tolist() == [
        [1, 1, 1, 1, 1],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 1, 1, 1, 1],
    ]
    assert batch[ASSISTANT].int().tolist() == [
        [0, 0, 1, 1, 1],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    assert batch[LOG_PROBS][1].tolist() == [0, 0, -1.5, 0, 0]
    assert batch["next", "done"].all()
    assert batch["next", "truncated"].tolist() == [[False], [False], [False], [True]]
    assert response_part(batch, LOG_PROBS).shape == (4, 3)
    assert torch.equal(pad_to_full(batch, response_part(batch, LOG_PROBS)), batch[LOG_PROBS])
    set_scores(batch, torch.arange(4.0))
    assert batch[SCORE].shape == (4, 1, 1)
    assert take_prompts(batch, torch.tensor([1]), 2)[SCORE].flatten().tolist() == [2, 3]


def sampled_batch(temperature=1.0, model=None, special=SPECIAL):
    model, (ids, mask) = model or network(), prompts()
    sampler = CacheSampler(model, special)
    found = sampler(ids, mask, GROUP, Decoding(8, temperature))
    return found, make_batch(ids, mask, found, GROUP)


@pytest.mark.parametrize(("scored_at", "ok"), [(0.7, True), (1.0, False)])
def test_another_temperature_is_found(scored_at, ok) -> None:
    model = network()
    found, batch = sampled_batch(0.7, model)
    policy = ScoringLayout(GROUP, False).next_tokens(model, batch, scored_at)
    again = response_log_probs(policy, found.tokens, found.mask)
    check = preflight.sampled_against_recomputed(found.log_probs, again, found.mask, torch.float32)
    assert check.ok == ok


def test_dropout_while_sampling_is_found() -> None:
    found, _ = sampled_batch()
    off = found.log_probs + 1e-3 * torch.randn(found.log_probs.shape)
    check = preflight.sampled_against_recomputed(found.log_probs, off, found.mask, torch.float32)
    assert not check.ok
    nan = found.log_probs.masked_fill(found.mask, torch.nan)
    check = preflight.sampled_against_recomputed(found.log_probs, nan, found.mask, torch.float32)
    assert not check.ok
    assert str(check) == "sampled - recomputed log-probs, nats: nan (at most 0.0001) FAILED"


def test_lost_endings_are_counted() -> None:
    batch = make_batch(*small(), 2)
    assert preflight.endings(batch, SPECIAL).ok
    assert "pad equals EOS" in preflight.endings(batch, SpecialTokens((2,), 2)).detail
    lost = make_batch(*small(), 2)
    lost[ASSISTANT][0, 4] = lost[ATTENTION][0, 4] = False
    assert preflight.endings(lost, SPECIAL).value == 1
    late = make_batch(*small(), 2)
    late["tokens", "response"][3, 1] = EOS
    assert preflight.endings(late, SPECIAL).value == 1
    wrong = make_batch(*small(), 2)
    wrong["next", "truncated"][:] = False
    assert preflight.endings(wrong, SPECIAL).value == 1


def test_samplers_batches_end_well_with_pad_as_eos() -> None:
    special = SpecialTokens(tuple(range(2, 60)), 2)
    found, batch = sampled_batch(special=special)
    assert (found.mask.sum(1) < found.mask.shape[1]).any()
    assert preflight.endings(batch, special).ok


def test_groups_with_equal_scores_are_counted() -> None:
    batch = rollout(group_size=3)
    set_scores(batch, torch.tensor([1.0, 1, 1, 0, 1, 0, 0, 0, 0]))
    charge(batch, None)
    assert rewards_of(batch, None, 3).own["reward/equal_groups"] == pytest.approx(2 / 3)
    assert "reward/equal_groups" not in rewards_of(batch, None, 1).own
