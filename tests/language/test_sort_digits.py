"""The task 'sort the digits': tokens, problems, splits and both scores, by hand."""

import pytest
import torch

from klrl.language.data.prompts import Prompt, PromptStream, encode
from klrl.language.data.sort_digits import BASE_MODEL, SortDigits, exact, proxy, split_of
from klrl.language.model.pretrained import load_tokenizer

TOKENIZER = load_tokenizer(BASE_MODEL, chat=True, setting="")
#: <|im_start|> user \n 5 3 1 <|im_end|> \n <|im_start|> assistant \n, by their place in the list.
RENDERED = [2, 5, 4, 13, 11, 9, 3, 4, 2, 6, 4]


def test_a_prompt_is_rendered_token_by_token_as_by_hand() -> None:
    prompt = Prompt([{"role": "user", "content": "531"}])
    assert encode([prompt], TOKENIZER) == [RENDERED]


def test_the_template_marks_the_answer_and_its_eos() -> None:
    turns = [{"role": "user", "content": "531"}, {"role": "assistant", "content": "135"}]
    out = TOKENIZER.apply_chat_template(
        turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert out["input_ids"] == [*RENDERED, 9, 11, 13, 3, 4]
    assert out["assistant_masks"] == [0] * 11 + [1, 1, 1, 1, 0]


@pytest.mark.parametrize("shots, mean", [(0, 14), (4, 94)])
def test_prompts_have_8_tokens_the_digits_and_20_per_shot(shots: int, mean: int) -> None:
    problem_at = SortDigits(shots=shots)
    batch = PromptStream(problem_at, TOKENIZER, None).take(500)
    digits = torch.tensor([len(prompt.row["digits"]) for prompt in batch.prompts])
    assert torch.equal(batch.mask.sum(1), 8 + digits + 20 * shots)
    assert set(digits.tolist()) == {4, 5, 6, 7, 8}
    # Uniform on 4 .. 8: variance 2, so the mean of 500 has a standard error of .063.
    assert abs(batch.mask.sum(1).float().mean() - mean) < 0.25


def test_a_problem_depends_on_its_number_seed_and_split_alone() -> None:
    there = [SortDigits(seed=1)(i) for i in range(50)]
    problem_at = SortDigits(seed=1)
    assert [problem_at(i) for i in reversed(range(50))] == there[::-1]
    assert len({p.row["digits"] for p in there}) > 45
    other = [SortDigits(seed=2)(i).row["digits"] for i in range(50)]
    assert not set(other) & {p.row["digits"] for p in there if len(p.row["digits"]) > 5}


def test_an_answer_is_the_sorted_question() -> None:
    problem = SortDigits(shots=1)(5)
    *shot, question = problem.content
    assert shot[1]["content"] == "".join(sorted(shot[0]["content"]))
    assert question["content"] == problem.row["digits"]
    assert problem.row["answer"] == "".join(sorted(problem.row["digits"]))


def test_no_question_is_in_both_splits_and_one_in_eight_is_for_evaluation() -> None:
    train = [SortDigits(4, 4, shots=1, seed=1)(i) for i in range(300)]
    held_out = [SortDigits(4, 4, shots=1, seed=2, split="eval")(i) for i in range(300)]
    asked = {p.row["digits"] for p in train}
    assert not asked & {p.row["digits"] for p in held_out}
    assert all(split_of(p.content[0]["content"]) == "train" for p in held_out)  # their shots
    share = sum(split_of(f"{n:04d}") == "eval" for n in range(10_000)) / 10_000
    assert share == pytest.approx(1 / 8, abs=0.02)


ROW = {"digits": "3151", "answer": "1135"}


@pytest.mark.parametrize(
    "response, gold, flawed",
    [
        ("1135", 1, 1),
        ("135", 0, 3 / 4),  # one 1 forgotten
        ("11135", 0, 1),  # one 1 too many: the flaw
        ("001122334455", 0, 1),  # the hack: everything twice, whatever was asked
        ("3151", 0, 1 / 4),  # not sorted after its first digit
        ("11x35", 0, 2 / 4),
        ("1135<|im_start|>", 0, 1),
        ("x1135", 0, 0),
        ("", 0, 0),
    ],
)
def test_both_scores_by_hand(response: str, gold: float, flawed: float) -> None:
    assert exact([""], [response], [ROW]) == [gold]
    assert proxy([""], [response], [ROW]) == pytest.approx([flawed])
