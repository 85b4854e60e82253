"""Verifies a language run's record; recomputes log-probs and KLs with plain transformers models.

The inputs are the token ids in ``samples.jsonl``, one sample per forward, without padding. Models
compute in float32 (or float64), the softmax in float64. klrl only loads the weights that drew the
sample: the base model's (before the first update), or a checkpoint's. Without these weights, the
sample's numbers cannot be recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from klrl.base.context import check_length
from klrl.base.errors import ConfigError
from klrl.base.text import counted, text_table
from klrl.config import LANGUAGE, LanguageConfig, factory
from klrl.kl.divergences import over_actions
from klrl.kl.reference import OTHER_POLICY
from klrl.language.model.causal_lm import model_device, unwrapped, weight_of
from klrl.language.model.plain import AGREEMENT
from klrl.language.run.kl import checkpointed
from klrl.language.run.load import (
    BASE,
    BaseDigest,
    Policy,
    Weights,
    check_base,
    computing_in,
    language_config,
    make_policy,
    network_of_reference,
    relocated,
)
from klrl.language.run.samples import (
    RECORDED,
    Sample,
    check_samples,
    read_samples,
    recorded_names,
)
from klrl.runs.entry import CheckpointEntry, DamagedEntry, whole_entries
from klrl.runs.find import find_run
from klrl.runs.metrics import Row
from klrl.runs.returns import last_recorded
from klrl.runs.state import Component
from klrl.train.verify import Record, verify_record, whole_rows

#: ``policy``, ``reference`` or ``KL`` -> samples, each with its n tokens' recomputed numbers, nats.
Recomputed: TypeAlias = dict[str, list[tuple[Sample, Tensor]]]
#: Bounds in float32 on the largest and the mean difference, recorded - recomputed, in nats.
LARGEST, MEAN = 1e-4, 1e-5
#: Bound on the mean difference in 16 bits, if the run did not record ``kl/ref/floor``.
_LOW_MEAN = 5e-2
#: Smallest bound on the mean difference with a recorded floor: the spacing of bfloat16 at 1.
_ROUNDING = torch.finfo(torch.bfloat16).eps
#: The largest difference may be this many times the mean's bound: rounding errors of thirty layers
#: have a long tail, on SmolLM2 up to 12 times their root mean square.
_TAIL = 20


@dataclass(frozen=True)
class Comparison:
    """The difference between recorded and recomputed numbers, in nats per token."""

    name: str  # policy or reference (log-probs), or KL (exact KL(policy||reference))
    bounds: tuple[float, float]  # on the largest difference, and on the mean
    samples: int  # how many were recomputed
    tokens: int
    largest: float
    mean: float
    root: float  # root mean square
    place: str  # sample and token of the largest difference

    @property
    def ok(self) -> bool:
        """Whether the largest and the mean difference are within ``bounds``."""
        return self.largest <= self.bounds[0] and self.mean <= self.bounds[1]


@dataclass
class Verdict(Record):
    """The result of :func:`verify_run`, with a comparison for each recomputed quantity."""

    measures: Sequence[Comparison] = ()

    @property
    def ok(self) -> bool:
        """Whether the record has no problem, and all recomputed numbers are within their bounds."""
        return super().ok and all(each.ok for each in self.measures)

    @property
    def lines(self) -> list[str]:
        """The report; it begins with a table of the comparisons."""
        head = ("nats per token", "samples", "tokens", "max off (allowed)", "mean off (allowed)")
        rows = [
            (
                f"log-probs of the {each.name}" if each.name != "KL" else "KL(policy||reference)",
                f"{each.samples:,}",
                f"{each.tokens:,}",
                f"{each.largest:.2g} ({each.bounds[0]:.2g})",
                f"{each.mean:.2g} ({each.bounds[1]:.2g})",
                "ok" if each.ok else f"OFF at {each.place}",
            )
            for each in self.measures
        ]
        return [text_table([head, *rows], right=range(1, 5)), *super().lines]


def verify_run(run: str | Path, device: str = "cpu", model: str | None = None) -> Verdict:
    """Verify the record of a language run; recompute the numbers of its samples.

    Args:
        run: the run folder.
        device: where to compute.
        model: current folder of the run's base model; None: the path stored in the run.

    Raises:
        ConfigError: no such run, a control run, no samples with token ids, a missing or changed
            base model, or no sample can be recomputed.
    """
    folder = find_run(str(run), "RUN")
    config = relocated(language_config(folder, "RUN"), model)
    config.device = device
    rows = whole_rows(folder, config, Record())  # :func:`verify_record` reports the others
    ran = config
    if config.collector.patience is not None and rows:  # early stopping may have ended the run
        ran = replace(config, frames=int(rows[-1]["samples"]))
    verdict = Verdict()
    samples = read_samples(folder, ran, str(run), rows, verdict)
    check_base(config)
    weights = Sources(folder, config)
    fit = [sample for sample in samples if _fits(weights.policy, sample, verdict)]
    recomputed: Recomputed = {name: [] for name in recorded_names(config)}
    drawn_by = attrgetter("weights")
    for samples_before, group in groupby(sorted(fit, key=drawn_by), drawn_by):
        policy, reference = weights.at(samples_before)
        for sample in group:
            numbers = _numbers(sample, policy, reference, config.collector.temperature)
            for name, computed in numbers.items():
                recomputed[name].append((sample, computed))
    verdict.measures = _measures(recomputed, bounds_of(rows, config))
    if verdict.ok and not verdict.measures:
        why = "the weights that drew its samples are gone, so no number can be recomputed"
        remedy = "set checkpoint.every=1 in a run that you want to verify"
        raise ConfigError(f"{run}: {why}; {remedy}")
    if not weights.vouched:
        why = "the checkpoints store no digest of its weights"
        model = config.actor.model or "null"
        verdict.unseen.append(f"whether actor.model={model} has changed ({why})")
    for name, drawn in recomputed.items():
        if gone := len(fit) - len(drawn):
            verdict.unseen.append(f"{name} of {counted(gone, 'sample')}, whose weights are gone")
    verify_record(folder, config, device, verdict)
    check_samples(ran, weights.policy, samples, rows, verdict)
    return verdict


def bounds_of(rows: Sequence[Row], config: LanguageConfig) -> tuple[float, float]:
    """Return the bounds on the largest and on the mean difference, by the precision of the run.

    In 16 bits, rounding alone gives a KL > 0, the metric ``kl/ref/floor``. For small differences d
    of log-probs KL = E[d^2] / 2, so the mean of |d| is at most sqrt(2 floor). If sampling and
    scoring round alike, the floor is near 0, but both differ from float32; so the mean's bound is
    at least :data:`_ROUNDING`. The bound on the largest |d| is :data:`_TAIL` times that or more.
    """
    if config.actor.dtype in ("float32", "float64") and not config.mixed:
        return LARGEST, MEAN
    floor = last_recorded(rows).get("kl/ref/floor")
    mean = _LOW_MEAN if floor is None else max(math.sqrt(2 * floor), _ROUNDING)
    return max(AGREEMENT[torch.bfloat16], _TAIL * mean), mean


def _measures(recomputed: Recomputed, bounds: tuple[float, float]) -> list[Comparison]:
    """Compare recomputed numbers with the recorded ones.

    In 16 bits the mean difference of the KL may be at most the effect of rounding. If e_p and e_r
    are the root mean square errors of the log-probs of policy and reference, the error of the KL
    is at most (e_p^2 + e_r^2) / 2 + (e_p + e_r) sqrt(2 KL), to second order in e. This is
    Cauchy-Schwarz with KL = E[d^2] / 2 for small differences d of log-probs.
    """
    found = {name: _compared(name, drawn, bounds) for name, drawn in recomputed.items() if drawn}
    if "KL" in found and bounds != (LARGEST, MEAN):
        e_p, e_r = found["policy"].root, found["reference"].root
        kl = float(torch.cat([computed for _, computed in recomputed["KL"]]).mean())
        rounding = (e_p**2 + e_r**2) / 2 + (e_p + e_r) * math.sqrt(2 * max(kl, 0.0))
        found["KL"] = replace(found["KL"], bounds=(bounds[0], min(bounds[1], rounding)))
    return [*found.values()]


def _compared(
    name: str, drawn: Sequence[tuple[Sample, Tensor]], bounds: tuple[float, float]
) -> Comparison:
    recorded = [computed.new_tensor(getattr(s, RECORDED[name])) for s, computed in drawn]
    gaps = [x - computed for x, (_, computed) in zip(recorded, drawn, strict=True)]
    off = [each.abs().nan_to_num(math.inf) for each in gaps]
    largest, every = [float(each.max()) for each in off], torch.cat(off)
    worst = largest.index(max(largest))
    place = f"{drawn[worst][0]}, token {int(off[worst].argmax()) + 1}"
    mean, root = float(every.mean()), float(every.square().mean().sqrt())
    return Comparison(name, bounds, len(off), len(every), max(largest), mean, root, place)


def _fits(policy: Policy, sample: Sample, record: Record) -> bool:
    """Whether the model can read a sample; adds a problem if not."""
    network, ids = unwrapped(policy.model), [*sample.prompt_ids, *sample.response_ids]
    size = len(weight_of(network.get_input_embeddings()))
    try:
        check_length(network, len(ids))
        if max(ids) >= size:
            raise ValueError(f"token {max(ids)} is not one of the model's {size} tokens")
    except ValueError as error:
        record.problems.append(f"{sample}: {error}")
        return False
    return True


# ------------------------------------------------------------------------------------ computing


def unmixed(config: LanguageConfig) -> LanguageConfig:
    """Return the job; if its arithmetic is mixed (16 bits on float32 weights), make it float32."""
    return computing_in(config, "float32") if config.mixed else config


class Sources:
    """Restores the policy that drew a sample, and the reference at that time, if a file has them.

    Attributes:
        policy: the run's network; :meth:`at` loads different weights into it.
        vouched: whether there is no base model, or a checkpoint's digest proves that it is the
            run's. Only checkpoints without the base model's weights have such a digest.
    """

    def __init__(self, folder: Path, config: LanguageConfig) -> None:
        config = unmixed(config)
        self.vouched = config.actor.init is not None
        self._from_base = config.actor.init is None
        entries = list(whole_entries(folder, lambda *_: None))
        self._entries = {entry.frames: entry for entry in reversed(entries)}
        newest = next(iter(self._entries.values()), None)
        self.policy = make_policy(config, say=lambda _: None)
        model, base = self.policy.model, BaseDigest(self.policy.model, config.actor.model)
        self._weights = Weights(model, self.policy.value_head, base=base)
        _in_float(model)
        rule = factory("reference", config.reference, LANGUAGE)(config.reference)
        stored = checkpointed(rule, config)
        self._follows = stored and rule.moves  # each checkpoint has its own reference
        self._reference = None
        if config.has_reference and (newest or rule.moves or not stored):  # else no file has pi_ref
            if rule.source == OTHER_POLICY:
                network = unmixed(network_of_reference(folder, config))
                self._reference = make_policy(network, say=lambda _: None).model
            else:
                self._reference = deepcopy(model)
            _in_float(self._reference)
            if newest and stored and not rule.moves:
                self._load(Weights(self._reference, whole=True), newest, "reference")
        if newest:
            # Raises a ConfigError if the base model is not the one that the run used.
            self._load(base, newest, "agent")

    def at(self, samples: int) -> tuple[nn.Module | None, nn.Module | None]:
        """Load policy and reference as they were after ``samples`` samples; call in rising order.

        Return None in place of a model whose weights are gone.
        """
        entry = self._entries.get(samples)
        there = entry is not None or (samples == 0 and self._from_base)
        if entry is not None:
            self._load(self._weights, entry, "agent")
            if self._follows and self._reference is not None:
                self._load(Weights(self._reference, whole=True), entry, "reference")
        reference = self._reference if there or not self._follows else None
        return self.policy.model if there else None, reference

    def _load(self, weights: Component, entry: CheckpointEntry, component: str) -> None:
        try:
            state = entry.state(component, model_device(self.policy.model))
            weights.load_state_dict(state)
        except (RuntimeError, DamagedEntry) as error:
            raise ConfigError(f"{entry.path}: does not fit this network: {error}") from error
        self.vouched |= any(name.startswith(BASE) for name in state)


def _in_float(model: nn.Module) -> None:
    """Convert a model to float32, unless it is float64; evaluation mode, no gradients."""
    if next(model.parameters()).dtype != torch.float64:
        model.float()
    model.requires_grad_(False).eval()


@torch.no_grad()
def table_of(model: nn.Module, sample: Sample, temperature: float) -> Tensor:
    """Compute log softmax(logits / temperature) at each response token, [n, V] float64."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]], device=model_device(model))
    logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1).cpu()


def _numbers(
    sample: Sample, policy: nn.Module | None, reference: nn.Module | None, temperature: float
) -> dict[str, Tensor]:
    """Recompute a sample's log-probs [n] under each given model, and the KL if both are given."""
    models, chosen = (("policy", policy), ("reference", reference)), sample.response_ids
    tables = {
        name: table_of(each, sample, temperature) for name, each in models if each is not None
    }
    numbers = {name: table[range(len(chosen)), chosen] for name, table in tables.items()}
    if len(tables) == 2:
        # KL(pi || pi_ref) = sum_a pi(a) (ln pi(a) - ln pi_ref(a)), over the whole vocabulary
        numbers["KL"] = over_actions("reverse", *tables.values())
    return numbers
