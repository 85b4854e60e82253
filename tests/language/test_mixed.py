"""Float32 weights with bfloat16 arithmetic: what learns, what is scored, what is kept."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.sort_digits_base import make_model, make_tokenizer
from klrl.kl.reference import freeze
from klrl.language.run.preflight import SHOWN_FLOOR
from klrl.runs.folder import RunFolder
from klrl.train.loop import Training
from tests.language.conftest import QUICK_MODEL
from tests.runs.commands import rows_of, timeless
from tests.runs.test_resume_exact import assert_loaded_as_saved

pytestmark = pytest.mark.integration

BFLOAT16 = "actor.dtype=bfloat16"
#: At which a bfloat16 weight above 4.9e-4 would stay where it is.
SMALL = ("optim.lr=1e-6", "optim.lr_floor=1e-6")


def iterate(training: Training) -> None:
    """Rollout, KL, advantage and update, once."""
    batch = training.parts.rollout(0).collect()
    training.parts.charge_kl(batch)
    training.parts.estimate_advantage(batch)
    training.learn(batch)


def test_a_first_step_moves_the_weights(job) -> None:
    """Adam's first step is lr wherever there is a gradient (Kingma and Ba 2015, section 2.1)."""
    training = Training(job(BFLOAT16, *SMALL, "kl=none", "learner.minibatches=1"))
    parameters = training.parts.policy.parameters
    before = [p.detach().clone() for p in parameters]
    iterate(training)
    moments = training.parts.learner.steps.optimizer.state
    due = [moments[parameter]["exp_avg"] != 0 for parameter in parameters]
    moved = sum(int(((p != b) & d).sum()) for p, b, d in zip(parameters, before, due, strict=True))
    due = sum(int(each.sum()) for each in due)
    assert due > 1000
    assert moved / due > 0.99


def test_it_computes_in_bfloat16_with_weights_of_float32(job) -> None:
    """Its log-probs are those of plain transformers under autocast, and so are a copy's."""
    model = Training(job("learner.dtype=mixed")).parts.policy.model
    plain = AutoModelForCausalLM.from_pretrained(model.name_or_path).eval()
    ids = torch.arange(3, 15)[None]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            expected = plain(ids).logits
        assert expected.dtype == torch.bfloat16
        assert not torch.equal(expected.float(), plain(ids).logits)
        for each in (model, freeze(model)):
            assert torch.equal(each(ids).logits, expected)
        copied = freeze(model)
        for p in copied.parameters():
            p.zero_()  # a copy that called the first model would still answer as it does
        assert not copied(ids).logits.any()


def test_it_is_taken_and_said(exits) -> None:
    code, out, err = exits(BFLOAT16)
    assert (code, err) == (0, "")
    assert "actor.dtype=bfloat16: is read as learner.dtype=mixed" in out
    code, out, _ = exits("learner.dtype=mixed", "hydra.run.dir=other")
    assert (code, "is read as" in out) == (0, False)
    told, other = rows_of(Path("run")), rows_of(Path("other"))
    assert timeless(told) == timeless(other)


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model large enough to be rounded otherwise in a cache than in rows, logits of some nats."""
    torch.manual_seed(0)
    recipe, tokenizer = replace(QUICK_MODEL, hidden=128, layers=2, heads=4), make_tokenizer()
    network = make_model(recipe, tokenizer)
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(4.0)
    folder = tmp_path_factory.mktemp("sharp")
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"actor.model={folder}"


def test_a_reference_with_adapters_computes_as_the_policy_does(exits, sharp) -> None:
    still = ("optim.lr=1e-20", "optim.lr_floor=0")
    assert exits(sharp, "actor.lora.r=2", *still, "hydra.run.dir=adapters")[0] == 0
    near = ("reference=checkpoint", "reference.path=adapters")
    code, _, err = exits(sharp, BFLOAT16, *near, *still, "hydra.run.dir=full")
    assert code == 0, err
    assert rows_of(Path("full"))[1]["kl/ref/exact"] == 0


def test_equal_policies_have_no_kl_and_the_floor_is_told(exits, sharp) -> None:
    """Once they differ at all, a KL of less than the floor is rounding."""
    code, out, _ = exits(BFLOAT16, *SMALL, sharp)
    first, second = rows_of(Path("run"))
    assert (code, first["kl/ref/exact"], first["kl/ref/k2"]) == (0, 0.0, 0.0)
    floor, gap = first["kl/ref/floor"], first["policy/gap"]
    # k3 is d^2 / 2 to within d / 3 of itself: where no log-prob differs, as on processors that
    # round a cache as they round rows, both are 0.
    assert (floor > 0) == (gap > 0)
    assert 0 <= floor < min(1e-3, 0.6 * gap**2 + 1e-12)
    assert gap < 0.1
    assert abs(second["kl/ref/exact"]) < 2e-3  # one step of 1e-6, rounded to bfloat16
    # The preflight measures it on prompts of its own.
    assert "KL(policy||policy), sampled and scored" in out or floor < 100 * SHOWN_FLOOR
    exits("hydra.run.dir=full", sharp)
    assert "kl/ref/floor" not in rows_of(Path("full"))[0]


def test_what_is_kept_is_float32_and_goes_on_to_the_bit(job, exits) -> None:
    words = (BFLOAT16, "advantage=gae", "reference=ema", "controller=adaptive")
    Training(job(*words, "frames=64")).train(RunFolder(Path("whole")))
    assert exits(*words)[0] == 0
    files = Path("run/checkpoints").rglob("*.safetensors")
    kept = [each for file in files for each in load_file(file).items()]
    assert torch.bfloat16 not in {value.dtype for name, value in kept if "agent/" in name}
    assert exits("resume=run", "frames=64")[0] == 0
    assert timeless(rows_of(Path("run"))) == timeless(rows_of(Path("whole")))


def test_what_is_loaded_is_what_was_saved(job) -> None:
    assert_loaded_as_saved(job(BFLOAT16, "advantage=gae", "reference=ema"))


def test_adapters_and_critic_learn_in_float32_beside_bfloat16_weights(job) -> None:
    training = Training(job(BFLOAT16, "actor.lora.r=2", "advantage=gae", "kl=none"))
    parts = training.parts
    assert {p.dtype for p in parts.policy.parameters} == {torch.float32}
    held = {p.dtype for p in parts.policy.model.parameters() if not p.requires_grad}
    assert held == {torch.bfloat16}
