"""Policies made of a base model's samples, without training: best-of-n, and the optimum.

Best-of-n takes the response with the highest proxy of n. The optimum of E[proxy] - c * KL is the
base model tilted by exp(proxy / c). Expectations are sums over the samples; nothing is drawn again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import comb, log

import numpy as np

from klrl.report.statistics import Array

#: Of the prompts' effective sample sizes: a tenth of the prompts have fewer.
_FEW = 0.1


@dataclass(frozen=True)
class Tilted:
    """The base model tilted by exp(proxy / c), means over the prompts.

    Attributes:
        proxy, gold: expected scores.
        kl: KL(tilted || base), nats per response.
        effective: 1 / sum w^2, the effective number of samples, of the prompt at the lowest tenth.
            With few of them the scores are biased towards those of the base model.
    """

    proxy: float
    gold: float
    kl: float
    effective: float


def tilted(proxy: Array, gold: Array, c: float) -> Tilted:
    """The policy with the most E[proxy] - c * KL(policy || base), from samples of the base model.

    pi(y) = base(y) exp(proxy(y) / c) / Z. From N samples: weights w_i ~ exp(proxy_i / c), which sum
    to 1, and KL = sum_i w_i log(N w_i).

    Args:
        proxy: [prompts, N] what is maximised.
        gold: [prompts, N] what is meant.
        c: score per nat, above 0.
    """
    logits = (proxy - proxy.max(1, keepdims=True)) / c
    log_w = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    w = np.exp(log_w)
    kl = (w * (log_w + log(proxy.shape[1]))).sum(1)
    effective = np.quantile(1 / (w**2).sum(1), _FEW, method="lower")
    means = ((w * x).sum(1).mean() for x in (proxy, gold))
    return Tilted(*map(float, means), float(kl.mean()), float(effective))


def best_of_n_kl(proxy: Array, n: int) -> float:
    """KL(best-of-n || base) of a response, nats, mean over the prompts.

    The best of n independent responses, ties by lot, is y with probability base(y) times
    (F(s)^n - F(s-)^n) / (F(s) - F(s-)), where s is the score of y and F the distribution of scores
    under the base model, here that of the samples. So a prompt has

        KL = sum_s (F(s)^n - F(s-)^n) log((F(s)^n - F(s-)^n) / (F(s) - F(s-))),

    which is log n - (n - 1) / n where no scores tie, and less where they do (Beirami et al. 2024,
    "Theoretical guarantees on the best-of-n alignment policy", arXiv 2401.01879).

    Args:
        proxy: [prompts, N] scores of samples of the base model.
        n: candidates.
    """
    return float(np.mean([_best_of_n_kl(row, n) for row in proxy]))


def _best_of_n_kl(proxy: Array, n: int) -> float:
    _, sizes = np.unique(proxy, return_counts=True)
    below = np.concatenate([[0], np.cumsum(sizes)]) / len(proxy)
    chosen, base = np.diff(below**n), sizes / len(proxy)
    kept = chosen > 0  # 0 log 0 = 0; a small F to the n-th is 0 in floating point
    return float((chosen[kept] * np.log(chosen[kept] / base[kept])).sum())


def chances(proxy: Array, n: int) -> Array:
    """The chance of each of N samples to be chosen, when n of them are drawn without replacement.

    The one with the highest proxy is chosen, ties by lot: with c samples that are no better than
    value v, P(best <= v) = C(c, n) / C(N, n), and equals share what their value gets.

    Args:
        proxy: [N] scores.
        n: 1 .. N.

    Raises:
        ValueError: n is outside that.
    """
    count = len(proxy)
    if not 1 <= n <= count:
        raise ValueError(f"n={n}: give 1 .. {count}, the number of samples")
    _, at, sizes = np.unique(proxy, return_inverse=True, return_counts=True)
    # Whole numbers: C(128, 64) has 38 digits.
    below = [comb(int(c), n) for c in np.concatenate([[0], np.cumsum(sizes)])]
    shares = [(high - low) / comb(count, n) for low, high in pairwise(below)]
    return np.asarray(shares)[at] / sizes[at]


def best_of(proxy: Array, gold: Array, n: int) -> tuple[float, float]:
    """Mean proxy and mean gold score of the chosen response.

    Args:
        proxy: [prompts, N] what is chosen by.
        gold: [prompts, N] what is meant.
        n: candidates per prompt.
    """
    weights = np.stack([chances(row, n) for row in proxy])
    return float((weights * proxy).sum(1).mean()), float((weights * gold).sum(1).mean())
