"""Checks the recorded numbers of a language run against the model's own forward.

Log-probs and KLs are recomputed from the token ids in ``samples.jsonl``: one sample per forward,
without padding, in float32 (or float64), with softmax in float64. klrl's code for sampling and
scoring is not used. A sample can be recomputed if the weights that drew it still exist: in a
checkpoint or, before the first update, in the base model. A reference that never changes serves all
samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor, nn

from klrl.base.context import check_length
from klrl.base.errors import ConfigError
from klrl.base.text import counted
from klrl.config import LANGUAGE, LanguageConfig, factory
from klrl.kl.reference import OTHER_POLICY
from klrl.language.data.rewards import response_texts
from klrl.language.data.tasks import make_task
from klrl.language.model.causal_lm import model_device, unwrapped, weight_of
from klrl.language.model.plain import AGREEMENT
from klrl.language.run.kl import checkpointed
from klrl.language.run.load import (
    BASE,
    Policy,
    Weights,
    base_digest,
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
from klrl.runs.rows import rows_so_far
from klrl.runs.state import Component
from klrl.train.verify import Record, verify_record

#: Bounds on the largest and on the mean error in a float32 run, nats per token.
LARGEST, MEAN = 1e-4, 1e-5
#: Bound on the mean error in a lower precision, if the run recorded no rounding floor.
_LOW_MEAN = 5e-2
#: Smallest bound on the mean error if the run recorded a floor: bfloat16's spacing at 1.
_ROUNDING = torch.finfo(torch.bfloat16).eps
#: The largest error may be this many times the mean bound: the rounding errors of thirty layers
#: have a long tail, on SmolLM2 up to 12 times their root mean square.
_TAIL = 20


@dataclass
class Comparison:
    """The difference between recorded and recomputed numbers, in nats per token.

    Attributes:
        name: policy or reference (log-probs), or KL (exact KL(policy||reference)).
        bounds: on the largest difference, and on the mean.
        samples, tokens: numbers of recomputed samples and tokens.
        largest, total, squares: maximum, sum, and sum of squares of the absolute differences.
        values: the sum of the recomputed numbers.
        place: the sample and token of the largest difference.
    """

    name: str
    bounds: tuple[float, float]
    samples: int = 0
    tokens: int = 0
    largest: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    values: float = 0.0
    place: str = ""

    @property
    def mean(self) -> float:
        """The mean difference."""
        return self.total / self.tokens if self.tokens else 0.0

    @property
    def ok(self) -> bool:
        """Whether the largest and the mean difference are within the bounds."""
        return self.largest <= self.bounds[0] and self.mean <= self.bounds[1]

    def add(self, recorded: Sequence[float], computed: Tensor, place: str) -> None:
        """Add the differences of one sample."""
        off = (torch.tensor(recorded, dtype=torch.float64) - computed).abs().nan_to_num(math.inf)
        self.samples += 1
        self.tokens += len(off)
        self.total += float(off.sum())
        self.squares += float(off.square().sum())
        self.values += float(computed.sum())
        if float(off.max()) > self.largest or not self.place:
            self.largest, self.place = float(off.max()), f"{place}, token {int(off.argmax()) + 1}"


@dataclass
class Verdict(Record):
    """The result of :func:`verify_run`.

    Attributes:
        bounds: the allowed largest difference and mean difference, nats per token.
        measures: one comparison for each recomputed quantity.
        not_computed: quantity -> number of samples whose weights are gone.
    """

    bounds: tuple[float, float] = (LARGEST, MEAN)
    measures: Sequence[Comparison] = ()
    not_computed: Mapping[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the record has no problem, and all recomputed numbers are within their bounds."""
        return super().ok and all(each.ok for each in self.measures)


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
    rows = rows_so_far(folder)
    ran = config
    if config.collector.patience is not None and rows:  # early stopping may have ended the run
        ran = replace(config, frames=int(rows[-1]["samples"]))
    bounds = bounds_of(rows, config)
    measures = {name: Comparison(name, bounds) for name in recorded_names(config)}
    verdict = Verdict(bounds=bounds, measures=[*measures.values()])
    samples = read_samples(folder, ran, str(run), rows, verdict)
    check_base(config)
    weights = Sources(folder, config)
    fit = [sample for sample in samples if _fits(weights.policy, sample, verdict)]
    drawn_by = attrgetter("weights")
    for samples_before, drawn in groupby(sorted(fit, key=drawn_by), drawn_by):
        policy, reference = weights.at(samples_before)
        for sample in drawn:
            numbers = _numbers(sample, policy, reference, config.collector.temperature)
            for name, computed in numbers.items():
                measures[name].add(getattr(sample, RECORDED[name]), computed, str(sample))
    verdict.not_computed = {name: len(fit) - each.samples for name, each in measures.items()}
    if verdict.ok and not any(each.samples for each in verdict.measures):
        raise ConfigError(
            f"{run}: the weights that drew its samples are gone, so no number can be recomputed; "
            "set checkpoint.every=1 in a run that you want to verify"
        )
    if bounds != (LARGEST, MEAN):
        _bound_kl(measures)
    if not weights.vouched:
        verdict.unseen.append(
            f"whether actor.model={config.actor.model or 'null'} has changed (the checkpoints "
            "store no digest of its weights)"
        )
    verify_record(folder, config, device, verdict)
    task = make_task(config.env, config.seed)
    check_samples(ran, weights.policy, task, samples, rows, verdict)
    verdict.looked += [f"{n} of {counted(each.samples, 'sample')}" for n, each in measures.items()]
    return verdict


