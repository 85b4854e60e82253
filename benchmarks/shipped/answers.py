"""What policies answer to one set of prompts: scores, and how far they are from the base model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDictBase

from klrl.config import LanguageConfig
from klrl.config.checks import to_config
from klrl.config.compose import compose
from klrl.language.data.batch import (
    LOG_PROBS,
    REF_LOG_PROBS,
    response_mask,
    response_part,
)
from klrl.language.data.tasks import make_task
from klrl.language.model.causal_lm import head
from klrl.language.model.plain import packed_states
from klrl.language.model.vocabulary import NextTokens
from klrl.language.run.evaluate import places
from klrl.language.run.kl import EXACT, annotate
from klrl.language.run.load import Policy, language_config, make_policy, trained_policy
from klrl.language.run.rollout import STATES, decoding_of, respond, texts_of
from klrl.language.run.sampler import CacheSampler
from klrl.report.runs import ReadRun
from klrl.report.statistics import Array
from klrl.train.evaluate import Starts

#: The prompts of ``klrl evaluate``: no evaluation of a run shows them.
STARTS = Starts("evaluate")


@dataclass(frozen=True)
class Answers:
    """Of responses [prompts, samples], all distributions at the temperature of sampling."""

    proxy: Array  # the reward
    gold: Array  # what is meant by it
    tokens: Array  # of the response, its EOS counted
    nll: Array  # -log base of the tokens, nats per response
    kl: Array  # KL(policy||base) of the next-token distributions in closed form, nats per response


def base_answers(
    words: Sequence[str], prompts: int, samples: int, seed: int, path: Path, at_a_time: int
) -> Answers:
    """Those of a job's model before any update."""

    def make() -> Answers:
        config = to_config(compose([*words, "device=cpu"]))
        assert isinstance(config, LanguageConfig)
        base = make_policy(config, say=lambda _: None)
        return _answers(config, base, base, prompts, samples, seed, at_a_time)

    return _kept(path, f"{' '.join(words)}: {prompts} x {samples}, seed {seed}", make)


def trained_answers(
    run: ReadRun, prompts: int, samples: int, path: Path, at_a_time: int
) -> Answers:
    """Those of a run's last policy to the same prompts; its seed is that of the samples.

    Arguments as of :func:`base_answers`.
    """

    def make() -> Answers:
        config = language_config(run.path)
        policy, base = trained_policy(run.path), make_policy(config, say=lambda _: None)
        return _answers(config, policy, base, prompts, samples, run.seed, at_a_time)

    about = f"{run.path}, ended {run.manifest['ended']}: {prompts} x {samples}"
    return _kept(path, about, make)


def _kept(path: Path, about: str, make: Callable[[], Answers]) -> Answers:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, about=np.array(about), **asdict(make()))
    with np.load(path) as found:
        holds = str(found["about"])
        if holds != about:
            raise SystemExit(f"{path}: holds {holds}, not {about}; delete it")
        return Answers(**{name: found[name] for name in Answers.__annotations__})


@torch.no_grad()
def _answers(
    config: LanguageConfig,
    policy: Policy,
    base: Policy,
    prompts: int,
    samples: int,
    seed: int,
    at_a_time: int,
) -> Answers:
    torch.set_num_threads(1)
    task = make_task(config.env, seed=0)
    stream = task.stream(policy.causal.tokenizer, None, "eval")
    stream.served = places(STARTS, prompts, task.evaluations).start
    sampler = CacheSampler(policy.model, policy.special, keep_states=True)
    generator = torch.Generator().manual_seed(seed)
    parts: list[Answers] = []
    for _ in range(0, prompts, at_a_time):
        taken = stream.take(at_a_time)
        batch = respond(sampler, taken, samples, decoding_of(config), generator)
        texts = texts_of(policy, batch)
        asked = [prompt for prompt in taken.prompts for _ in range(samples)]
        assert task.gold is not None
        log_base, kl = _beside_base(policy, base, batch, config.collector.temperature)
        columns = (
            *(task.reward(asked, texts), task.gold(asked, texts)),
            *(response_mask(batch).sum(1), -log_base.sum(1), kl.sum(1)),
        )
        parts.append(Answers(*(c.double().reshape(at_a_time, samples).numpy() for c in columns)))
    names = Answers.__annotations__
    return Answers(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})


def _beside_base(
    policy: Policy, base: Policy, batch: TensorDictBase, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token [B, R]: log base, and the exact KL(policy||base); 0 at padding."""
    mask = response_mask(batch)
    if policy is base:
        log_base = response_part(batch, LOG_PROBS)
        return log_base.where(mask, 0.0), torch.zeros_like(log_base)
    of_policy = NextTokens(batch[STATES], head(policy.model), temperature)
    of_base = NextTokens(packed_states(base.model, batch), head(base.model), temperature)
    annotate(batch, of_policy, of_base)
    return response_part(batch, REF_LOG_PROBS).where(mask, 0.0), batch[EXACT].where(mask, 0.0)
