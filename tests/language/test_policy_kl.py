"""``klrl kl`` of language policies, against the logits of plain transformers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from klrl.base.errors import ConfigError
from klrl.kl.divergences import MEASURED, over_actions
from klrl.language.model.vocabulary import NextTokens
from klrl.language.run import evaluate
from klrl.language.run.export import export_run
from klrl.language.run.verify import verify_run
from klrl.train.evaluate import evaluate_run
from klrl.train.policy_kl import kl_between
from tests.language.conftest import plain
from tests.runs.commands import rows_of


@pytest.mark.parametrize("lora", [0, 2])
def test_each_token_is_a_sum_over_the_vocabulary(lora, exits, model, batches) -> None:
    """A run, against its reference, the folder that it started from, and its own export."""
    words = ("collector.temperature=0.7", f"actor.lora.r={lora}", "optim.lr=0.05")
    words = (*words, *(["reference=adapter_off"] if lora else []))
    assert exits(*words)[0] == 0
    found = kl_between("run", model, episodes=12)
    export_run("run", Path("exported"), merge=bool(lora))
    p, q = (torch.cat(plain(f, batches[0], 0.7)) for f in ("exported", model))
    m = torch.logaddexp(p, q) - torch.tensor(2.0).log()
    js = 0.5 * (p.exp() * (p - m) + q.exp() * (q - m)).sum(-1)
    expected = (
        (p.exp() * (p - q)).sum(-1),
        (q.exp() * (q - p)).sum(-1),
        js,
        0.5 * (p.exp() - q.exp()).abs().sum(-1),
    )
    for each, values in zip(found.distances.values(), expected, strict=True):
        assert each.mean == pytest.approx(float(values.mean()), abs=1e-5)
        assert each.worst == pytest.approx(float(values.max()), abs=1e-5)
    assert found.states == len(p)
    assert next(iter(found.distances.values())).mean > 1e-3
    reference = kl_between("run", episodes=12)
    for mine, theirs in zip(reference.distances.values(), found.distances.values(), strict=True):
        assert mine.mean == pytest.approx(theirs.mean, abs=1e-6)
    row = evaluate_run("run", episodes=12).row
    sums = [0.0, 0.0, 0]
    for p, q in zip(*(plain(f, batches[-1], 0.7) for f in ("exported", model)), strict=True):
        sums[0] += float((p.exp() * (p - q)).sum())
        sums[1] += float((q.exp() * (q - p)).sum())
        sums[2] += len(p)
    for name, total in zip(("eval/kl_ref", "eval/kl_ref_forward"), sums[:2], strict=True):
        assert row[name] == pytest.approx(total / sums[2], abs=1e-5)  # greedy responses
    own = kl_between("run", "exported", episodes=12)
    assert max(each.worst for each in own.distances.values()) < 1e-3


def test_a_js_that_rounds_below_0_is_0(monkeypatch) -> None:
    """Of two policies whose logits differ by 1e-4, in float32: about 1e-9 nats."""
    torch.manual_seed(0)
    logits = torch.randn(500, 1, 50)
    p, q = logits.log_softmax(-1), (logits + 1e-4 * torch.randn(logits.shape)).log_softmax(-1)
    assert over_actions("js", p, q).min() < 0
    policy, other = (NextTokens(each, torch.nn.Identity()) for each in (p, q))
    tokens = torch.zeros(500, 1, dtype=torch.long)
    monkeypatch.setattr(evaluate, "response_mask", lambda batch: torch.ones_like(tokens) > 0)
    batch = {("tokens", "response"): tokens}
    found = evaluate.measured(lambda _: policy, lambda _: other, batch, MEASURED)
    js = [float(each["js"][0]) for each in found]
    assert min(js) == 0 < max(js)


def test_a_folder_is_reference_and_teacher_to_plain_transformers(exits, model, batches) -> None:
    """Trained away from a first run, of which only an exported folder is left."""
    assert exits("optim.lr=0.03", "hydra.run.dir=first")[0] == 0
    export_run("first", Path("folder"))
    words = ("reference=model", "reference.path=folder", "kl.placement=loss", "kl.estimator=exact")
    words = (*words, "kl.coef=1", "advantage.reward_weight=0", "loss=clip", "frames=128")
    assert exits(*words)[0] == 0
    assert exits("resume=run", "frames=160")[0] == 0
    rows = rows_of(Path("run"))
    assert rows[-1]["kl/ref/exact"] < 0.7 * rows[0]["kl/ref/exact"]
    batches.clear()
    found = kl_between("run", episodes=12).distances["KL(policy||reference) on policy"]
    export_run("run", Path("exported"))
    p, q = (torch.cat(plain(each, batches[0], 1.0)) for each in ("exported", "folder"))
    assert found.mean == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), abs=1e-5)
    named = kl_between("run", "folder", episodes=12).distances["KL(run||other) on run"]
    assert named.mean == pytest.approx(found.mean, abs=1e-6)
    verdict = verify_run("run")
    assert verdict.problems == []
    assert any(line.startswith("ref_log_probs of ") for line in verdict.looked)


@pytest.mark.parametrize(
    ("tokens", "rows", "said"),
    [
        (1, 0, "its vocabulary differs from this policy's"),
        (0, 8, "it has 26 logits, but this policy has 18"),
    ],
)
def test_a_folder_of_other_tokens_is_refused(exits, model, tokens, rows, said) -> None:
    network, tokenizer = (
        kind.from_pretrained(model) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    tokenizer.add_tokens(["zz"] * tokens)
    size = network.config.vocab_size + tokens + rows
    network.resize_token_embeddings(size, mean_resizing=False)
    network.save_pretrained("other")
    tokenizer.save_pretrained("other")
    code, _, err = exits("reference=model", "reference.path=other")
    assert code == 2
    assert f"reference.path=other: {said}" in err.splitlines()[-1]
    assert not Path("run").exists()


def test_a_prompt_must_fit_the_context_of_the_other_model_too(exits, model) -> None:
    """A shorter context is refused before the run, not by the first long response."""
    shutil.copytree(model, "short")
    file = Path("short/config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 16}))
    assert exits()[0] == 0
    with pytest.raises(ConfigError, match="the model's context minus the longest response leaves"):
        kl_between("run", "short", episodes=4)
    code, _, err = exits("reference=model", "reference.path=short", "hydra.run.dir=other")
    assert (code, len(err.splitlines())) == (2, 1), err
    assert "the model's context minus the longest response leaves" in err
    assert not Path("other").exists()