def bounds_of(rows: Sequence[Row], config: LanguageConfig) -> tuple[float, float]:
    """Return the bounds on the largest and on the mean difference, by the precision of the run.

    In 16 bits, rounding alone gives a KL > 0, the run's ``kl/ref/floor``. KL = E[d^2] / 2 for small
    differences d of log-probs, so the mean of |d| is at most sqrt(2 floor). If sampling and scoring
    round alike, the floor is near 0, but both differ from float32; so the mean's bound is at least
    :data:`_ROUNDING`. The bound on the largest |d| is at least :data:`_TAIL` times the mean bound.
    """
    if config.actor.dtype in ("float32", "float64") and not config.mixed:
        return LARGEST, MEAN
    floor = last_recorded(rows).get("kl/ref/floor")
    mean = _LOW_MEAN if floor is None else max(math.sqrt(2 * floor), _ROUNDING)
    return max(AGREEMENT[torch.bfloat16], _TAIL * mean), mean


def _bound_kl(measures: Mapping[str, Comparison]) -> None:
    """Tighten the bound on the KL's mean error to what rounding can cause.

    Let e_p and e_r be the root mean square errors of the policy's and the reference's log-probs.
    The KL's error is at most (e_p^2 + e_r^2) / 2 + (e_p + e_r) sqrt(2 KL), to second order in e.
    This follows by Cauchy-Schwarz from KL = E[d^2] / 2, for small differences d of log-probs.
    """
    if not all(name in measures and measures[name].tokens for name in RECORDED):
        return
    others, kl = [measures[name] for name in ("policy", "reference")], measures["KL"]
    roots = [math.sqrt(each.squares / each.tokens) for each in others]
    true = max(kl.values, 0.0) / kl.tokens
    rounding = sum(e**2 for e in roots) / 2 + sum(roots) * math.sqrt(2 * true)
    kl.bounds = kl.bounds[0], min(kl.bounds[1], rounding)


