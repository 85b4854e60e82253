"""Verifies a language run; recomputes log-probs and KLs of its samples with plain transformers.

The inputs are the token ids in ``samples.jsonl``, one sample per forward, without padding. Models
compute in float32 (or float64), the softmax in float64. klrl only loads the weights that drew the
samples, those of the last checkpoint; the weights of earlier samples are gone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from klrl.base.errors import first_line
from klrl.base.files import ROWS, read_plain
from klrl.base.text import counted
from klrl.config import LanguageConfig
from klrl.kl.divergences import over_actions
from klrl.language.model.causal_lm import in_full_precision, model_device
from klrl.language.model.plain import AGREEMENT
from klrl.language.run.evaluate import trained_reference
from klrl.language.run.kl import Reference
from klrl.language.run.load import Policy, check_base, language_config, relocated, trained_policy
from klrl.language.run.rollout import exact_every
from klrl.runs.checkpoint import digests
from klrl.runs.find import find_run
from klrl.runs.folder import RunFolder
from klrl.runs.metrics import Row
from klrl.runs.returns import last_recorded
from klrl.train.verify import Record, verify_record

#: A line of ``samples.jsonl``, and its number in the file.
Sample: TypeAlias = tuple[int, Mapping[str, Any]]
#: Name of a verified field of a sample -> its recomputed numbers [n], nats, float64.
Recomputed: TypeAlias = dict[str, Tensor]
#: Bounds in float32 on the largest and the mean difference, recorded - recomputed, in nats.
LARGEST, MEAN = 1e-4, 1e-5
#: Smallest bound on the mean difference in 16 bits: the spacing of bfloat16 at 1.
_ROUNDING = torch.finfo(torch.bfloat16).eps
#: The largest difference may be this many times the mean's bound: rounding errors of thirty layers
#: have a long tail, on SmolLM2 up to 12 times their root mean square.
_TAIL = 20


def verify_run(run: str | Path, device: str = "cpu", model: str | None = None) -> Record:
    """Verify the record of a language run; recompute the numbers of its last policy's samples.

    ``model``: current folder of the run's base model; None: the path stored in the run.

    Raises:
        ConfigError: no such run, a control run, or a missing or changed base model.
    """
    folder = find_run(str(run), "RUN")
    config = replace(relocated(language_config(folder, "RUN"), model), device=device)
    check_base(config)
    record = Record()
    rows = verify_record(folder, config, device, record)
    samples, last = _read_samples(folder, record), digests(folder, "last", ())
    drawn = [each for each in samples if last is not None and each[1]["weights"] == last[0]]
    if drawn:
        policy, reference = trained_policy(folder, "last", device, model=model), None
        if config.has_reference:
            reference = trained_reference(folder, "last", policy, config.actor.model, device)
        temperature, numbers, scored = config.collector.temperature, [], []
        for number, sample in drawn:
            try:
                now = recomputed(sample, temperature, policy, reference)
                if exact_every(config) != 1:
                    now.pop("kl", None)  # most samples have none
                if any(len(sample[name]) != len(value) for name, value in now.items()):
                    raise ValueError("its lists differ in length")
            except (LookupError, TypeError, ValueError, RuntimeError) as error:
                told = f"samples.jsonl line {number}: cannot be scored ({first_line(error)})"
                record.problems.append(told)
                continue
            numbers.append(now)
            scored.append((number, sample))
        for true, line in compare(scored, numbers, bounds_of(rows, config)) if scored else ():
            (record.looked if true else record.problems).append(line)
    if gone := len(samples) - len(drawn):
        record.unseen.append(f"log-probs of {counted(gone, 'sample')}, whose weights are gone")
    record.unseen.append("texts and rewards of the samples")
    if not samples:
        record.unseen.append("samples: there are none")
    return record


def _read_samples(folder: Path, record: Record) -> list[Sample]:
    """Read ``samples.jsonl``, if there is one, up to a last line that is still being written."""
    file, samples = RunFolder(folder).samples, []
    lines = read_plain(file, ROWS).split(b"\n")[:-1] if file.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            sample = json.loads(line)
            _ = sample["weights"]
            samples.append((number, sample))
        except (ValueError, LookupError, TypeError):
            record.problems.append(f"samples.jsonl line {number}: is no sample")
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


def compare(
    drawn: Sequence[Sample], numbers: Sequence[Recomputed], bounds: tuple[float, float]
) -> Iterator[tuple[bool, str]]:
    """Yield whether each recorded quantity is within its bounds, and a line about it.

    In 16 bits the mean difference of the KL may be at most the effect of rounding. If e_p and e_r
    are the root mean square errors of the log-probs of policy and reference, the error of the KL
    is at most (e_p^2 + e_r^2) / 2 + (e_p + e_r) sqrt(2 KL), to second order in e. This is
    Cauchy-Schwarz with KL = E[d^2] / 2 for small differences d of log-probs.
    """
    now, off = dict[str, Tensor](), dict[str, Tensor]()
    for name in numbers[0]:
        now[name] = torch.cat([each[name] for each in numbers])
        recorded = now[name].new_tensor([x for _, each in drawn for x in each[name]])
        off[name] = (now[name] - recorded).abs().nan_to_num(math.inf)
    allowed = dict.fromkeys(off, bounds[1])
    if "kl" in off and bounds != (LARGEST, MEAN):
        e_p, e_r = (off[name].square().mean().sqrt() for name in ("log_probs", "ref_log_probs"))
        kl = now["kl"].mean().clamp_min(0.0)
        rounding = (e_p**2 + e_r**2) / 2 + (e_p + e_r) * (2 * kl).sqrt()
        allowed["kl"] = min(bounds[1], float(rounding))
    places = [(line, 1 + at) for line, each in drawn for at in range(len(each["log_probs"]))]
    for name, each in off.items():
        largest, mean, (line, token) = float(each.max()), float(each.mean()), places[each.argmax()]
        where = f"samples.jsonl line {line}, token {token}"
        told = f"at most {largest:.2g} ({bounds[0]:.2g} allowed, {where})"
        told += f", on average {mean:.2g} ({allowed[name]:.2g} allowed) nats per token"
        true = largest <= bounds[0] and mean <= allowed[name]
        yield true, f"{name} of {counted(len(drawn), 'sample')}: off by {told}"


# ------------------------------------------------------------------------------------ computing


@torch.no_grad()
def table_of(network: nn.Module, sample: Mapping[str, Any], temperature: float) -> Tensor:
    """Compute log softmax(logits / temperature) at each response token, [n, V] float64.

    The network may be a :class:`Reference`.
    """
    module = network.module if isinstance(network, Reference) else network
    if next(module.parameters()).dtype != torch.float64:
        module.float()
    prompt, response = sample["prompt_ids"], sample["response_ids"]
    ids = torch.tensor([[*prompt, *response]], device=model_device(module))
    with in_full_precision(module):
        logits = network.eval()(input_ids=ids, use_cache=False).logits
    return (logits[0, len(prompt) - 1 : -1].double() / temperature).log_softmax(-1).cpu()


def recomputed(
    sample: Mapping[str, Any], temperature: float, policy: Policy, reference: Reference | None
) -> Recomputed:
    """Recompute a sample's log-probs [n] under each model, and the KL if there is a reference."""
    chosen = sample["response_ids"]
    log_p, at = table_of(policy.model, sample, temperature), (range(len(chosen)), chosen)
    if reference is None:
        return {"log_probs": log_p[at]}
    log_q = table_of(reference, sample, temperature)
    # KL(pi || pi_ref) = sum_a pi(a) (ln pi(a) - ln pi_ref(a)), over the whole vocabulary
    kl = over_actions("reverse", log_p, log_q)
    return {"log_probs": log_p[at], "ref_log_probs": log_q[at], "kl": kl}
