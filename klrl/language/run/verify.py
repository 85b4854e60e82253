"""Verifies a language run; recomputes log-probs and KLs of its samples with plain transformers.

The inputs are the token ids in ``samples.jsonl``, one sample per forward, without padding. Models
compute in float32 (or float64), the softmax in float64. klrl only loads the weights that drew the
sample: those of the last or best checkpoint, or the base model's (before the first update) if the
checkpoints have its digest. Without these weights, the sample's numbers cannot be recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from pydantic import BaseModel, Field, NonNegativeInt
from torch import Tensor, nn

from klrl.base.files import ROWS, read_plain
from klrl.base.text import counted
from klrl.config import LANGUAGE, LanguageConfig, factory
from klrl.kl.divergences import over_actions
from klrl.language.model.causal_lm import in_full_precision, model_device
from klrl.language.model.plain import AGREEMENT
from klrl.language.run.evaluate import trained_reference
from klrl.language.run.kl import Reference, checkpointed
from klrl.language.run.load import (
    Policy,
    check_base,
    language_config,
    make_policy,
    relocated,
    trained_policy,
)
from klrl.runs.checkpoint import digests
from klrl.runs.find import find_run
from klrl.runs.folder import RunFolder
from klrl.runs.metrics import Row
from klrl.runs.returns import last_recorded
from klrl.train.verify import Comparison, Record, verify_record

#: Name of a verified quantity -> its field in a sample.
RECORDED = {
    "log-probs of the policy": "log_probs",
    "log-probs of the reference": "ref_log_probs",
    "KL(policy||reference)": "kl",
}
POLICY, REFERENCE, KL = RECORDED
#: Name of a quantity -> its recomputed numbers of a sample [n], nats, float64.
Recomputed: TypeAlias = dict[str, Tensor]
#: Bounds in float32 on the largest and the mean difference, recorded - recomputed, in nats.
LARGEST, MEAN = 1e-4, 1e-5
#: Smallest bound on the mean difference in 16 bits: the spacing of bfloat16 at 1.
_ROUNDING = torch.finfo(torch.bfloat16).eps
#: The largest difference may be this many times the mean's bound: rounding errors of thirty layers
#: have a long tail, on SmolLM2 up to 12 times their root mean square.
_TAIL = 20


class Sample(BaseModel):
    """The verified part of a line of ``samples.jsonl``; nats, one number per response token.

    ``weights`` is the number of samples from which the policy had learned before it drew this one.
    """

    line: int = 0
    weights: int
    prompt_ids: list[NonNegativeInt] = Field(min_length=1)
    response_ids: list[NonNegativeInt] = Field(min_length=1)
    log_probs: list[float]
    ref_log_probs: list[float] = []
    kl: list[float] = []


def verify_run(run: str | Path, device: str = "cpu", model: str | None = None) -> Record:
    """Verify the record of a language run; recompute the numbers of its samples.

    Args:
        run: the run folder.
        device: where to compute.
        model: current folder of the run's base model; None: the path stored in the run.

    Raises:
        ConfigError: no such run, a control run, or a missing or changed base model.
    """
    folder = find_run(str(run), "RUN")
    config = replace(relocated(language_config(folder, "RUN"), model), device=device)
    check_base(config)
    record, drawn = Record(), list[tuple[Sample, Recomputed]]()
    samples = _read_samples(folder, config, record)
    for weights, policy, reference in _policies(folder, config, model):
        embedding: Any = policy.model.get_input_embeddings()  # type: ignore[operator]
        known = embedding.num_embeddings
        for sample in [each for each in samples if each.weights == weights]:
            if (highest := max(*sample.prompt_ids, *sample.response_ids)) < known:
                drawn.append((sample, recomputed(sample, config, policy, reference)))
                continue
            samples.remove(sample)
            told = f"has token id {highest}, but the model has {known} tokens"
            record.problems.append(f"samples.jsonl line {sample.line}: {told}")
    rows = verify_record(folder, config, device, record)
    for compared in _measures(drawn, bounds_of(rows, config)) if drawn else ():
        record.measures.append(compared)
        (record.looked if compared.ok else record.problems).append(compared.line)
    if gone := len(samples) - len(drawn):
        record.unseen.append(f"log-probs of {counted(gone, 'sample')}, whose weights are gone")
    record.unseen.append("texts and rewards of samples" if samples else "samples: there are none")
    return record


def _read_samples(folder: Path, config: LanguageConfig, record: Record) -> list[Sample]:
    """Read ``samples.jsonl``, if there is one, up to a last line that is still being written."""
    file, samples = RunFolder(folder).samples, []
    lines = read_plain(file, ROWS).split(b"\n")[:-1] if file.is_file() else []
    fields = [*RECORDED.values()] if config.has_reference else [RECORDED[POLICY]]
    for number, line in enumerate(lines, 1):
        try:
            sample = Sample.model_validate_json(line).model_copy(update={"line": number})
            if {len(getattr(sample, each)) for each in fields} != {len(sample.response_ids)}:
                raise ValueError("a number is needed for each token")
        except ValueError:
            record.problems.append(f"samples.jsonl line {number}: is not a valid sample")
        else:
            samples.append(sample)
    return samples


# ------------------------------------------------------------------------------------ comparing


def bounds_of(rows: Sequence[Row], config: LanguageConfig) -> tuple[float, float]:
    """Return the bounds on the largest and on the mean difference, by the precision of the run.

    In 16 bits, rounding alone gives a KL > 0, the metric ``kl/ref/floor``. For small differences d
    of log-probs KL = E[d^2] / 2, so the mean of |d| is at most sqrt(2 floor). If sampling and
    scoring round alike, the floor is near 0, but both differ from float32; so the mean's bound is
    at least :data:`_ROUNDING`. The bound on the largest |d| is :data:`_TAIL` times that or more.
    """
    if config.actor.dtype in ("float32", "float64") and not config.mixed:
        return LARGEST, MEAN
    mean = max(math.sqrt(2 * last_recorded(rows).get("kl/ref/floor", 0.0)), _ROUNDING)
    return max(AGREEMENT[torch.bfloat16], _TAIL * mean), mean


def _measures(
    drawn: Sequence[tuple[Sample, Recomputed]], bounds: tuple[float, float]
) -> list[Comparison]:
    """Compare recomputed numbers with the recorded ones.

    In 16 bits the mean difference of the KL may be at most the effect of rounding. If e_p and e_r
    are the root mean square errors of the log-probs of policy and reference, the error of the KL
    is at most (e_p^2 + e_r^2) / 2 + (e_p + e_r) sqrt(2 KL), to second order in e. This is
    Cauchy-Schwarz with KL = E[d^2] / 2 for small differences d of log-probs.
    """
    found = {name: _compared(name, drawn, bounds) for name in drawn[0][1]}
    if KL in found and bounds != (LARGEST, MEAN):
        e_p, e_r = found[POLICY].root, found[REFERENCE].root
        kl = float(torch.cat([numbers[KL] for _, numbers in drawn]).mean())
        rounding = (e_p**2 + e_r**2) / 2 + (e_p + e_r) * math.sqrt(2 * max(kl, 0.0))
        found[KL] = replace(found[KL], bounds=(bounds[0], min(bounds[1], rounding)))
    return [*found.values()]


def _compared(
    name: str, drawn: Sequence[tuple[Sample, Recomputed]], bounds: tuple[float, float]
) -> Comparison:
    off = [
        (x - x.new_tensor(getattr(sample, RECORDED[name]))).abs().nan_to_num(math.inf)
        for sample, x in ((sample, numbers[name]) for sample, numbers in drawn)
    ]
    largest, every = [float(each.max()) for each in off], torch.cat(off)
    worst = largest.index(max(largest))
    place = f"samples.jsonl line {drawn[worst][0].line}, token {int(off[worst].argmax()) + 1}"
    mean, root = float(every.mean()), float(every.square().mean().sqrt())
    return Comparison(name, bounds, len(off), max(largest), mean, root, place)


# ------------------------------------------------------------------------------------ computing


def _policies(
    folder: Path, config: LanguageConfig, model: str | None
) -> Iterator[tuple[int, Policy, Reference | None]]:
    """Yield each policy whose weights are known, the number of samples before it, and pi_ref."""
    found = {which: digests(folder, which, ()) for which in ("best", "last")}
    stored = {entry[0]: which for which, entry in found.items() if entry is not None}
    rule = factory("reference", config.reference, LANGUAGE)(config.reference)
    if found["last"] and config.has_reference and not checkpointed(rule, config):
        stored.setdefault(0, "")  # the base model: a digest of it is in the checkpoints
    for samples, which in stored.items():
        if which:
            policy = trained_policy(folder, which, config.device, model=model)
        else:
            policy = make_policy(config, say=lambda _: None)
        reference = None
        if config.has_reference:
            base, which = config.actor.model, which or "last"
            reference = trained_reference(folder, which, policy, base, config.device)
        yield samples, policy, reference


@torch.no_grad()
def table_of(network: nn.Module, sample: Sample, temperature: float) -> Tensor:
    """Compute log softmax(logits / temperature) at each response token, [n, V] float64.

    The network may be a :class:`Reference`.
    """
    module = network.module if isinstance(network, Reference) else network
    if next(module.parameters()).dtype != torch.float64:
        module.float()
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]], device=model_device(module))
    with in_full_precision(module):
        logits = network.eval()(input_ids=ids, use_cache=False).logits
    logits = logits[0, len(sample.prompt_ids) - 1 : -1].double()
    return (logits / temperature).log_softmax(-1).cpu()


def recomputed(
    sample: Sample, config: LanguageConfig, policy: Policy, reference: Reference | None
) -> Recomputed:
    """Recompute a sample's log-probs [n] under each model, and the KL if there is a reference."""
    temperature, chosen = config.collector.temperature, sample.response_ids
    log_p, at = table_of(policy.model, sample, temperature), (range(len(chosen)), chosen)
    if reference is None:
        return {POLICY: log_p[at]}
    log_q = table_of(reference, sample, temperature)
    # KL(pi || pi_ref) = sum_a pi(a) (ln pi(a) - ln pi_ref(a)), over the whole vocabulary
    kl = over_actions("reverse", log_p, log_q)
    return {POLICY: log_p[at], REFERENCE: log_q[at], KL: kl}
