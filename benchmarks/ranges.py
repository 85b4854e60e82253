"""What docs/kl.md says of one enumerated problem, over 100 random ones of the same kind.

    python -m benchmarks.ranges          # tables, in half a minute
    python -m benchmarks.ranges --seeds 10

Expectations are sums over all episodes, or recursions; only the sampled means of k1 and k3 are
samples. A cell is the median over the problems and their range.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from statistics import median

import torch
from torch import Tensor
from torch.distributions import Categorical, Normal

from benchmarks.published.episodes import chains
from benchmarks.published.estimates import DISTANCES, DOUBLE, cosine, error, grad, policy_at
from benchmarks.published.tokens import STEPS, TOKENS, moments
from benchmarks.results import table
from klrl.kl.charge import to_go
from klrl.kl.estimators import ESTIMATORS, estimate_kl, exact_kl
from klrl.losses.functional import mean, sequence

COEF = 0.5


def cell(values: list[float], digits: int = 2) -> str:
    """Median [least, largest]."""
    numbers = (median(values), min(values), max(values))
    return "{} [{}, {}]".format(*(f"{number:.{digits}f}" for number in numbers))


def generators(seeds: int) -> Iterator[torch.Generator]:
    for seed in range(seeds):
        yield torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=generator)


# ------------------------------------------------------------------------------------ placements


def placements(seeds: int) -> Iterator[list[str]]:
    """Cosine with the exact gradient in the reward, error in the loss; chains of five steps."""
    scales = (0.3, 0.8, 1.5)
    problems = [chains(seed, scales) for seed in range(seeds)]
    for place in range(len(scales)):
        figures: dict[str, list[float]] = {}
        for problem in problems:
            chain = problem[place]
            value, true = chain.kl()
            log_p, log_q = chain.log_probs(chain.theta), chain.log_probs(chain.ref)
            exact, ratio = chain.exact(chain.theta), (log_p - log_q).detach()
            each = {"exact": exact.detach(), "k2": ratio**2 / 2, "k3": (-ratio).exp() - 1 + ratio}
            found = {"KL": float(value)}
            for name, kl in each.items():
                found[name] = cosine(chain.gradient((to_go(kl) * log_p).sum(1)), true)
            found["loss"] = error(chain.gradient(exact.sum(1)), true)
            right = {
                "k1": (to_go(ratio) * log_p).sum(1),
                "split": (to_go(exact.detach()) * log_p + exact).sum(1),
            }
            found["right"] = max(error(chain.gradient(x), true) for x in right.values())
            for name, figure in found.items():
                figures.setdefault(name, []).append(figure)
        right = max(figures.pop("right"))
        yield [*(cell(values) for values in figures.values()), f"{right:.0e}"]


def forgotten_ratio(seeds: int) -> Iterator[list[str]]:
    """Error of k2 in the loss without w, 50 actions sampled from pi_old."""
    for distance in DISTANCES:
        errors = []
        for generator in generators(seeds):
            ref = normal(generator, 50)
            theta = (ref + 0.5 * normal(generator, 50)).requires_grad_()
            old = policy_at(distance, theta.detach(), normal(generator, 50))
            log_p, log_q = theta.log_softmax(0), ref.log_softmax(0)
            true = grad((log_p.exp() * (log_p - log_q)).sum(), theta)
            without = grad((old.exp() * ESTIMATORS["k2"](log_p - log_q)).sum(), theta)
            errors.append(error(without, true))
        yield [f"{distance}", cell(errors)]


# --------------------------------------------------------------------------------------- sampling


def sequences(seeds: int) -> Iterator[list[str]]:
    """Std / true of a sequence's KL, sampled and Rao-Blackwellised, by recursion."""
    stds: dict[str, list[float]] = {"KL": [], "k1": [], "k3": [], "exact": []}
    for generator in generators(seeds):
        ref = 2 * normal(generator, TOKENS, TOKENS)
        theta = ref + 0.1 * normal(generator, TOKENS, TOKENS)
        log_p, log_q = theta.log_softmax(-1), ref.log_softmax(-1)
        exact = exact_kl(Categorical(logits=theta), Categorical(logits=ref))
        ratio = log_p - log_q
        each = {"k1": ratio, "k3": (-ratio).exp() - 1 + ratio, "exact": exact[:, None] + 0 * ratio}
        for name, kl in each.items():
            true, std = moments(log_p, kl, STEPS)
            stds[name].append(std / true)
        stds["KL"].append(true)
    yield [cell(values, 3) for values in stds.values()]


def sampled_means(seeds: int) -> Iterator[list[str]]:
    """Sampled mean - KL, in nats, of two unit Gaussians."""
    for kl, count in itertools.product((0.5, 2.0, 4.0, 8.0, 16.0), (2048, 65_536)):
        p, q = Normal(0.0, 1.0), Normal(math.sqrt(2 * kl), 1.0)
        off: dict[str, list[float]] = {"k1": [], "k3": []}
        for generator in generators(seeds):
            x = normal(generator, count)
            for name, values in off.items():
                estimate = estimate_kl(p.log_prob(x), q.log_prob(x), name)
                values.append(float(estimate.mean()) - kl)
        yield [f"{kl:g}", str(count), cell(off["k1"]), cell(off["k3"])]


