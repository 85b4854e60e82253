"""Best-of-n from a base model: the response with the highest proxy of n, its gold score, its KL.

The expectation over which n of N samples are drawn is taken exactly, not by drawing.
"""

from __future__ import annotations

from itertools import pairwise
from math import comb, log
from pathlib import Path

import numpy as np

from klrl.report.statistics import Array


def kl_bound(n: int) -> float:
    """KL(best-of-n || base) of a response, nats: log n - (n - 1) / n.

    Exact where no two responses tie, else an upper bound (Beirami et al. 2024, "Theoretical
    guarantees on the best-of-n alignment policy", arXiv 2401.01879).
    """
    return log(n) - (n - 1) / n


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


def base_scores(prompts: int, samples: int, seed: int, kept: Path) -> tuple[Array, Array]:
    """Proxy and gold scores [prompts, samples] of the base model of ``experiment=sort_digits``.

    Args:
        prompts: the first ones of the evaluation split.
        samples: for each.
        seed: of the samples.
        kept: a file that has them, or shall have them.
    """
    if not kept.exists():
        proxy, gold = _sample(prompts, samples, seed)
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(kept, proxy=proxy, gold=gold)
    with np.load(kept) as found:
        proxy, gold = found["proxy"], found["gold"]
    if proxy.shape != (prompts, samples):
        raise SystemExit(f"{kept}: holds {proxy.shape}, not {(prompts, samples)}; delete it")
    return proxy, gold


def _sample(prompts: int, samples: int, seed: int) -> tuple[Array, Array]:
    import torch

    from klrl.config import LanguageConfig
    from klrl.config.checks import to_config
    from klrl.config.compose import compose
    from klrl.language.policy import make_policy
    from klrl.language.rollout import decoding_of, respond, texts_of
    from klrl.language.sampler import CacheSampler
    from klrl.language.tasks import make_task

    torch.set_num_threads(1)
    config = to_config(compose(["experiment=sort_digits", "env.reward=proxy", "device=cpu"]))
    assert isinstance(config, LanguageConfig)
    policy, task = make_policy(config), make_task(config.env, seed=0)
    assert task.gold is not None
    stream = task.stream(policy.causal.tokenizer, None, "eval")
    sampler, decoding = CacheSampler(policy.model, policy.special), decoding_of(config)
    generator = torch.Generator().manual_seed(seed)
    proxy, gold, at_a_time = [], [], 8
    for _ in range(0, prompts, at_a_time):
        taken = stream.take(at_a_time)
        answers = texts_of(policy, respond(sampler, taken, samples, decoding, generator))
        asked = taken.repeat(samples).prompts
        proxy.append(task.reward(asked, answers).reshape(at_a_time, samples).numpy())
        gold.append(task.gold(asked, answers).reshape(at_a_time, samples).numpy())
    return np.concatenate(proxy), np.concatenate(gold)
