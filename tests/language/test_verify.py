"""``klrl verify``: true records pass in every kind of run, and one changed number is found."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from klrl.__main__ import main
from klrl.base.errors import ConfigError
from klrl.language.run.load import language_config
from klrl.language.run.samples import Sample
from klrl.language.run.verify import (
    Sources,
    bounds_of,
    table_of,
    verify_run,
)
from klrl.runs.folder import RunFolder
from klrl.train.loop import Training
from tests.report.toys import write_run

pytestmark = pytest.mark.integration

KINDS = {
    "full": (),
    "temperature": ("collector.temperature=0.7",),
    "adapters": ("actor.lora.r=2", "reference=adapter_off", "optim.lr=0.1"),
    "ema": ("reference=ema", "reference.decay=0.5", "advantage=gae"),
    "float64": ("actor.dtype=float64",),
    "step": ("kl.apply=step",),
}


def trained(job, *words: str, run: str = "run") -> Path:
    Training(job("frames=64", "checkpoint.every=2", *words)).train(RunFolder(Path(run)))
    return Path(run)


#: Of the kinds that a quick test runs, one has every number that is compared.
QUICK = ("adapters",)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k not in QUICK)) for k in KINDS]
)
def test_a_true_record_is_within_the_bounds(job, kind: str) -> None:
    """Iterations 1 to 4 and the last draw; there are weights of 0, 32 and 64 samples."""
    found = verify_run(trained(job, *KINDS[kind]))
    assert found.ok
    measured = {each.name: each for each in found.measures}
    assert set(measured) == {"policy", "reference", "KL"}
    # Weights of 0 samples are the model's own; 16 and 48 have no checkpoint.
    assert measured["policy"].samples == 12
    assert measured["reference"].samples == (12 if kind == "ema" else 20)  # one that moves is gone
    assert measured["KL"].samples == 12
    for each in measured.values():
        assert each.largest <= 1e-4
        assert each.mean <= 1e-5
        assert each.tokens >= each.samples
    gone = [line.partition(", whose")[0] for line in found.unseen if "weights are gone" in line]
    names = ("policy", "reference", "KL") if kind == "ema" else ("policy", "KL")
    assert gone == [f"{name} of 8 samples" for name in names]


def changed(run: Path, place: int, name: str, by: float) -> Path:
    """A copy of a run with one number of one sample changed."""
    copy = Path(shutil.copytree(run, "changed"))
    lines = (copy / "samples.jsonl").read_text().splitlines()
    sample = json.loads(lines[place])
    sample[name][-1] += by
    lines[place] = json.dumps(sample)
    (copy / "samples.jsonl").write_text("\n".join(lines) + "\n")
    return copy


@pytest.mark.parametrize(
    "name",
    [
        "log_probs",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ref_log_probs", "kl")),
    ],
)
def test_one_changed_number_is_found_and_placed(job, capsys, name: str) -> None:
    run = trained(job)
    copy = changed(run, place=-2, name=name, by=3e-4)
    found = verify_run(copy)
    assert not found.ok
    title = {"log_probs": "policy", "ref_log_probs": "reference", "kl": "KL"}[name]
    for each in found.measures:
        assert each.ok == (each.name != title)
    (off,) = [each for each in found.measures if not each.ok]
    assert off.largest == pytest.approx(3e-4, rel=0.1)
    assert off.place.startswith("samples.jsonl line 19, token ")
    capsys.readouterr()
    with pytest.raises(SystemExit, match="1"):
        main(["verify", "changed"])
    said = capsys.readouterr()
    assert "samples.jsonl line 19, token " in said.out
    assert said.err == "klrl verify: the record of changed is wrong\n"


def test_damaged_samples_and_entries_are_told_a_line_each(job) -> None:
    run = trained(job, "frames=16", "collector.samples_count=8")
    file = run / "samples.jsonl"
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    samples[0]["response_ids"][0] = 5000
    samples[1]["prompt_ids"] *= 40
    samples[2]["response_ids"][0] = True
    samples[3]["prompt_ids"][0] = 10**30
    samples[4]["log_probs"][0] = 10**400
    samples[5]["weights"] = "16"
    samples[6]["weights"] = None
    samples[7]["kl"][0] = math.nan
    file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    manifest = run / "checkpoints/last/frames-000000000016/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:20])
    found = verify_run(run)
    assert not found.ok
    of_lines = (each for each in found.problems if each.startswith("samples.jsonl line "))
    told = dict(each.split(": ", 1) for each in of_lines if ": the field " not in each)
    numbered = [f"samples.jsonl line {number}" for number in range(1, 9)]
    assert sorted(told) == numbered
    assert "token 5000" in told[numbered[0]]
    assert "max_position_embeddings=64" in told[numbered[1]]
    assert {told[number] for number in numbered[2:]} == {"is not a valid sample"}
    (damaged,) = (line for line in found.problems if "is damaged" in line)
    assert "frames-000000000016 is damaged (manifest.json: " in damaged


def test_a_record_that_nothing_can_be_compared_with_is_not_called_true(job, capsys) -> None:
    """Weights of 16 and 48 samples have no checkpoint."""
    run = trained(job, "kl=none")
    lines = (run / "samples.jsonl").read_text().splitlines(keepends=True)
    gone = [line for line in lines if json.loads(line)["weights"] in (16, 48)]
    (run / "samples.jsonl").write_text("".join(gone))
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main(["verify", "run"])
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "klrl verify: run: the weights that drew its samples are gone, so no number can be "
        "recomputed; set checkpoint.every=1 in a run that you want to verify\n"
    )


@pytest.mark.parametrize(
    ("floor", "mean"),
    [(None, 0.05), (0.0, 2**-7), (7e-12, 2**-7), (1.1e-3, 0.0469)],
)
def test_the_bounds_in_16_bits(job, floor: float | None, mean: float) -> None:
    """Two ways to sample may round alike; a plain float32 forward rounds otherwise than both."""
    row = {"iteration": 1, "samples": 16} | ({} if floor is None else {"kl/ref/floor": floor})
    bounds = bounds_of([row], job("actor.dtype=bfloat16", "actor.lora.r=2"))
    assert bounds == pytest.approx((max(0.5, 20 * mean), mean), rel=1e-3)


@pytest.mark.slow
def test_a_checkpoint_of_other_weights_is_found(job) -> None:
    words = ("actor.lora.r=2", "reference=adapter_off", "optim.lr=0.1")
    run, other = trained(job, *words), trained(job, *words, "seed=1", run="other")
    place = Path("checkpoints/last/frames-000000000064")
    shutil.rmtree(run / place)
    shutil.copytree(other / place, run / place)
    measured = {each.name: each for each in verify_run(run).measures}
    assert (measured["policy"].ok, measured["reference"].ok) == (False, True)


def test_a_mixed_run_is_computed_in_float32(job) -> None:
    """What rounds as the run did would not see a rounding that is wrong."""
    run = trained(job, "actor.dtype=bfloat16")
    config = language_config(run)
    assert config.mixed
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    assert sample["weights"] == 0
    plain = AutoModelForCausalLM.from_pretrained(config.actor.model, dtype=torch.float32).eval()
    ids = torch.tensor([[*sample["prompt_ids"], *sample["response_ids"]]])
    with torch.no_grad():
        logits = plain(input_ids=ids).logits[0, len(sample["prompt_ids"]) - 1 : -1]
    expected = (logits.double() / config.collector.temperature).log_softmax(-1)
    for model in Sources(run, config).at(0):
        table = table_of(model, Sample(line=1, **sample), config.collector.temperature)
        torch.testing.assert_close(table, expected, rtol=0, atol=1e-5)
    found = verify_run(run)
    assert found.ok
    (policy,) = (each for each in found.measures if each.name == "policy")
    assert policy.largest > 1e-4  # bfloat16 does round


def test_a_mixed_run_whose_kl_is_wrong_is_found(job, capsys) -> None:
    """Rounding of log-probs by e changes a KL by e^2 / 2 + e sqrt(2 KL), not by e."""
    run = trained(job, "actor.dtype=bfloat16", "frames=32", "optim.lr=1e-3", "optim.lr_floor=1e-3")
    file = run / "samples.jsonl"
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    recorded = [kl for sample in samples for kl in sample["kl"]]
    assert verify_run(run).ok
    for factor in (0.0, 0.5, 2.0):
        wrong = [{**each, "kl": [factor * kl for kl in each["kl"]]} for each in samples]
        file.write_text("".join(json.dumps(each) + "\n" for each in wrong))
        measured = {each.name: each for each in verify_run(run).measures}
        assert [name for name, each in measured.items() if not each.ok] == ["KL"], factor
        assert measured["KL"].mean < 0.5 * max(recorded)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="1"):
        main(["verify", "run"])
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("KL(policy"))
    kl = measured["KL"]
    assert f"{kl.mean:.2g} ({kl.bounds[1]:.2g})  OFF at {kl.place}" in line


def test_what_cannot_be_verified_is_refused(job, capsys) -> None:
    run = trained(job, "collector.samples_every=0")
    with pytest.raises(ConfigError, match="run: has no samples.jsonl; set collector.samples_every"):
        verify_run(run)
    (run / "samples.jsonl").write_text("")
    with pytest.raises(ConfigError, match="its samples.jsonl has no samples"):
        verify_run(run)
    write_run(Path("control"))
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main(["verify", "control"])
    assert len(capsys.readouterr().err.splitlines()) == 1
