"""Whole language runs: what they record, how they go on, what they refuse.

The policy is a Llama of a few thousand parameters, untrained: what counts here are the numbers.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from klrl.__main__ import main
from klrl.base.errors import NonFiniteError
from klrl.language.data.batch import LOG_PROBS
from klrl.language.run.job_checks import check_job
from klrl.runs.folder import RunFolder
from klrl.runs.metrics import METRICS
from klrl.train.learner import Coefficients
from klrl.train.loop import Training
from tests.language import toys as lm_toys
from tests.language.conftest import QUICK
from tests.runs.commands import manifest_of, rows_of, said, samples_of, timeless
from tests.runs.test_resume_exact import assert_loaded_as_saved

pytestmark = pytest.mark.integration


def test_a_run_leaves_what_it_promises(exits, capsys, curves) -> None:
    code, out, err = exits("eval.every=2", "eval.episodes=6")
    assert (code, err) == (0, "")
    assert [
        line.split(":")[1].strip()[:12] for line in out.splitlines() if "preflight" in line
    ] == [
        "cache shared",
        "scored in on",
        "sampled - re",
        "KL(policy||r",
        "responses th",
    ]
    rows = rows_of(Path("run"))
    assert [row["samples"] for row in rows] == [16, 32]
    for row in rows:
        assert set(row) <= set(METRICS)
        shaped = row["reward/raw"] - row["kl/ref/penalty"]
        assert row["reward/shaped"] == pytest.approx(shaped, abs=1e-6)
        per_response = row["reward/raw"] * row["reward/episode_length"]
        assert per_response == pytest.approx(row["reward/episode"], abs=1e-9)
        assert 0 <= row["reward/gold"] <= row["reward/episode"]
        phases = [row[f"time/{phase}"] for phase in ("sampling", "reward", "scoring", "update")]
        assert min(phases) > 0
        assert 0.8 < sum(phases) / row["time/iteration"] < 1
    assert abs(rows[0]["kl/ref/exact"]) < 1e-5
    assert rows[1]["kl/ref/exact"] > 1e-3
    assert rows[-1]["eval/gold"] <= rows[-1]["eval/return"]
    manifest = manifest_of(Path("run"))
    assert (manifest["status"], manifest["samples"]) == ("finished", 32)
    assert "transformers" in manifest["versions"]
    assert manifest["scoring"] == "shared"
    shown = samples_of(Path("run"))
    assert [entry["samples"] for entry in shown] == [n for n in (16, 32, 48) for _ in range(4)]
    for entry in shown:
        assert len(entry["kl"]) == len(entry["tokens"]) <= 6
        assert entry["truncated"] == (entry["tokens"][-1] != "<|im_end|>")
    assert Path("run/curves.png").stat().st_size > 10_000

    asked = ("evaluate", "run", "--episodes", "6")
    told = json.loads(said(capsys, *asked, "--json")[1])
    assert told["eval/episodes"] == 6
    sampled = said(capsys, *asked, "--sampled")[1]
    assert "over 6 responses, sampled at temperature 1)" in sampled
    other = json.loads(said(capsys, *asked, "--json", "env.reward=exact")[1])
    assert other["eval/return"] == pytest.approx(told["eval/gold"])
    assert "eval/gold" not in other
    code, _, err = said(capsys, "evaluate", "run", "env.shots=1")
    assert (code, "then env.reward, env.shortest" in err) == (2, True), err


def test_the_first_gradient_is_that_of_the_policy_gradient(job) -> None:
    """At the old policy every ratio is 1: d objective = -mean over tokens of A d log pi."""
    experiment = Training(job())
    batch = experiment.parts.rollout(0).collect()
    experiment.parts.charge_kl(batch)
    batch["advantage"] = torch.randn(batch["next", "reward"].shape)
    terms = experiment.parts.learner.steps.loss_terms(batch, Coefficients(0.0, 0.0, 0.0))
    parameters = experiment.parts.policy.parameters
    found = torch.autograd.grad(terms.total, parameters)
    total, count = 0.0, 0
    for i, (prompt, response) in enumerate(lm_toys.rows(batch)):
        logits = experiment.parts.policy.model(torch.cat([prompt, response])[None]).logits[0]
        log_p = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        log_prob = log_p.gather(1, response[:, None]).squeeze(1)
        total = total + (batch["advantage"][i, : len(response), 0] * log_prob).sum()
        count += len(response)
    expected = torch.autograd.grad(-total / count, parameters)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "words",
    [
        ["kl=legacy"],
        ["kl.placement=loss", "kl.estimator=k3"],
        ["kl.placement=loss", "kl.estimator=exact", "loss.reduction=sequence"],
        ["kl.placement=split", "kl.estimator=exact", "loss=klpen"],
        ["advantage=gae", "loss=klpen_held", "loss.normalize_advantage=true"],
        ["loss=klpen", "loss.kl_old=sampled", "advantage.baseline=leave_one_out"],
        ["loss.target_kl=1e-9", "learner.epochs=3"],
        ["kl.apply=step", "collector.temperature=0.7"],
        ["reference=ema", "controller=adaptive", "controller.unit=token"],
        ["actor.lora.r=2", "reference=adapter_off", "actor.gradient_checkpointing=true"],
        ["actor.dtype=bfloat16", "actor.lora.r=2", "advantage=gae"],
        ["actor.dtype=float64", "advantage=gae", "kl=none"],
    ],
    ids=" ".join,
)
def test_every_kind_of_run_learns_and_keeps_its_books(job, words: list[str]) -> None:
    experiment = Training(job(*words))
    before = [p.detach().clone() for p in experiment.parts.policy.parameters]
    experiment.train(RunFolder(Path("run")))
    rows = rows_of(Path("run"))
    assert len(rows) == 2
    for row in rows:
        shaped = row["reward/raw"] - row["kl/ref/penalty"]
        assert row["reward/shaped"] == pytest.approx(shaped, abs=1e-6)
    moved = [
        not torch.equal(p, b)
        for p, b in zip(experiment.parts.policy.parameters, before, strict=True)
    ]
    assert any(moved)
    assert ("kl/ref/exact" in rows[1]) == ("kl=none" not in words)
    assert rows[1].get("kl/ref/exact", 1.0) > 0
    assert ("loss/kl_ref" in rows[1]) == any("placement" in word for word in words)
    if "loss.target_kl=1e-9" in words:
        assert rows[0]["learner/epochs"] == 1


def test_without_adapters_or_with_a_copy_the_numbers_are_the_same(job) -> None:
    lora = ["actor.lora.r=2", "kl.placement=loss", "kl.estimator=exact", "kl.coef=0.5"]
    Training(job(*lora, "reference=adapter_off")).train(RunFolder(Path("off")))
    Training(job(*lora, "reference=initial")).train(RunFolder(Path("copy")))
    for off, copy in zip(*(timeless(rows_of(Path(p))) for p in ("off", "copy")), strict=True):
        assert off == pytest.approx(copy, abs=1e-6)


def test_a_run_says_how_far_from_its_reference_it_starts(job) -> None:
    """The base model under trained adapters, and another run, by the KL of the first rollout."""
    lora, off = ["actor.lora.r=2", "optim.lr=0.1"], "reference=adapter_off"
    Training(job(*lora, off)).train(RunFolder(Path("a")))
    start = "preflight: KL(policy||reference) at the start, nats/token: "

    def line(*words: str) -> str:
        [found] = [x for x in Training(job(*words)).parts.preflight if x.startswith(start)]
        return found.removeprefix(start)

    assert line(*lora, off).endswith("(at most 1e-05) ok")
    assert line(*lora, "actor.init=a").endswith("(at most 1e-05) ok")
    away = "; the reference is not where the policy starts"
    for words in ([*lora, off, "actor.init=a"], ["reference=checkpoint", "reference.path=a"]):
        found = line(*words)
        assert found.endswith(away)
        assert float(found.removesuffix(away)) > 1e-4
    assert "not where" not in line(
        *lora, "actor.init=a", "reference=checkpoint", "reference.path=a"
    )


@pytest.mark.parametrize("advantage", ["gae", "group"])
def test_a_student_that_equals_its_teacher_stays(job, advantage: str) -> None:
    """The errors of its value head are no advantages. Adam's steps enlarge rounding by lr / eps."""
    way = (f"advantage={advantage}",)
    Training(job(*way, "frames=64")).train(RunFolder(Path("teacher")))
    way = (*way, "optim.lr=1e-3", "optim.lr_floor=1e-3", "optim.eps=0.01")
    words = (*way, "advantage.reward_weight=0", "actor.init=teacher")
    words = (*words, "kl.placement=loss", "kl.estimator=exact", "frames=64", "learner.epochs=2")
    start = ("reference=checkpoint", "reference.path=teacher")
    Training(job(*words, *start)).train(RunFolder(Path("run")))
    assert max(row["kl/ref/exact"] for row in rows_of(Path("run"))) < 1e-6


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["advantage=gae", "loss=klpen_held", "reference=ema", "controller=adaptive"],
        ["actor.lora.r=2", "reference=adapter_off", "controller=dual", "optim=adamw"],
        ["controller=held", "controller.target=1e-9", "controller.unit=sequence"],
        ["kl=legacy", "kl.apply=step", "reference=ema", "controller=adaptive"],
        ["collector.staleness=3", "collector.dtype=bfloat16", "loss=dppo", "loss.measure=tv_exact"],
    ],
    ids=lambda words: " ".join(words) or "default",
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(job, exits, words) -> None:
    Training(job(*words, "frames=64")).train(RunFolder(Path("whole")))
    assert exits(*words)[0] == 0
    code, out, _ = exits("resume=run", "frames=64")
    assert (code, "resumed at 32 samples" in out) == (0, True)
    assert timeless(rows_of(Path("run"))) == timeless(rows_of(Path("whole")))
    whole, resumed = (
        [{**each, "run": ""} for each in samples_of(Path(p))] for p in ("whole", "run")
    )
    assert resumed == whole


