"""Are the recorded numbers of a language run true? Its samples, computed again without klrl.

Log-probs and KLs of ``samples.jsonl`` from its token ids: each sample is one row without padding
through the model's own forward and logits in float32, softmax in float64. klrl only loads the
weights. A sample can be computed again where the weights that drew it are there: the model's own
(before the first update), or those of a checkpoint. A fixed reference serves all samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from klrl.base.context import check_length
from klrl.base.errors import ConfigError
from klrl.config import LANGUAGE, LanguageConfig, factory
from klrl.kl.reference import OTHER_RUN, THE_POLICY
from klrl.language.data.rewards import response_texts
from klrl.language.data.tasks import make_task
from klrl.language.model.causal_lm import unwrapped
from klrl.language.model.pretrained import prompt_limit
from klrl.language.run.kl import checkpointed
from klrl.language.run.load import (
    Weights,
    base_digest,
    check_place,
    computing_in,
    language_config,
    moved,
    with_model,
    with_network,
)
from klrl.language.run.policy import Policy, make_policy
from klrl.language.run.record import RECORDED, SampleLine, read_samples, recorded_names
from klrl.language.run.samples import check_samples
from klrl.language.run.scoring import AGREEMENT
from klrl.runs.entry import CheckpointEntry, DamagedEntry, whole_entries
from klrl.runs.find import find_run
from klrl.runs.folder import RunFolder
from klrl.runs.returns import last_recorded
from klrl.runs.rows import read_rows
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
    samples = read_samples(folder, config, str(run))
    check_place(config)
    weights = Sources(folder, config)
    bounds = bounds_of(folder, config)
    measures = {name: Comparison(name, bounds) for name in recorded_names(config)}
    lines, beyond = _that_fit(weights.policy, samples.lines)
    problems = [*samples.problems, *beyond, *_texts(weights.policy, lines)]
    for number, sample in sorted(lines, key=lambda line: line[1]["weights"]):
        for name, computed in _numbers(sample, *weights.tables(sample)).items():
            place = f"samples.jsonl line {number}"
            measures[name].add(sample[RECORDED[name]], computed, place)
    missing = {name: len(lines) - each.samples for name, each in measures.items()}
    if not problems and not any(each.samples for each in measures.values()):
        raise ConfigError(
            f"{run}: the weights that drew its samples are gone, and nothing can be computed "
            "again; set checkpoint.every=1 in a run that is to be verified"
        )
    if bounds != (LARGEST, MEAN):
        _bound_kl(measures)
    verdict = Verdict(bounds, list(measures.values()), missing, problems, samples.notes)
    verdict.notes += weights.notes
    verdict.record = _record(folder, config, weights.policy, samples.lines, device)
    verdict.record.looked += [f"{n} of {each.samples} samples" for n, each in measures.items()]
    if not (weights.vouched or all(each.ok for each in verdict.measures)):
        verdict.notes.append(
            f"its checkpoints hold no digest of actor.model={config.actor.model or 'null'}: if the "
            "files of that model have changed, numbers of its own weights are off for that reason"
        )
    return verdict


def _record(
    folder: Path, config: LanguageConfig, policy: Policy, lines: Sequence[SampleLine], device: str
) -> Record:
    """What does not need the weights of a sample's time."""
    record = verify_record(folder, config, device)
    limit = prompt_limit(policy.causal.context, config.collector.max_new_tokens)
    file = RunFolder(folder).metrics
    rows = read_rows(file, say=lambda line: None) if file.is_file() else []
    check_samples(config, policy, make_task(config.env, config.seed), limit, lines, rows, record)
    return record


def bounds_of(folder: Path, config: LanguageConfig) -> tuple[float, float]:
    """The largest difference and the largest mean, by the precision of the run.

    In 16 bits a KL has a floor, which the run measured: KL = E[d^2] / 2 for small differences d of
    log-probs, so that the mean of |d| is at most sqrt(2 floor). Two ways to sample may round alike,
    with a floor near 0; what is computed here in float32 rounds as neither does. Its largest
    difference may be :data:`_TAIL` times as large.
    """
    low = config.actor.dtype not in ("float32", "float64")
    if not low and getattr(config.learner, "dtype", None) != "mixed":
        return LARGEST, MEAN
    rows = read_rows(RunFolder(folder).metrics, say=lambda line: None)
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


def _that_fit(policy: Policy, lines: Sequence[SampleLine]) -> tuple[list[SampleLine], list[str]]:
    """The samples that the model can read, and a line for each that it cannot."""
    network = unwrapped(policy.model)
    size = len(network.get_input_embeddings().weight)
    fit, problems = [], []
    for number, sample in lines:
        ids = [*sample["prompt_ids"], *sample["response_ids"]]
        try:
            check_length(network, len(ids))
            if max(ids) >= size:
                raise ValueError(f"token {max(ids)}: the model has {size} tokens")
        except ValueError as error:
            problems.append(f"samples.jsonl line {number}: {error}")
        else:
            fit.append((number, sample))
    return fit, problems