def _fits(policy: Policy, sample: Sample, record: Record) -> bool:
    """Return whether the model can read a sample; add a problem if not, or if its text is wrong."""
    network, ids = unwrapped(policy.model), [*sample.prompt_ids, *sample.response_ids]
    size = len(weight_of(network.get_input_embeddings()))
    try:
        check_length(network, len(ids))
        if max(ids) >= size:
            raise ValueError(f"token {max(ids)} is not one of the model's {size} tokens")
    except ValueError as error:
        record.problems.append(f"{sample}: {error}")
        return False
    texts = response_texts(policy.causal.tokenizer, [sample.response_ids], policy.special.eos)
    if texts != [sample.response]:
        record.problems.append(f"{sample}: its response_ids do not decode to its response")
    return True


# ------------------------------------------------------------------------------------ computing


def unmixed(config: LanguageConfig) -> LanguageConfig:
    """Return the job with arithmetic as precise as its weights: mixed becomes float32."""
    return computing_in(config, "float32") if config.mixed else config


class Sources:
    """Restores the policy that drew a sample, and the reference of that time, if weights exist.

    Args:
        folder: the run folder.
        config: the run's settings.

    Attributes:
        policy: the run's network; :meth:`at` loads different weights into it.
        vouched: True if a checkpoint has the base model's digest, or if the run starts from
            ``actor.init`` instead of the base model.
    """

    def __init__(self, folder: Path, config: LanguageConfig) -> None:
        self._config = config = unmixed(config)
        self.vouched = config.actor.init is not None
        found = list(whole_entries(folder, lambda *_: None))
        self._entries = {entry.frames: entry for entry in reversed(found)}  # newest first
        self._newest = next(iter(self._entries.values()), None)
        self.policy = make_policy(config, say=lambda _: None)
        model, base = self.policy.model, base_digest(self.policy.model, config.actor.model)
        self._weights = Weights(model, self.policy.value_head, base=base)
        _in_float(model)
        self._rule = factory("reference", config.reference, LANGUAGE)(config.reference)
        self._kept = checkpointed(self._rule, config)
        self._reference = self._make_reference(folder) if config.has_reference else None
        if self._newest is not None:
            # Refuse a changed base model: the record cannot be checked with it.
            self._load(base, self._newest, "agent")

    def _make_reference(self, folder: Path) -> nn.Module | None:
        """Make the reference as a separate model; None if it is fixed and its weights are gone."""
        if self._rule.source == OTHER_POLICY:
            network = unmixed(network_of_reference(folder, self._config))
            model = make_policy(network, say=lambda _: None).model
        else:
            model = deepcopy(self.policy.model)
        _in_float(model)
        if self._kept and not self._rule.moves:  # fixed, so the same in all checkpoints
            if self._newest is None:
                return None
            self._load(Weights(model, whole=True), self._newest, "reference")
        return model

    def at(self, samples: int) -> tuple[nn.Module | None, nn.Module | None]:
        """Load policy and reference at ``samples`` samples of the run; call with ascending numbers.

        Return None in place of a model whose weights are gone.
        """
        entry = self._entries.get(samples)
        there = entry is not None or (samples == 0 and self._config.actor.init is None)
        if entry is not None:
            self._load(self._weights, entry, "agent")
        follows = self._kept and self._rule.moves
        if entry is not None and follows and self._reference is not None:
            self._load(Weights(self._reference, whole=True), entry, "reference")
        return (
            self.policy.model if there else None,
            self._reference if there or not follows else None,
        )

    def _load(self, weights: Component, entry: CheckpointEntry, component: str) -> None:
        try:
            state = entry.state(component, model_device(self.policy.model))
            weights.load_state_dict(state)
        except (RuntimeError, DamagedEntry) as error:
            raise ConfigError(f"{entry.path}: does not fit this network: {error}") from error
        self.vouched |= any(name.startswith(BASE) for name in state)


def _in_float(model: nn.Module) -> None:
    """Convert a model to float32, unless it is float64; set evaluation mode, without gradients."""
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
        log_p, log_q = tables.values()
        numbers["KL"] = (log_p.exp() * (log_p - log_q)).sum(1)
    return numbers
