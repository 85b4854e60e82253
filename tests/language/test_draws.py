"""One uniform number per token: the same tokens in any batch, drawn from the right distribution."""

import numpy as np
import pytest
import torch

from klrl.language.run import sampler as module
from klrl.language.run.draws import choose, uniforms
from klrl.language.run.sampler import CacheSampler, Decoding, SpecialTokens
from tests.language.families import tiny
from tests.language.toys import PAD, network, prompts

G, LONGEST = 4, 12
ENDS = tuple(range(2, 60))  # a fifth of the vocabulary ends a response


def sampled(model, ids, mask, way, group_size=G, **how):
    special = SpecialTokens(ENDS, PAD)
    found = CacheSampler(model, special, way=way)(
        ids, mask, group_size, Decoding(LONGEST), seed=5, **how
    )
    rows = zip(found.tokens, found.mask, strict=True)
    return [row[real].tolist() for row, real in rows]


@pytest.mark.parametrize("way", ["shared", "copied", "plain"])
def test_a_response_is_the_same_in_any_batch(way, monkeypatch) -> None:
    """Split in two processes' parts, alone, in a smaller group, with finished rows kept."""
    model, (ids, mask) = network().double(), prompts(lengths=(3, 7, 5, 4), pads=2)
    whole = sampled(model, ids, mask, way)
    lengths = {len(row) for row in whole}
    assert len(lengths) > 3
    parts = [sampled(model, ids[at : at + 2], mask[at : at + 2], way, first=at) for at in (0, 2)]
    assert [*parts[0], *parts[1]] == whole
    alone = [sampled(model, ids[[i]], mask[[i]], way, first=i) for i in (2, 0, 3, 1)]
    assert [alone[i] for i in (1, 3, 0, 2)] == [whole[i : i + G] for i in range(0, 4 * G, G)]
    fewer = sampled(model, ids, mask, way, group_size=2)
    assert fewer == [row for i, row in enumerate(whole) if i % G < 2]
    decoded = []
    for spare in (2.0, 0.0):  # finished responses never leave; they leave at once
        monkeypatch.setattr(module, "_SPARE", spare)
        rows, step = [], module.WAYS[way].step

        def counted(self, tokens, rows=rows, step=step):
            rows.append(len(tokens))
            return step(self, tokens)

        with monkeypatch.context() as patch:
            patch.setattr(module.WAYS[way], "step", counted)
            assert sampled(model, ids, mask, way) == whole
        decoded.append(sum(rows))
    needed = 0
    for fed in range(1, max(lengths)):  # a response of n tokens feeds n - 1
        alive = [sum(len(row) > fed for row in whole[i : i + G]) for i in range(0, 4 * G, G)]
        needed += sum(map(bool, alive)) * max(alive) if way == "shared" else sum(alive)
    assert decoded == [G * 4 * (max(lengths) - 1), needed]


def test_responses_leave_a_shared_row_of_any_model(monkeypatch) -> None:
    monkeypatch.setattr(module, "_SPARE", 0.0)
    model, (ids, mask) = tiny("llama").double(), prompts(lengths=(5, 9), pads=1)
    assert sampled(model, ids, mask, "shared") == sampled(model, ids, mask, "plain")


def test_the_numbers_are_those_of_numpys_philox() -> None:
    table = uniforms(7, range(9, 12), G, 5)
    assert torch.equal(table, uniforms(7, range(12), G, 9)[9:, :5])
    for row, own in zip(range(9, 12), table, strict=True):
        key = np.array([7, (row // G << 32) + row % G], dtype=np.uint64)
        raw = np.random.Philox(key=key).random_raw(5)
        assert own.tolist() == [(int(x) >> 11) * 2**-53 for x in raw]
    other = uniforms(8, range(9, 12), G, 5)
    assert not torch.isclose(table, other).any()


def test_tokens_have_the_probabilities_of_the_table() -> None:
    """Chi-square with 400,000 draws over 700 tokens, across blocks, some of probability 0.

    Its level is 1e-4. Its power against probabilities that are off by 5 % each, up or down, is
    above .99: the non-central chi-square with n sum (dp)^2 / p = 1,000, by Chebyshev's inequality.
    """
    count, size = 400_000, 700
    generator = torch.Generator().manual_seed(0)
    log_p = torch.randn(size, generator=generator).index_fill(0, torch.arange(9), -torch.inf)
    log_p = log_p.log_softmax(-1)
    uniform = uniforms(3, range(400), G, 1000).flatten()
    drawn = torch.cat([choose(log_p.expand(len(u), -1), u) for u in uniform.split(5000)])
    assert int(drawn.min()) >= 9
    found, expected = torch.bincount(drawn, minlength=size)[9:], count * log_p.exp().double()[9:]
    statistic = float(((found - expected) ** 2 / expected).sum())
    free, limit = size - 10, 840.0  # degrees of freedom
    level = torch.special.gammaincc(*torch.tensor([free / 2, limit / 2], dtype=torch.float64))
    assert 5e-5 < float(level) < 1e-4
    assert statistic < limit
    shift = count * 0.05**2
    assert 2 * (free + 2 * shift) / (free + shift - limit) ** 2 < 0.01


@pytest.mark.parametrize("size", [3, 256, 300, 70_000])
def test_a_token_is_the_inverse_of_the_cumulative_sum(size) -> None:
    log_p = (3 * torch.randn(64, size, generator=torch.Generator().manual_seed(1))).log_softmax(-1)
    uniform = uniforms(0, range(64), 1, 1).squeeze(1)
    cumulative = log_p.exp().double().cumsum(-1).numpy()
    found = choose(log_p, uniform)
    for row, u, token in zip(cumulative, uniform.tolist(), found.tolist(), strict=True):
        before = row[token - 1] if token else 0.0
        assert before - 1e-6 <= u * row[-1] <= row[token] + 1e-6
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    sparse = torch.full((2, size), -torch.inf).index_fill(1, torch.tensor([1, size - 2]), -0.7)
    assert choose(sparse, ends).tolist() == [1, size - 2]