def _texts(policy: Policy, lines: Sequence[SampleLine]) -> Iterator[str]:
    """A line for each sample whose tokens are not those of its text."""
    tokenizer, eos = policy.causal.tokenizer, policy.special.eos
    for number, sample in lines:
        ids = torch.tensor([sample["response_ids"]])
        (text,) = response_texts(tokenizer, ids, torch.ones_like(ids, dtype=torch.bool), eos)
        if text != sample.get("response"):
            yield f"samples.jsonl line {number}: its tokens are not its response"


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
        policy: the run's, with other weights from sample to sample.
        notes: checkpoints that are damaged, a line each.
        vouched: whether the model's own weights are known to be the run's. Only a checkpoint that
            needs them beside it has a digest of them.
    """

    def __init__(self, folder: Path, config: LanguageConfig) -> None:
        self._config = config = unmixed(config)
        self.notes, self.vouched = list[str](), config.actor.init is not None
        found = list(whole_entries(folder, self._damaged))
        self._entries = {entry.frames: entry for entry in reversed(found)}  # the last ones first
        self.policy = make_policy(config, say=lambda _: None)
        model, head = self.policy.model, self.policy.value_head
        base = base_digest(model, config.actor.model)
        self._weights = Weights(model, head, base=base)
        self._in_float(model)
        self._base = {name: each.clone() for name, each in self._weights.state_dict().items()}
        # The samples so far of the weights that both models have; None for a run that did not start
        # from the model's own.
        self._now = self._reference_now = 0 if config.actor.init is None else None
        self._rule = factory("reference", config.reference, LANGUAGE)(config.reference)
        self._reference = self._make_reference(folder) if config.has_reference else None
        if self._rule.source != THE_POLICY:
            self._reference_now = None
        # Nothing is told of a record beside another base model than the run's.
        for samples, entry in tuple(self._entries.items())[:1]:
            self._load(self._weights, entry, "agent")
            self._now = samples

    def _damaged(self, path: Path, error: DamagedEntry) -> None:
        self.notes.append(f"checkpoint {path} is left out ({error})")

    def _in_float(self, model: nn.Module) -> None:
        """In float32 at least, without dropout, gradients or checkpointing."""
        if next(model.parameters()).dtype != torch.float64:
            model.float()
        model.requires_grad_(False).eval()

    def _make_reference(self, folder: Path) -> nn.Module:
        """A model of its own: another run's network, or the policy's as it is before any update."""
        if self._rule.source != OTHER_RUN:
            return deepcopy(self.policy.model)
        described = RunFolder(folder).manifest["reference"]
        config = with_network(self._config, described)
        if config.actor.model == language_config(folder).actor.model:
            config = with_model(config, self._config.actor.model)  # it may have moved
        model = make_policy(unmixed(config), say=lambda _: None).model
        self._in_float(model)
        return model

    def tables(self, sample: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """Log softmax(logits / temperature) of policy and reference at each response token [n, V].

        None where the weights that drew the sample, or the reference of that time, are gone.
        """
        drawn_by = sample["weights"]
        policy = self._table(self.policy.model, sample) if self._set_policy(drawn_by) else None
        reference = None
        if self._reference is not None and self._set_reference(drawn_by):
            reference = self._table(self._reference, sample)
        return policy, reference

    def _set_policy(self, samples: int | None) -> bool:
        """Load the weights of so many samples; whether they are there."""
        if samples is not None and samples == self._now:
            return True
        if samples in self._entries:
            self._load(self._weights, self._entries[samples], "agent")
        elif samples == 0 and self._config.actor.init is None:
            self._weights.load_state_dict(self._base)
        else:
            return False
        self._now = samples
        return True

    def _set_reference(self, samples: int | None) -> bool:
        """Load the reference of that time; whether it is there."""
        if not checkpointed(self._rule, self._config):
            return True
        if not self._rule.moves:  # any checkpoint holds the one that there is
            samples = next(iter(self._entries), None)
        if samples is not None and samples == self._reference_now:
            return True
        if samples not in self._entries:
            return False
        assert self._reference is not None
        whole = Weights(self._reference, whole=True)
        self._load(whole, self._entries[samples], "reference")
        self._reference_now = samples
        return True

    def _load(self, weights: Weights, entry: CheckpointEntry, component: str) -> None:
        device = next(self.policy.model.parameters()).device
        try:
            state = entry.state(component, device)
            weights.load_state_dict(state)
        except (RuntimeError, DamagedEntry) as error:
            raise ConfigError(f"{entry.path}: does not fit this network: {error}") from error
        self.vouched |= state.keys() >= self._base.keys()  # the digest is one of these

    @torch.no_grad()
    def _table(self, model: Any, sample: Mapping[str, Any]) -> Tensor:
        prompt, response = sample["prompt_ids"], sample["response_ids"]
        ids = torch.tensor([[*prompt, *response]], device=next(model.parameters()).device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return (logits.double() / self._config.collector.temperature).log_softmax(-1).cpu()


def _numbers(
    sample: Mapping[str, Any], policy: Tensor | None, reference: Tensor | None
) -> dict[str, Tensor]:
    """What a sample's entries should be [n], as far as the tables [n, V] are there."""
    chosen = torch.tensor(sample["response_ids"])[:, None]
    tables = {"policy": policy, "reference": reference}
    numbers = {
        name: table.gather(1, chosen).squeeze(1)
        for name, table in tables.items()
        if table is not None
    }
    if policy is not None and reference is not None:
        # KL(pi || pi_ref) = sum_a pi(a) (ln pi(a) - ln pi_ref(a)), over the whole vocabulary
        numbers["KL"] = (policy.exp() * (policy - reference)).sum(1)
    return numbers