def test_a_resume_scores_in_the_rows_of_the_run(exits) -> None:
    assert exits()[0] == 0
    files = RunFolder(Path("run"))
    with files.owned():
        files._write({**files.manifest, "scoring": "packed"})
    code, out, _ = exits("resume=run", "frames=64")
    assert (code, "preflight: scored in one row per response" in out) == (0, True)
    assert files.manifest["scoring"] == "packed"


@pytest.mark.parametrize(
    "words",
    [
        ["advantage=gae", "reference=ema", "controller=adaptive"],
        ["actor.dtype=bfloat16", "actor.lora.r=2", "reference=adapter_off"],
    ],
    ids=lambda words: words[0],
)
def test_what_is_loaded_is_what_was_saved_bit_for_bit(job, words) -> None:
    assert_loaded_as_saved(job(*words))


@pytest.mark.parametrize("start", [["actor.init=first"], []], ids=["there", "elsewhere"])
def test_another_run_as_start_and_as_reference(job, exits, start: list[str], capsys) -> None:
    Training(job()).train(RunFolder(Path("first")))
    words = (*start, "reference=checkpoint", "reference.path=first")
    stored = Path("first/.hydra/config.yaml")
    text = stored.read_text("utf-8")
    for content, edited in ((text, 0), (text.replace("seed: ", "seed: 7", 1), 1 + len(start))):
        stored.write_text(content, encoding="utf-8")
        capsys.readouterr()
        check_job(job(*words), frozenset(), resumed=False)
        assert capsys.readouterr().err.count("has changed since the run began") == edited
    stored.write_text(text, encoding="utf-8")
    Training(job(*words)).train(RunFolder(Path("run")))
    Training(job(*words, "frames=48")).train(RunFolder(Path("whole")))
    rows = rows_of(Path("run"))
    assert (abs(rows[0]["kl/ref/exact"]) < 1e-5) == bool(start)
    assert rows[1]["kl/ref/exact"] > 1e-5
    Path("first").rename("gone")  # the run holds its reference itself
    assert exits("resume=run", "frames=48")[0] == 0
    resumed, whole = (rows_of(Path(name))[2]["kl/ref/exact"] for name in ("run", "whole"))
    assert resumed == whole


