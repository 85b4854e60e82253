"""``samples.jsonl``: token ids and log-probs, as plain transformers computes them from the ids."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from klrl.runs.folder import RunFolder
from klrl.train.callbacks import Callback
from klrl.train.loop import Training
from tests.runs.commands import samples_of

pytestmark = pytest.mark.integration

#: Half of a digit in the last place that is written, and float32.
CLOSE = 1e-5


@torch.no_grad()
def log_probs(model, sample: dict, temperature: float) -> torch.Tensor:
    """Log softmax(logits / T) over the vocabulary at each response token: one row, no padding."""
    ids = torch.tensor([sample["prompt_ids"] + sample["response_ids"]])
    logits = model(ids).logits[0].double() / temperature
    return logits.log_softmax(-1)[len(sample["prompt_ids"]) - 1 : -1]


def of_tokens(table: torch.Tensor, sample: dict) -> list[float]:
    return table.gather(1, torch.tensor(sample["response_ids"])[:, None]).squeeze(1).tolist()


class Weights(Callback):
    """Copies of the policy as each iteration draws from it, by samples so far."""

    def __init__(self) -> None:
        self.kept: dict[int, dict] = {}

    def started(self, training) -> None:
        self.keep(training)

    def iterated(self, training, row, batch) -> None:
        self.keep(training)

    def keep(self, training) -> None:
        state = training.parts.policy.model.state_dict()
        self.kept[training.counters.frames] = {n: v.clone() for n, v in state.items()}


@pytest.mark.parametrize(
    "words", [(), ("collector.temperature=0.7", "kl.placement=loss", "kl.estimator=exact")]
)
def test_ids_and_log_probs_of_samples_are_those_of_plain_transformers(job, model, words) -> None:
    config, weights = job(*words, "collector.samples_count=3"), Weights()
    Training(config).train(RunFolder(Path("run")), callbacks=[weights])
    temperature = config.collector.temperature
    policy, reference = (AutoModelForCausalLM.from_pretrained(model) for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(model)
    samples = samples_of(Path("run"))
    assert [(s["iteration"], s["samples"], s["weights"]) for s in samples] == [
        *[(1, 16, 0)] * 3,
        *[(2, 32, 16)] * 3,
        *[(3, 48, 32)] * 3,  # drawn by the policy as it ends, learned from by nobody
    ]
    for sample in samples:
        assert tokenizer.convert_ids_to_tokens(sample["response_ids"]) == sample["tokens"]
        rendered = tokenizer.apply_chat_template(
            sample["prompt"], add_generation_prompt=True, return_dict=True
        )
        assert rendered["input_ids"] == sample["prompt_ids"]
        policy.load_state_dict(weights.kept[sample["weights"]])
        log_p, log_q = (log_probs(m, sample, temperature) for m in (policy, reference))
        assert sample["log_probs"] == pytest.approx(of_tokens(log_p, sample), abs=CLOSE)
        assert sample["ref_log_probs"] == pytest.approx(of_tokens(log_q, sample), abs=CLOSE)
        kl = (log_p.exp() * (log_p - log_q)).sum(1)
        assert sample["kl"] == pytest.approx(kl.tolist(), abs=CLOSE)
        assert ("reward" in sample) == (sample["iteration"] < 3)
    # With weights that move, a log-prob of one iteration is no other's.
    assert samples[3]["log_probs"] != pytest.approx(samples[3]["ref_log_probs"], abs=1e-3)


def test_without_a_reference_there_are_the_policys_alone(job) -> None:
    Training(job("kl=none")).train(RunFolder(Path("run")))
    for sample in samples_of(Path("run")):
        assert len(sample["log_probs"]) == len(sample["response_ids"])
        assert not {"ref_log_probs", "kl"} & set(sample)
