"""``benchmarks/topk.py``: forms of a KL from k tokens, on random logits."""

import pytest
import torch

from benchmarks import topk

VOCABULARY = 60


def logits(scale: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    pair = torch.randn(2, 200, VOCABULARY, dtype=torch.float64, generator=generator)
    return [(scale * x).requires_grad_() for x in pair]


def exact(student: torch.Tensor, teacher: torch.Tensor, reverse: bool) -> torch.Tensor:
    """By torch's own."""
    a, b = (student, teacher) if reverse else (teacher, student)
    of = [torch.distributions.Categorical(logits=x) for x in (a, b)]
    return torch.distributions.kl_divergence(*of)


@pytest.fixture
def measured(monkeypatch):
    """Everything, at k up to the whole vocabulary."""
    monkeypatch.setattr(topk, "KS", (1, 4, 16, VOCABULARY))

    def measure(scale: float, reverse: bool):
        student, teacher = logits(scale)
        pair = (x.detach().log_softmax(-1) for x in (student, teacher))
        draws = torch.Generator().manual_seed(1)
        return student, teacher, dict(topk.measure(*pair, reverse, draws))

    return measure


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_with_a_bucket_the_value_lies_between_0_and_the_exact_kl(measured, scale, reverse) -> None:
    student, teacher, found = measured(scale, reverse)
    kl = exact(student, teacher, reverse)
    values = {key: value for key, (value, *_) in found.items() if key[0] == "bucket"}
    assert len(values) == 8
    for value in values.values():
        assert (value >= -1e-12).all()
        assert (value <= kl + 1e-9).all()
    # The truncated sum has no such bounds.
    outside = [value for key, (value, *_) in found.items() if key[0] == "truncated"]
    assert any((value < -0.01).any() for value in outside)
    assert any((value > kl + 0.01).any() for value in outside)


@pytest.mark.parametrize("reverse", [True, False])
def test_of_the_whole_vocabulary_all_forms_are_the_exact_kl(measured, reverse) -> None:
    """And their gradients are autograd's."""
    student, teacher, found = measured(1.0, reverse)
    kl = exact(student, teacher, reverse)
    (slope,) = torch.autograd.grad(kl.sum(), student)
    for form in ("truncated", "renormalised", "bucket"):
        for of in ("teacher", "student"):
            value, told, dot, own, of_exact = found[form, of, VOCABULARY]
            assert torch.allclose(value, kl, atol=1e-9)
            assert torch.allclose(told, kl, atol=1e-12)
            for squared in (own, dot, of_exact):
                assert torch.allclose(squared, slope.square().sum(-1), atol=1e-7)


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("form", ["truncated", "renormalised", "bucket"])
def test_the_gradient_of_k_tokens_is_autograds(measured, form, reverse) -> None:
    student, teacher, found = measured(1.0, reverse)
    best = teacher.topk(4).indices
    pair = [x.log_softmax(-1).gather(1, best) for x in (student, teacher)]
    value = topk.estimate(form, *(pair if reverse else pair[::-1]))
    (slope,) = torch.autograd.grad(value.sum(), student)
    assert torch.allclose(found[form, "teacher", 4][3], slope.square().sum(-1), atol=1e-12)


def test_two_tokens_by_hand() -> None:
    """Of probabilities .5, .2 and .6, .3: tails of .3 and .1."""
    a, b = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.6, 0.3]]).log()
    truncated = 0.5 * torch.tensor(5 / 6).log() + 0.2 * torch.tensor(2 / 3).log()
    by_hand = {
        "truncated": truncated,
        "renormalised": truncated / 0.7 + torch.tensor(0.9 / 0.7).log(),
        "bucket": truncated + 0.3 * torch.tensor(3.0).log(),
    }
    for form, value in by_hand.items():
        assert topk.estimate(form, a, b).item() == pytest.approx(value.item(), abs=1e-6)


def test_sampled_k1_and_k3_have_the_exact_mean_and_k1_its_gradient(monkeypatch) -> None:
    """As a reward; k3 in the loss has the gradient of the other KL (docs/kl.md)."""
    monkeypatch.setattr(topk, "KS", (400_000,))
    student, teacher = (x[:1] for x in logits(1.0))
    pair = [x.detach().log_softmax(-1) for x in (student, teacher)]
    found = dict(topk.measure(*pair, True, torch.Generator().manual_seed(1)))
    summary = {form: topk.summary(found[form, "drawn", 400_000]) for form in topk.SAMPLED}
    for each in summary.values():
        assert each["value"] == pytest.approx(each["exact"], rel=0.01)
    (one,) = torch.autograd.grad(exact(student, teacher, True).sum(), student, retain_graph=True)
    (two,) = torch.autograd.grad(exact(student, teacher, False).sum(), student)
    other = torch.cosine_similarity(one, two).item()
    assert summary["k1"]["cosine"] == pytest.approx(1, abs=1e-3)
    assert summary["k3"]["cosine"] == pytest.approx(other, abs=5e-3)
    assert other < 0.95