#: body of a reward function that works once -> what the failed run says
FAILING = {
    "raise ValueError('no verdict')": "raised ValueError: no verdict",
    "time.sleep(30)": "took more than 0.3 s",
    "return [float('nan')] * len(rows)": "returned nan",
    "return [1.0]": "returned 1 scores for 16 samples",
}


@pytest.mark.parametrize(("body", "line"), FAILING.items(), ids=["raise", "hang", "nan", "length"])
def test_a_reward_function_that_fails_loses_nothing(exits, body: str, line: str) -> None:
    name = f"failing_{abs(hash(body))}"
    Path(f"{name}.py").write_text(
        "import time\ncalls = []\n"
        "def score(prompts, responses, rows):\n"
        "    calls.append(1)\n"
        f"    if len(calls) > 2: {body}\n"  # the first call is the trial
        "    return [float(len(r)) for r in responses]\n"
    )
    code, _, err = exits(f"env.reward={name}:score", "env.reward_timeout=0.3")
    assert (code, len(err.splitlines())) == (1, 1)
    assert err.startswith(f"klrl: failed: env.reward={name}:score")
    assert line in err
    assert manifest_of(Path("run"))["status"] == "failed"
    assert len(rows_of(Path("run"))) == 1
    assert any(Path("run/checkpoints/last").iterdir())


