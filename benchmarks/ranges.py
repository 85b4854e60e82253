"""What docs/kl.md says of one enumerated problem, over 100 random ones of the same kind.

    python -m benchmarks.ranges              # tables, in a minute
    python -m benchmarks.ranges --seeds 1    # the one problem of the page

The chains of seed 0 were found by searching seeds and scales for the three published KLs, the
sequences of seed 0 for the published spreads; the twelve published gradient figures, which were no
part of the search, then agreed.

Expectations are sums over all episodes, or recursions; only the sampled means of k1 and k3 are
samples. A cell is the median over the problems and their range.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.distributions import Categorical, Normal

from benchmarks.results import table
from klrl.kl.charge import to_go
from klrl.kl.divergences import over_actions
from klrl.kl.estimators import ESTIMATORS, estimate_kl, exact_kl

COEF, DOUBLE = 0.5, torch.float64
#: KL(old||new) at which the error of a forgotten ratio is computed.
DISTANCES = (0.005, 0.06, 0.17)
#: Of the sequences whose KL is sampled.
TOKENS, STEPS = 64, 32


def cell(values: list[float], digits: int = 2) -> str:
    """Median [least, largest]; of one problem its number."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    numbers = (median(values), min(values), max(values))
    return "{} [{}, {}]".format(*(f"{number:.{digits}f}" for number in numbers))


def generators(seeds: int) -> Iterator[torch.Generator]:
    for seed in range(seeds):
        yield torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=generator)


def grad(value: Tensor, at: Tensor) -> Tensor:
    """The gradient of a value at a tensor; the graph is kept for the next one."""
    return torch.autograd.grad(value, at, retain_graph=True)[0]


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two gradients of any shape."""
    return float((a * b).sum() / (a.norm() * b.norm()))


def error(estimate: Tensor, true: Tensor) -> float:
    """|estimate - true| / |true|."""
    return float((estimate - true).norm() / true.norm())


# ------------------------------------------------------------------------------------ placements


@dataclass
class Chain:
    """A Markov chain of ``steps`` actions: the state is the last action, the first state is 0."""

    theta: Tensor  # the policy's logits [steps, states, actions], differentiable
    ref: Tensor  # the reference's logits, the same shape
    episodes: Tensor  # every sequence of actions [E, steps]

    def log_probs(self, logits: Tensor) -> Tensor:
        """log pi(a_t|s_t) of every episode, [E, steps]."""
        log_p = logits.log_softmax(-1)
        return torch.stack(
            [log_p[t, self.state(t), self.episodes[:, t]] for t in range(log_p.shape[0])], 1
        )

    def state(self, step: int) -> Tensor:
        """The state before a step, per episode."""
        if step == 0:
            return torch.zeros(len(self.episodes), dtype=torch.long)
        return self.episodes[:, step - 1]

    def exact(self, logits: Tensor) -> Tensor:
        """KL(pi||ref) at the state of each step of each episode, [E, steps]."""
        log_p, log_q = logits.log_softmax(-1), self.ref.log_softmax(-1)
        return self.at_states((log_p.exp() * (log_p - log_q)).sum(-1))

    def at_states(self, values: Tensor) -> Tensor:
        """Values [steps, states] at the states of every episode, [E, steps]."""
        return torch.stack([values[t, self.state(t)] for t in range(len(values))], 1)

    def kl(self) -> tuple[Tensor, Tensor]:
        """KL of whole episodes and its gradient with respect to theta."""
        log_p, log_q = self.log_probs(self.theta), self.log_probs(self.ref)
        value = (log_p.sum(1).exp() * (log_p - log_q).sum(1)).sum()
        return value.detach(), grad(value, self.theta)

    def gradient(self, values: Tensor) -> Tensor:
        """Gradient of the mean of values [E] over episodes, whose probabilities are held fixed."""
        p = self.log_probs(self.theta).sum(1).exp().detach()
        return grad((p * values).sum(), self.theta)


def chains(seed: int, scales: tuple[float, ...], actions: int = 4, steps: int = 5) -> list[Chain]:
    """Chains at growing distance from their references."""
    generator = torch.Generator().manual_seed(seed)
    episodes = torch.tensor(list(itertools.product(range(actions), repeat=steps)))
    shape = (steps, actions, actions)
    result = []
    for scale in scales:
        ref = torch.randn(shape, dtype=DOUBLE, generator=generator)
        theta = ref + scale * torch.randn(shape, dtype=DOUBLE, generator=generator)
        result.append(Chain(theta.requires_grad_(), ref, episodes))
    return result


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


#: With u = pi_ref / pi, D = E_pi[f(u)]: name -> f(u).
F: dict[str, Callable[[Tensor], Tensor]] = {
    "forward": lambda u: u * u.log(),
    "js": lambda u: 0.5 * ((2 / (1 + u)).log() + u * (2 * u / (1 + u)).log()),
}


def divergences(seeds: int) -> Iterator[list[str]]:
    """Error of the gradient of J = E[sum_t D(s_t)], by the placement of D."""
    for scale, name in itertools.product(range(2), F):
        figures: dict[str, list[float]] = {"KL": [], "split": [], "loss": [], "reward": []}
        for seed in range(seeds):
            chain = chains(seed, (0.3, 0.8))[scale]
            true = enumerated(chain, F[name])
            log_p, log_q = (chain.log_probs(x) for x in (chain.theta, chain.ref))
            tables = (x.log_softmax(-1) for x in (chain.theta, chain.ref))
            exact = chain.at_states(over_actions(name, *tables))
            later = (to_go(exact.detach(), placement="split") * log_p).sum(1)
            number = F[name]((log_q - log_p).exp()).detach()
            figures["KL"].append(float(chain.kl()[0]))
            for place, loss in (
                ("split", later + exact.sum(1)),
                ("loss", exact.sum(1)),
                ("reward", (to_go(number) * log_p).sum(1)),
            ):
                figures[place].append(error(chain.gradient(loss), true))
        yield [name, *(cell(values) for values in figures.values())]


def enumerated(chain: Chain, f: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of J with respect to theta: of the episodes' probabilities too."""
    log_p, log_q = chain.theta.log_softmax(-1), chain.ref.log_softmax(-1)
    d = chain.at_states((log_p.exp() * f((log_q - log_p).exp())).sum(-1))
    return grad((chain.log_probs(chain.theta).sum(1).exp() * d.sum(1)).sum(), chain.theta)


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


