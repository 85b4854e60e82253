"""``klrl verify`` of language runs: true records pass in every kind, and each fault is named."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from klrl.config import LanguageConfig
from klrl.config.given import Given
from klrl.language.run.load import language_config, trained_policy
from klrl.language.run.verify import bounds_of, table_of, verify_run
from klrl.runs.folder import RunFolder
from klrl.runs.resume import resumed_config
from klrl.train.loop import Training, start
from klrl.train.verify import Record
from tests.conftest import marked
from tests.language.conftest import composed
from tests.runs.commands import said, samples_of
from tests.train.test_verify import keep_the_initial

pytestmark = pytest.mark.integration

#: A line about samples: quantity, number of samples, the largest and the mean difference.
LINE = re.compile(r"(\w+) of (\d+) samples: off by at most (\S+) .*, on average (\S+) \(")
FIELDS = {"log_probs", "ref_log_probs", "kl"}

KINDS = {
    "full": (),
    "temperature": ("collector.temperature=0.7",),
    "adapters": ("actor.lora.r=2", "reference=adapter_off", "optim.lr=0.1"),
    "ema": ("reference=ema", "reference.decay=0.5", "advantage=gae"),
    "stale": ("collector.staleness=2", "optim.lr=0.03"),
    "stale k1": (
        "collector.staleness=1",
        "optim.lr=0.03",
        "kl.estimator=k1",
        "kl.placement=reward",
    ),
    "float64": ("actor.dtype=float64",),
    "step": ("kl.apply=step",),
    "exact": ("kl.placement=split", "kl.estimator=exact", "kl.divergence=forward"),
}


def trained(config: LanguageConfig, run: Path = Path("run")) -> Path:
    Training(config).train(RunFolder(run))
    return run


@pytest.fixture(scope="module")
def finished(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(composed(model)("frames=32"), tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture
def run(finished: Path) -> Path:
    return Path(shutil.copytree(finished, "run"))


def write(run: Path, name: str, lines: list[dict]) -> None:
    (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def measured(lines: list[str]) -> dict[str, tuple[int, float, float]]:
    found = [match.groups() for line in lines if (match := LINE.match(line))]
    return {name: (int(count), float(most), float(mean)) for name, count, most, mean in found}


def wrong(found: Record) -> set[str]:
    return set(measured(found.problems))


@pytest.mark.parametrize("kind", marked("slow", KINDS, "adapters"))
def test_a_true_record_is_within_the_bounds(job: Callable[..., LanguageConfig], kind: str) -> None:
    found = verify_run(trained(job("frames=64", *KINDS[kind])))
    assert found.problems == []
    numbers = measured(found.looked)
    assert set(numbers) == FIELDS
    for count, largest, mean in numbers.values():
        assert count == 4
        assert 0 < largest <= 1e-4
        assert mean <= 1e-5
    assert "log-probs of 16 samples, whose weights are gone" in found.unseen


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_one_wrong_number_is_found_and_placed(run: Path, capsys, name: str) -> None:
    samples = samples_of(run)
    samples[-2][name][-1] += 3e-4
    write(run, "samples.jsonl", samples)
    found = verify_run(run)
    assert wrong(found) == {name}
    assert measured(found.problems)[name][1] == pytest.approx(3e-4, rel=0.1)
    (line,) = found.problems
    place = f"samples.jsonl line {len(samples) - 1}, token {len(samples[-2][name])}"
    assert place in line
    code, out, err = said(capsys, "verify", "run")
    assert (code, err) == (1, "klrl verify: the record of run is wrong\n")
    assert line in out


def test_half_the_exact_kl_of_rows_is_named(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["kl/ref/exact"] /= 2
    write(run, "metrics.jsonl", rows)
    (problem,) = verify_run(run).problems
    assert problem.startswith("metrics.jsonl: iteration 2: kl/ref/exact_seq is ")
    assert "but kl/ref/exact * reward/episode_length is " in problem


@pytest.mark.parametrize(
    ("words", "begin"),
    [
        ("eval.final=8", {"eval/kl_ref", "eval/kl_ref_forward"}),
        ("eval.every=0", {"log_probs", "kl"}),
    ],
)
def test_a_checkpoint_of_the_initial_policy_is_named(job, monkeypatch, words, begin) -> None:
    """By its evaluation, whose KL is 0, and by the samples that the trained policy drew."""
    keep_the_initial(monkeypatch)
    common = ("frames=64", "eval.every=4", "eval.episodes=8", "optim.lr=0.1")
    found = verify_run(trained(job(*common, words)))
    named = {problem.partition(": ")[0] for problem in found.problems}
    assert named | wrong(found) >= begin


def test_a_resumed_run_and_one_without_samples_are_verified(job) -> None:
    run = trained(job("frames=32", "eval.every=2", "eval.episodes=8", "eval.final=8"))
    folder, config = resumed_config("run", [Given("frames=64")])
    start(config, RunFolder(folder), resume=True)
    found = verify_run(run)
    assert (found.problems, set(measured(found.looked))) == ([], FIELDS)
    (run / "samples.jsonl").unlink()
    found = verify_run(run)
    assert (found.problems, measured(found.looked)) == ([], {})
    assert "samples: there are none" in found.unseen
    assert any(line.startswith("eval/") and "eval/kl_ref" in line for line in found.looked)


@pytest.mark.parametrize(
    ("floor", "mean"), [(None, 2**-7), (0.0, 2**-7), (7e-12, 2**-7), (1.1e-3, 0.0469)]
)
def test_the_bounds_in_16_bits(job, floor: float | None, mean: float) -> None:
    """Two ways to sample may round alike; a plain float32 forward rounds otherwise than both."""
    row = {"iteration": 1, "samples": 16} | ({} if floor is None else {"kl/ref/floor": floor})
    bounds = bounds_of([row], job("actor.dtype=bfloat16", "actor.lora.r=2"))
    assert bounds == pytest.approx((max(0.5, 20 * mean), mean), rel=1e-3)


def test_a_mixed_run_is_computed_in_float32(job) -> None:
    """What rounds as the run did would not see a rounding that is wrong."""
    run = trained(job("frames=64", "actor.dtype=bfloat16"))
    config = language_config(run)
    assert config.mixed
    sample = samples_of(run)[-1]
    policy = trained_policy(run)
    plain = AutoModelForCausalLM.from_pretrained(config.actor.model, dtype=torch.float32).eval()
    plain.load_state_dict(policy.model.state_dict())
    ids = torch.tensor([[*sample["prompt_ids"], *sample["response_ids"]]])
    with torch.no_grad():
        logits = plain(input_ids=ids).logits[0, len(sample["prompt_ids"]) - 1 : -1]
    expected = (logits.double() / config.collector.temperature).log_softmax(-1)
    table = table_of(policy.model, sample, config.collector.temperature)
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-5)
    found = verify_run(run)
    assert found.problems == []
    assert measured(found.looked)["log_probs"][1] > 1e-4  # bfloat16 does round


def test_a_mixed_run_whose_kl_is_wrong_is_found(job) -> None:
    """Rounding of log-probs by e changes a KL by e^2 / 2 + e sqrt(2 KL), not by e."""
    words = ("actor.dtype=bfloat16", "frames=32", "optim.lr=1e-3", "optim.lr_floor=1e-3")
    run = trained(job(*words))
    samples = samples_of(run)
    assert verify_run(run).problems == []
    for factor in (0.0, 0.5, 2.0):
        changed = [{**each, "kl": [factor * kl for kl in each["kl"]]} for each in samples]
        write(run, "samples.jsonl", changed)
        found = verify_run(run)
        assert wrong(found) == {"kl"}, factor
        assert measured(found.problems)["kl"][2] < 0.5 * max(max(each["kl"]) for each in samples)


@pytest.mark.parametrize(
    "change",
    [
        lambda sample: [],
        lambda sample: {**sample, "log_probs": sample["log_probs"][:-1]},
        lambda sample: {key: each for key, each in sample.items() if key != "kl"},
        lambda sample: {**sample, "response_ids": [10**6] * len(sample["response_ids"])},
        lambda sample: {**sample, "prompt_ids": ["a"]},
    ],
    ids=["list", "short", "lacks", "unknown_id", "text"],
)
def test_a_line_that_is_no_sample_is_named(change: Callable[[dict], object], run: Path) -> None:
    samples = samples_of(run)
    (run / "samples.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in [*samples[:-1], change(samples[-1])])
    )
    (line,) = verify_run(run).problems
    assert line.startswith(f"samples.jsonl line {len(samples)}: ")
