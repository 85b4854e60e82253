"""Are the recorded numbers of a language run true? Its samples, computed again without klrl.

Log-probs and KLs of ``samples.jsonl`` from its token ids: each sample is one row without padding
through the model's own forward and logits in float32, softmax in float64. klrl only loads the
weights. A sample can be computed again where the weights that drew it are there: the model's own
(before the first update), or those of a checkpoint. A fixed reference serves all samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor, nn

from klrl.base.context import check_length
from klrl.base.errors import ConfigError
from klrl.config import LANGUAGE, LanguageConfig, factory
from klrl.kl.reference import OTHER_RUN
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
    check_place,
    computing_in,
    language_config,
    make_policy,
    moved,
    network_of_reference,
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

#: Most nats that a recorded number of a float32 run may be off: the largest, and the mean.
LARGEST, MEAN = 1e-4, 1e-5
#: The mean in a lower precision, where the run recorded no floor of its own.
_LOW_MEAN = 5e-2
#: And where it did, the least: a logit of size 1 is rounded by so much.
_ROUNDING = torch.finfo(torch.bfloat16).eps
#: A single token may be off by so many times the mean: rounding of thirty layers has a long tail,
#: 12 times the root of its mean square on SmolLM2.
_TAIL = 20


@dataclass
class Comparison:
    """How far recorded numbers are from those computed again, in nats per token.

    Attributes:
        name: policy or reference, whose log-probs they are; or KL(policy||reference), exact.
        bounds: the largest difference, and the largest mean.
        samples, tokens: how many were computed again.
        largest, total, squares: the largest difference, their sum, and that of their squares.
        values: the sum of the true numbers.
        place: of the largest.
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
        """Whether both are within the bounds."""
        return self.largest <= self.bounds[0] and self.mean <= self.bounds[1]

    def add(self, recorded: Sequence[float], computed: Tensor, place: str) -> None:
        """Compare the numbers of one sample."""
        self.samples += 1
        self.tokens += len(recorded)
        for token, (one, other) in enumerate(zip(recorded, computed.tolist(), strict=True), 1):
            off = abs(one - other)
            off = off if math.isfinite(off) else math.inf
            self.total += off
            self.squares += off**2
            self.values += other
            if off > self.largest or not self.place:
                self.largest, self.place = off, f"{place}, token {token}"


@dataclass
class Verdict:
    """What :func:`verify_run` found.

    ``bounds`` are the largest difference and the largest mean that are allowed, nats per token;
    ``not_computed`` is by measure the number of samples whose weights are gone.
    """

    bounds: tuple[float, float]
    measures: Sequence[Comparison]
    not_computed: Mapping[str, int]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    record: Record = field(default_factory=Record)

    @property
    def ok(self) -> bool:
        """Whether the record is true as far as it could be computed again."""
        true = not (self.problems or self.record.problems)
        return true and all(each.ok for each in self.measures)


def verify_run(run: str | Path, device: str = "cpu", model: str | None = None) -> Verdict:
    """Compute the numbers of a run's samples again.

    Args:
        run: the run folder.
        device: where to compute.
        model: the folder where the run's base model is now; None: where it was.

    Raises:
        ConfigError: no such run, a control run, no samples with token ids, its model is missing or
            changed, or no sample can be computed again.
    """
    folder = find_run(str(run), "RUN")
    config = moved(language_config(folder, "RUN"), model)
    config.device = device
    rows = rows_so_far(folder)
    samples, problems = read_samples(folder, config, str(run), rows)
    check_place(config)
    weights, bounds = Sources(folder, config), bounds_of(rows, config)
    measures = {name: Comparison(name, bounds) for name in recorded_names(config)}
    fit = [sample for sample in samples if _fits(weights.policy, sample, problems)]
    drawn_by = attrgetter("weights")
    for samples_before, drawn in groupby(sorted(fit, key=drawn_by), drawn_by):
        policy, reference = weights.at(samples_before)
        for sample in drawn:
            numbers = _numbers(sample, policy, reference, config.collector.temperature)
            for name, computed in numbers.items():
                measures[name].add(getattr(sample, RECORDED[name]), computed, str(sample))
    missing = {name: len(fit) - each.samples for name, each in measures.items()}
    if not problems and not any(each.samples for each in measures.values()):
        raise ConfigError(
            f"{run}: the weights that drew its samples are gone, and nothing can be computed "
            "again; set checkpoint.every=1 in a run that is to be verified"
        )
    if bounds != (LARGEST, MEAN):
        _bound_kl(measures)
    record = verify_record(folder, config, device)
    task = make_task(config.env, config.seed)
    check_samples(config, weights.policy, task, samples, rows, record)
    record.looked += [f"{n} of {each.samples} samples" for n, each in measures.items()]
    verdict = Verdict(bounds, list(measures.values()), missing, problems, weights.notes, record)
    if not (weights.vouched or all(each.ok for each in verdict.measures)):
        verdict.notes.append(
            f"its checkpoints hold no digest of actor.model={config.actor.model or 'null'}: if the "
            "files of that model have changed, numbers of its own weights are off for that reason"
        )
    return verdict


