"""Generated instructions and the functions that verify answers to them."""

import pytest

from klrl.language.data.instructions import (
    MOST_WORDS,
    TOPICS,
    Instructions,
    followed,
    followed_share,
    parts,
    topics,
)

ROW = {"topic": "sea", "words": 8}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("The sea is a vast body of water.", (True, True, True)),
        ("Is the sea not salt water?", (True, True, True)),
        ("The sea\u2019s waves are wide and blue!", (True, True, True)),
        ("Mother-of-pearl comes from the seas.", (True, True, True)),
        (" The sea is wide. ", (True, True, True)),
        ("The sea is a vast body of salt water.", (True, False, True)),  # nine words
        ("The ocean is a vast body of water.", (True, True, False)),
        ("The season is long and cold.", (True, True, False)),
        ("the sea is wide.", (False, True, True)),  # no capital
        ("The sea is wide", (False, True, True)),  # cut off
        ("The sea. It is wide.", (False, True, True)),
        ("The sea...", (False, False, True)),
        ("Sea.", (False, False, True)),
        ("", (False, False, False)),
    ],
)
def test_parts_of_an_instruction(response, expected) -> None:
    assert parts(response, ROW) == expected
    assert followed([], [response], [ROW]) == [float(all(expected))]
    assert followed_share([], [response], [ROW]) == [pytest.approx(sum(expected) / 3)]


def test_an_instruction_is_fixed_by_its_number_and_says_what_is_verified() -> None:
    prompt = Instructions(seed=1)(7)
    assert prompt == Instructions(seed=1)(7)
    assert {Instructions(seed=1)(i).row["topic"] for i in range(50)} != {
        Instructions(seed=2)(i).row["topic"] for i in range(50)
    }
    said = prompt.content[-1]["content"]
    assert f"the {prompt.row['topic']} " in said
    assert f"at most {prompt.row['words']} words" in said
    assert {Instructions()(i).row["words"] for i in range(50)} == {*MOST_WORDS}


def test_no_topic_is_in_both_splits() -> None:
    train, held_out = topics("train"), topics("eval")
    assert sorted(train + held_out) == sorted({*TOPICS})
    assert 0.15 < len(held_out) / len(TOPICS) < 0.35
    assert all(Instructions(split="eval")(i).row["topic"] in held_out for i in range(100))