# --------------------------------------------------------------------------------------- language


def reductions(seeds: int) -> Iterator[list[str]]:
    """Cosine of the expected gradient with that of J, by the responses of a minibatch."""
    responses, mask = all_responses()
    lengths = mask.sum(1)
    for size in (1, 4, 16, 64):
        cosines: dict[str, list[float]] = {"token": [], "sequence": []}
        for generator in generators(seeds):
            theta = normal(generator, CONTEXTS, V).requires_grad_()
            ref, score = normal(generator, CONTEXTS, V), normal(generator, len(responses))
            log_p, log_q = (chosen(logits, responses, mask) for logits in (theta, ref))
            p = log_p.sum(1).exp().detach()
            ratio = (log_p - log_q).sum(1)
            true = grad((log_p.sum(1).exp() * (score - COEF * ratio)).sum(), theta)
            centred = score - (p * score).sum()
            advantage = centred[:, None] - COEF * to_go((log_p - log_q).detach(), mask)
            gain = (advantage * log_p).masked_fill(~mask, 0.0)
            for name, weight in (
                ("token", expected_share(lengths, p, size)),
                ("sequence", torch.ones(len(responses), dtype=DOUBLE)),
            ):
                cosines[name].append(cosine(grad((p * weight * gain.sum(1)).sum(), theta), true))
        yield [str(size), cell(cosines["token"]), cell(cosines["sequence"], 4)]


#: Tokens, the last of which ends a response, and the longest response.
V, LONGEST = 3, 6
CONTEXTS = sum((V - 1) ** length for length in range(LONGEST))


def all_responses() -> tuple[Tensor, Tensor]:
    """Every response [E, LONGEST] and its mask: they end at token V - 1, or at the longest."""
    rows = []
    for length in range(1, LONGEST + 1):
        for start in itertools.product(range(V - 1), repeat=length - 1):
            ends = range(V) if length == LONGEST else (V - 1,)
            rows += [[*start, last] + [0] * (LONGEST - length) for last in ends]
    responses = torch.tensor(rows)
    ended = (responses == V - 1).int().cumsum(1) - (responses == V - 1).int()
    return responses, ended == 0


def chosen(logits: Tensor, responses: Tensor, mask: Tensor) -> Tensor:
    """Log-prob of every token of every response, 0 at padding: a row of logits per prefix."""
    log_p, contexts = logits.log_softmax(-1), torch.zeros_like(responses)
    first, index = 0, torch.zeros(len(responses), dtype=torch.long)
    for t in range(responses.shape[1]):
        contexts[:, t] = first + index
        index = index * (V - 1) + responses[:, t].clamp_max(V - 2)
        first += (V - 1) ** t
    contexts = contexts.masked_fill(~mask, 0)
    each = log_p[contexts].gather(-1, responses[..., None]).squeeze(-1)
    return each.masked_fill(~mask, 0.0)


def expected_share(lengths: Tensor, p: Tensor, size: int) -> Tensor:
    """E[size / tokens of the minibatch], given each response's length; the others are draws."""
    of_length = torch.zeros(LONGEST + 1, dtype=DOUBLE).index_add(0, lengths, p)
    others = torch.ones(1, dtype=DOUBLE)
    for _ in range(size - 1):
        others = torch.nn.functional.conv1d(
            others[None, None], of_length.flip(0)[None, None], padding=LONGEST
        )[0, 0]
    total = lengths[:, None] + torch.arange(len(others))
    return (others * size / total).sum(1)


def check_reductions() -> None:
    """``mean`` and ``sequence`` of klrl are what :func:`reductions` takes them for."""
    mask = torch.tensor([[True, True, False], [True, False, False]])
    value = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]])
    assert float(mean(value, mask)) == 2.0
    assert float(sequence(value, mask)) == 3.0


TABLES = {
    "Chains of five steps: cosine in the reward, error in the loss, worst of k1 and split": (
        ("KL", "reward, exact", "reward, k2", "reward, k3", "loss, exact: error", "k1, split"),
        placements,
    ),
    "k2 in the loss without w: error": (("KL(old||new)", "error"), forgotten_ratio),
    "Sequences of 32 tokens: std / true": (("KL", "k1", "k3", "exact"), sequences),
    "Sampled mean - KL, two unit Gaussians, nats": (
        ("KL", "samples", "k1", "k3"),
        sampled_means,
    ),
    "loss.reduction: cosine with the gradient of J": (
        ("responses in a minibatch", "token", "sequence"),
        reductions,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100)
    seeds = parser.parse_args().seeds
    check_reductions()
    for title, (head, rows) in TABLES.items():
        print(f"{title} (median [least, largest] of {seeds} problems)\n")
        print(table(head, list(rows(seeds))), "\n")


if __name__ == "__main__":
    main()