def policy_at(distance: float, theta: Tensor, direction: Tensor) -> Tensor:
    """log pi_old with KL(old||new) = distance, by bisection along a direction of the logits."""
    low, high = 0.0, 4.0
    log_p = theta.log_softmax(0)
    for _ in range(60):
        middle = (low + high) / 2
        log_old = (theta + middle * direction).log_softmax(0)
        kl = float((log_old.exp() * (log_old - log_p)).sum())
        low, high = (middle, high) if kl < distance else (low, middle)
    return log_old


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


def moments(log_p: Tensor, per_token: Tensor, steps: int) -> tuple[float, float]:
    """Mean and standard deviation of a sum over the tokens of a sequence that starts at state 0.

    Backwards, for X = x + X': E X = E[x + E X'], E X^2 = E[x^2 + 2 x E X' + E X'^2], where x and X'
    are independent given the next token.
    ``log_p`` is log pi(next token | last token), [tokens, tokens], like the summand ``per_token``.
    """
    p = log_p.exp()
    mean = square = torch.zeros(len(p), dtype=log_p.dtype)
    for _ in range(steps):
        square = (p * (per_token**2 + 2 * per_token * mean + square)).sum(-1)
        mean = (p * (per_token + mean)).sum(-1)
    return float(mean[0]), float((square[0] - mean[0] ** 2).sqrt())


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


TABLES = {
    "Chains of five steps: cosine in the reward, error in the loss, worst of k1 and split": (
        ("KL", "reward, exact", "reward, k2", "reward, k3", "loss, exact: error", "k1, split"),
        placements,
    ),
    "Divergences, chains of five steps: error of the gradient": (
        ("", "KL", "split, exact", "loss, exact", "reward, f(u)"),
        divergences,
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
    for title, (head, rows) in TABLES.items():
        print(f"{title} (median [least, largest] of {seeds} problems)\n")
        print(table(head, list(rows(seeds))), "\n")


if __name__ == "__main__":
    main()
