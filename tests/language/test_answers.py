"""``benchmarks/shipped/answers.py``: numbers of answers, against plain transformers."""

from copy import deepcopy
from dataclasses import asdict

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.shipped import answers
from benchmarks.shipped.answers import base_answers, trained_answers
from klrl.language.data.batch import response_mask
from klrl.report.runs import find_runs
from klrl.runs.folder import RunFolder
from klrl.train.loop import Training
from tests.language.conftest import QUICK

pytestmark = pytest.mark.integration

TEMPERATURE = 0.7


@pytest.fixture
def watched(monkeypatch) -> list:
    """(policy, base, batch) of each part that was answered."""
    seen: list = []
    compute = answers._beside_base

    def watch(policy, base, batch, temperature):
        result = compute(policy, base, batch, temperature)
        seen.append((deepcopy(policy.model), batch.clone(), *result))
        return result

    monkeypatch.setattr(answers, "_beside_base", watch)
    return seen


def table(model: torch.nn.Module, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """log softmax(logits / temperature) at each response token [n, V], unpadded."""
    with torch.no_grad():
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits
    return (logits[0, len(prompt) - 1 : -1].double() / TEMPERATURE).log_softmax(-1)


def test_nll_and_kl_are_those_of_plain_transformers(job, model, watched, tmp_path) -> None:
    words = (f"collector.temperature={TEMPERATURE}", "optim.lr=0.05")
    Training(job(*words)).train(RunFolder(tmp_path / "run"))
    (run,) = find_runs([str(tmp_path / "run")]).runs
    own = trained_answers(run, 4, 3, tmp_path / "own.npz", 2)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    nll, kl, tokens = [], [], []
    for policy, batch, *_ in watched:
        mask = response_mask(batch)
        prompts, width = batch["tokens", "prompt"], batch["tokens", "prompt"].shape[1]
        asked = batch["masks", "all_attention_mask"][:, :width]
        for prompt, real, response, said in zip(
            prompts, asked, batch["tokens", "response"], mask, strict=True
        ):
            given, answer = prompt[real.bool()], response[said]
            of_policy, of_base = (table(m, given, answer) for m in (policy, plain))
            nll.append(-float(of_base.gather(1, answer[:, None]).sum()))
            kl.append(float((of_policy.exp() * (of_policy - of_base)).sum()))
            tokens.append(len(answer))
    assert own.nll.ravel() == pytest.approx(nll, abs=1e-4)
    assert own.kl.ravel() == pytest.approx(kl, abs=1e-4)
    assert own.tokens.ravel().tolist() == tokens
    assert min(kl) > 1e-3  # the run has learned
    assert own.proxy.shape == own.gold.shape == (4, 3)


def test_the_base_is_no_nats_away_and_its_answers_are_kept(model, monkeypatch, tmp_path) -> None:
    words = [*QUICK, f"actor.model={model}"]
    path = tmp_path / "base.npz"
    first = base_answers(words, 4, 3, 0, path, 2)
    assert not first.kl.any()
    assert (first.nll > 0).all()
    monkeypatch.setattr(answers, "_answers", None)
    again = base_answers(words, 4, 3, 0, path, 2)
    assert all(np.array_equal(value, asdict(again)[name]) for name, value in asdict(first).items())
    with pytest.raises(SystemExit, match="delete it"):
        base_answers([*words, "collector.max_new_tokens=5"], 4, 3, 0, path, 2)
