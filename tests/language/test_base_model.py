"""The base model of ``env=sort_digits``: the files that klrl has, and the recipe that made them."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks import sort_digits_base as module
from benchmarks.sort_digits_base import (
    Recipe,
    make_model,
    make_tokenizer,
    sampled_accuracy,
)
from klrl.language.data.prompts import PromptStream
from klrl.language.data.sort_digits import BASE_MODEL, SortDigits
from klrl.language.model.pretrained import load_causal_lm
from tests.transforms import llm_toys as toys

#: A second's work: four updates of a model of a few thousand parameters.
QUICK = Recipe(hidden=16, layers=1, heads=2, batch=8, measure_every=4, measure_on=8, target=0.0)


def test_the_model_that_klrl_has_is_the_recipes() -> None:
    """As large, with its tokenizer; on problems that it has not seen, its reward is the target."""
    lm = load_causal_lm(BASE_MODEL, chat=True)
    built = json.loads((BASE_MODEL / "built.json").read_text())
    assert built["recipe"] == asdict(Recipe())
    assert lm.context == Recipe().context == 256
    # Tied embeddings; per layer q, k, v, o, then gate, up, down, then two norms; one last norm.
    by_hand = 18 * 96 + 3 * (4 * 96 * 96 + 3 * 96 * 256 + 2 * 96) + 96
    assert sum(p.numel() for p in lm.model.parameters()) == by_hand == built["parameters"]
    made = make_tokenizer()
    assert lm.tokenizer.get_vocab() == made.get_vocab()
    assert lm.tokenizer.chat_template == made.chat_template
    problems = PromptStream(SortDigits(seed=1, split="eval"), lm.tokenizer, None).take(512)
    torch.manual_seed(0)
    reward = sampled_accuracy(lm.model, lm.tokenizer, problems, 9)
    assert reward == pytest.approx(0.3, abs=0.06)  # three standard errors


@pytest.mark.parametrize("shots", [0, 2])
def test_the_loss_is_the_mean_over_all_answers_and_their_eos(shots: int) -> None:
    tokenizer, recipe = make_tokenizer(), replace(QUICK, batch=3, shots=shots)
    torch.manual_seed(0)
    model = make_model(recipe, tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    scores = []
    for index in range(3):
        problem = SortDigits(shots=shots)(index)
        ids = [2]
        for turn in (*problem.content, {"role": "assistant", "content": problem.row["answer"]}):
            ids += tokenizer(turn["role"] + "\n" + turn["content"])["input_ids"] + [3, 4, 2]
        ids = torch.tensor(ids[:-1])
        log_probs = toys.alone(model, ids)
        # An answer follows "assistant \n" (6, 4) and ends with its EOS (3).
        inside, answers = False, []
        for place, token in enumerate(ids.tolist()):
            if inside:
                answers.append(place)
                inside = token != 3
            elif token == 4 and ids[place - 1] == 6:
                inside = True
        assert len(answers) == len(problem.row["answer"]) + 1 + 6 * shots
        scores.append(log_probs[answers])
    loss = module._supervised_loss(model, *module._dialogues(recipe, tokenizer, 0))
    assert loss.item() == pytest.approx(-torch.cat(scores).mean().item(), abs=1e-5)
