"""``klrl verify`` of language runs: true records pass in every kind, and each fault is named."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from klrl.config.given import Given
from klrl.language.run.load import language_config, trained_policy
from klrl.language.run.verify import KL, POLICY, REFERENCE, Sample, bounds_of, table_of, verify_run
from klrl.runs.folder import RunFolder
from klrl.runs.resume import resumed_config
from klrl.train.loop import Training, start
from tests.conftest import marked
from tests.runs.commands import said, samples_of
from tests.train.test_verify import keep_the_initial

pytestmark = pytest.mark.integration

KINDS = {
    "full": (),
    "temperature": ("collector.temperature=0.7",),
    "adapters": ("actor.lora.r=2", "reference=adapter_off", "optim.lr=0.1"),
    "ema": ("reference=ema", "reference.decay=0.5", "advantage=gae"),
    "float64": ("actor.dtype=float64",),
    "step": ("kl.apply=step",),
    "exact": ("kl.placement=split", "kl.estimator=exact", "kl.divergence=forward"),
}


def trained(job, *words: str, run: str = "run") -> Path:
    Training(job("frames=64", *words)).train(RunFolder(Path(run)))
    return Path(run)


def write(run: Path, name: str, lines: list[dict]) -> None:
    (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def rows_in(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", marked("slow", KINDS, "adapters"))
def test_a_true_record_is_within_the_bounds(job, kind: str) -> None:
    """There are weights of 0 samples, the base model's, and of 64."""
    found = verify_run(trained(job, *KINDS[kind]))
    assert found.problems == []
    measured = {each.name: each for each in found.measures}
    assert set(measured) == {POLICY, REFERENCE, KL}
    for each in measured.values():
        assert each.samples == (4 if kind == "ema" else 8)  # no digest of the base model is stored
        assert 0 < each.largest <= 1e-4
        assert each.mean <= 1e-5
    gone = 16 if kind == "ema" else 12
    assert f"log-probs of {gone} samples, whose weights are gone" in found.unseen


@pytest.mark.parametrize("name", ["log_probs", "ref_log_probs", "kl"])
def test_one_wrong_number_is_found_and_placed(job, capsys, name: str) -> None:
    run = trained(job, "frames=16")
    samples = samples_of(run)
    samples[-2][name][-1] += 3e-4
    write(run, "samples.jsonl", samples)
    found = verify_run(run)
    (off,) = [each for each in found.measures if not each.ok]
    assert off.name == {"log_probs": POLICY, "ref_log_probs": REFERENCE, "kl": KL}[name]
    assert off.largest == pytest.approx(3e-4, rel=0.1)
    assert off.place.startswith("samples.jsonl line 7, token ")
    assert found.problems == [off.line]
    code, out, err = said(capsys, "verify", "run")
    assert (code, err) == (1, "klrl verify: the record of run is wrong\n")
    assert off.line in out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_ids", []),
        ("prompt_ids", [-1]),
        ("kl", [0.0] * 9),
        ("log_probs", None),
        ("weights", None),
    ],
)
def test_a_line_that_is_no_sample_is_named(job, name: str, value: object) -> None:
    run = trained(job, "frames=16")
    samples = samples_of(run)
    samples[1][name] = value
    write(run, "samples.jsonl", samples)
    assert verify_run(run).problems == ["samples.jsonl line 2: is not a valid sample"]


def test_a_token_that_the_model_does_not_have_is_named(job) -> None:
    run = trained(job, "frames=16")
    samples = samples_of(run)
    samples[1]["prompt_ids"][0] = 10**6
    write(run, "samples.jsonl", samples)
    (problem,) = verify_run(run).problems
    assert problem.startswith("samples.jsonl line 2: has token id 1000000, but the model has ")


def test_half_the_exact_kl_of_rows_is_named(job) -> None:
    run = trained(job, "frames=32")
    rows = rows_in(run)
    for row in rows:
        row["kl/ref/exact"] /= 2
    write(run, "metrics.jsonl", rows)
    (problem,) = verify_run(run).problems
    assert problem.startswith("metrics.jsonl: iteration 2: kl/ref/exact_seq is ")
    assert "but kl/ref/exact * reward/episode_length is " in problem


@pytest.mark.parametrize(
    ("words", "begin"),
    [("eval.final=8", {"eval/kl_ref", "eval/kl_ref_forward"}), ("eval.every=0", {POLICY, KL})],
)
def test_a_checkpoint_of_the_initial_policy_is_named(job, monkeypatch, words, begin) -> None:
    """By its evaluation, whose KL is 0, and by the samples that the trained policy drew."""
    keep_the_initial(monkeypatch)
    found = verify_run(trained(job, "eval.every=4", "eval.episodes=8", words, "optim.lr=0.1"))
    named = {problem.partition(": ")[0].partition(" of 8 ")[0] for problem in found.problems}
    assert named >= begin


def test_a_resumed_run_and_one_without_samples_are_verified(job) -> None:
    run = trained(job, "frames=32", "eval.every=2", "eval.episodes=8", "eval.final=8")
    folder, config = resumed_config("run", [Given("frames=64")])
    start(config, RunFolder(folder), resume=True)
    found = verify_run(run)
    assert (found.problems, found.measures[0].samples) == ([], 12)  # of 0, 32 (best) and 64
    (run / "samples.jsonl").unlink()
    found = verify_run(run)
    assert (found.problems, found.measures) == ([], [])
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
    run = trained(job, "actor.dtype=bfloat16")
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
    table = table_of(policy.model, Sample(**sample), config.collector.temperature)
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-5)
    found = verify_run(run)
    assert found.problems == []
    assert found.measures[0].largest > 1e-4  # bfloat16 does round


def test_a_mixed_run_whose_kl_is_wrong_is_found(job) -> None:
    """Rounding of log-probs by e changes a KL by e^2 / 2 + e sqrt(2 KL), not by e."""
    run = trained(job, "actor.dtype=bfloat16", "frames=32", "optim.lr=1e-3", "optim.lr_floor=1e-3")
    samples = samples_of(run)
    recorded = [kl for sample in samples for kl in sample["kl"]]
    assert verify_run(run).ok
    for factor in (0.0, 0.5, 2.0):
        wrong = [{**each, "kl": [factor * kl for kl in each["kl"]]} for each in samples]
        write(run, "samples.jsonl", wrong)
        measured = {each.name: each for each in verify_run(run).measures}
        assert [name for name, each in measured.items() if not each.ok] == [KL], factor
        assert measured[KL].mean < 0.5 * max(recorded)