def test_a_preflight_that_fails_is_fatal_before_anything_is_written(exits, monkeypatch) -> None:
    from klrl.language.run import preflight

    check = preflight.self_check

    def at_another_temperature(model, batch, *rows):
        batch.set(LOG_PROBS, batch[LOG_PROBS] * 1.5)
        return check(model, batch, *rows)

    monkeypatch.setattr(preflight, "self_check", at_another_temperature)
    code, _, err = exits()
    assert (code, len(err.splitlines())) == (2, 1)
    assert "preflight: sampled - recomputed log-probs, nats:" in err
    assert "FAILED" in err
    assert not Path("run").exists()


def test_wandb_gets_rows_and_a_table(job, monkeypatch) -> None:
    import wandb

    logged: list[dict] = []

    class Run:
        id = "taken"
        starting_step, offline, disabled = 0, True, False
        settings = SimpleNamespace(log_internal="wandb.log")

        def define_metric(self, *_: object, **__: object) -> None: ...

        def log(self, row: dict) -> None:
            logged.append(row)

        def finish(self, exit_code: int) -> None:
            assert exit_code == 0

    monkeypatch.setattr(wandb, "init", lambda **kwargs: Run())
    Training(job("logger=wandb")).train(RunFolder(Path("run")))
    assert [row["samples"] for row in logged] == [16, 32]
    assert RunFolder(Path("run")).manifest["wandb_id"] == "taken"
    assert logged[0]["samples_shown"].columns[:4] == ["iteration", "samples", "prompt", "response"]


def test_a_loss_that_is_not_finite_is_named_and_reaches_no_weight(job) -> None:
    experiment = Training(job())
    batch = experiment.parts.rollout(0).collect()
    experiment.parts.charge_kl(batch)
    experiment.parts.estimate_advantage(batch)
    batch["advantage"][0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match="loss/objective is -?inf in minibatch"):
        experiment.parts.learner.update(batch, 0.0)
    assert all(bool(p.isfinite().all()) for p in experiment.parts.policy.parameters)


def test_a_sweep_that_is_started_again_tells_how_long_its_runs_took(model, capsys) -> None:
    """The row before the first update, and the closing one, have an evaluation and no iteration."""
    evaluated = ("eval.every=null", "eval.evaluations=3", "eval.episodes=2")
    words = ["-m", "sweep=a", *QUICK, f"actor.model={model}", *evaluated]
    for done in ("1 to start", "1 finished before"):
        with pytest.raises(SystemExit) as stop:
            main(words)
        said = capsys.readouterr().out
        assert int(stop.value.code or 0) == 0
        assert done in said, said
    assert "time/iteration" not in rows_of(Path("outputs/a/job"))[0]