def bounds_of(rows: Sequence[Row], config: LanguageConfig) -> tuple[float, float]:
    """The largest difference and the largest mean, by the precision of the run.

    In 16 bits a KL has a floor, which the run measured: KL = E[d^2] / 2 for small differences d of
    log-probs, so that the mean of |d| is at most sqrt(2 floor). Two ways to sample may round alike,
    with a floor near 0; what is computed here in float32 rounds as neither does. Its largest
    difference may be :data:`_TAIL` times as large.
    """
    if config.actor.dtype in ("float32", "float64") and not config.mixed:
        return LARGEST, MEAN
    floor = last_recorded(rows).get("kl/ref/floor")
    mean = _LOW_MEAN if floor is None else max(math.sqrt(2 * floor), _ROUNDING)
    return max(AGREEMENT[torch.bfloat16], _TAIL * mean), mean


def _bound_kl(measures: Mapping[str, Comparison]) -> None:
    """In 16 bits: bound the mean difference of the KL by what rounding can do to it.

    With log-probs that are off by e_p and e_r (roots of the mean squares, of policy and reference)
    a KL is off by at most (e_p^2 + e_r^2) / 2 + (e_p + e_r) sqrt(2 KL): to the second order in e,
    by Cauchy and Schwarz, as KL = E[d^2] / 2 for small differences d of log-probs.
    """
    if not all(name in measures and measures[name].tokens for name in RECORDED):
        return
    others, kl = [measures[name] for name in ("policy", "reference")], measures["KL"]
    roots = [math.sqrt(each.squares / each.tokens) for each in others]
    true = max(kl.values, 0.0) / kl.tokens
    rounding = sum(e**2 for e in roots) / 2 + sum(roots) * math.sqrt(2 * true)
    kl.bounds = kl.bounds[0], min(kl.bounds[1], rounding)


def _fits(policy: Policy, sample: Sample, problems: list[str]) -> bool:
    """Whether the model can read a sample; a problem if not, or if its text is another."""
    network, ids = unwrapped(policy.model), [*sample.prompt_ids, *sample.response_ids]
    size = len(weight_of(network.get_input_embeddings()))
    try:
        check_length(network, len(ids))
        if max(ids) >= size:
            raise ValueError(f"token {max(ids)}: the model has {size} tokens")
    except ValueError as error:
        problems.append(f"{sample}: {error}")
        return False
    texts = response_texts(policy.causal.tokenizer, [sample.response_ids], policy.special.eos)
    if texts != [sample.response]:
        problems.append(f"{sample}: its tokens are not its response")
    return True


# ------------------------------------------------------------------------------------ computing


def unmixed(config: LanguageConfig) -> LanguageConfig:
    """The same job with arithmetic as precise as its weights: a mixed one's are float32."""
    return computing_in(config, "float32") if config.mixed else config


class Sources:
    """Policy and reference as they were when a sample was drawn, as far as they are there.

    Args:
        folder: the run folder.
        config: its settings.

    Attributes:
        policy: the run's, with other weights from call to call.
        notes: checkpoints that are damaged, a line each.
        vouched: whether the model's own weights are known to be the run's. Only a checkpoint that
            needs them beside it has a digest of them.
    """

    def __init__(self, folder: Path, config: LanguageConfig) -> None:
        self._config = config = unmixed(config)
        self.notes, self.vouched = list[str](), config.actor.init is not None

        def damaged(path: Path, error: DamagedEntry) -> None:
            self.notes.append(f"checkpoint {path} is left out ({error})")

        found = list(whole_entries(folder, damaged))
        self._entries = {entry.frames: entry for entry in reversed(found)}  # the last ones first
        self._newest = next(iter(self._entries.values()), None)
        self.policy = make_policy(config, say=lambda _: None)
        model, base = self.policy.model, base_digest(self.policy.model, config.actor.model)
        self._weights = Weights(model, self.policy.value_head, base=base)
        _in_float(model)
        self._rule = factory("reference", config.reference, LANGUAGE)(config.reference)
        self._kept = checkpointed(self._rule, config)
        self._reference = self._make_reference(folder) if config.has_reference else None
        if self._newest is not None:
            # Nothing is told of a record beside another base model than the run's.
            self._load(base, self._newest, "agent")

    def _make_reference(self, folder: Path) -> nn.Module | None:
        """A model of its own; None where it does not move and its weights are gone."""
        if self._rule.source == OTHER_RUN:
            network = unmixed(network_of_reference(folder, self._config))
            model = make_policy(network, say=lambda _: None).model
        else:
            model = deepcopy(self.policy.model)
        _in_float(model)
        if self._kept and not self._rule.moves:  # any checkpoint holds the one that there is
            if self._newest is None:
                return None
            self._load(Weights(model, whole=True), self._newest, "reference")
        return model

    def at(self, samples: int) -> tuple[nn.Module | None, nn.Module | None]:
        """Policy and reference after so many samples; to be asked in ascending order.

        None where the weights of that time are gone.
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
    """In float32 at least, without dropout, gradients or checkpointing."""
    if next(model.parameters()).dtype != torch.float64:
        model.float()
    model.requires_grad_(False).eval()


@torch.no_grad()
def table_of(model: nn.Module, sample: Sample, temperature: float) -> Tensor:
    """Log softmax(logits / temperature) at each response token [n, V], float64."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]], device=model_device(model))
    logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1).cpu()


def _numbers(
    sample: Sample, policy: nn.Module | None, reference: nn.Module | None, temperature: float
) -> dict[str, Tensor]:
    """What a sample's entries should be [n], as far as the models are there."""
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
