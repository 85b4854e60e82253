"""Reward functions: how they are found, called and reported by sample; time limits and Ctrl-C."""

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from klrl.base.errors import ConfigError, RewardError
from klrl.doctor.user_loss import load
from klrl.language.data.prompts import Prompt
from klrl.language.data.rewards import Extras, Reward, find_reward, response_texts
from tests.transforms import llm_toys as toys

PROMPTS = [Prompt(str(i), {"answer": str(i), "digits": str(i)}, f"line {i}") for i in range(5)]
TEXTS = ["0", "1", "x", "3", "4"]


def reward(function, timeout: float | None = 5.0) -> Reward:
    return Reward("mine:score", timeout, function)


def failure(function, timeout: float | None = 5.0) -> str:
    """The one line about a function that fails."""
    with pytest.raises(RewardError) as caught:
        reward(function, timeout)(PROMPTS, TEXTS)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("env.reward=mine:score: ")
    return str(caught.value)


def module(name: str, text: str) -> str:
    Path(f"{name}.py").write_text(text)
    return name


def test_a_function_is_found_in_the_current_folder() -> None:
    module("found_reward", "def score(prompts, responses, rows):\n    return [2.0] * len(rows)\n")
    scores = Reward("found_reward:score", 5.0)(PROMPTS, TEXTS)
    assert scores.tolist() == [2.0] * 5


def test_a_function_is_found_by_its_file_as_well() -> None:
    """As ``klrl doctor --loss`` finds a loss; a file is run once, and may have any name."""
    Path("lib").mkdir()
    Path("lib/neighbour.py").write_text("SCORE = 3.0\n")
    text = "from neighbour import SCORE\ndef score(p, t, rows): return [SCORE] * len(rows)\n"
    Path("lib/my-reward.py").write_text(text)
    one, again = find_reward("lib/my-reward.py:score"), find_reward("lib/my-reward.py:score")
    assert one is again
    assert Reward("lib/my-reward.py:score", 5.0)(PROMPTS, TEXTS).tolist() == [3.0] * 5
    assert load("--loss", "lib/my-reward.py:score") is one
    module("by_name", "def score(prompts, responses, rows): ...\n")
    assert load("--loss", "by_name:score") is find_reward("by_name:score")


def test_a_row_without_an_answer_is_told_by_its_sample() -> None:
    with pytest.raises(RewardError, match="sample 1 of 2 .line 7.*KeyError: 'answer'"):
        Reward("exact", 5.0)([PROMPTS[0], Prompt("p", {}, "line 7")], ["0", "1"])


@pytest.mark.parametrize(
    "name, told",
    [
        ("exat", "choose exact, proxy, followed or followed_share, or name a function"),
        ("mod:", "choose exact, proxy, followed or followed_share"),
        ("no_such_module:f", "importing no_such_module fails .ModuleNotFoundError"),
        ("broken_reward:f", "importing broken_reward fails .ZeroDivisionError"),
        ("broken_reward.py:f", "importing broken_reward.py fails .ZeroDivisionError"),
        ("nowhere/mine.py:f", "no such file nowhere/mine.py; fix the path"),
        ("exiting_reward:f", "importing exiting_reward fails .SystemExit"),
        ("short_reward:f", "short_reward has no f;"),
        ("short_reward:number", "is of type int; name a class or a function"),
        ("short_reward:two", "cannot be called as two.prompts, responses, rows"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name: str, told: str) -> None:
    module("broken_reward", "1 / 0\n")
    module("exiting_reward", "import sys\nsys.exit('bye')\n")
    module("short_reward", "number = 3\ndef two(prompts, responses): ...\n")
    with pytest.raises(ConfigError, match=f"env.reward={name}: .*{told}") as caught:
        find_reward(name)
    assert "\n" not in str(caught.value)


def test_the_function_gets_prompts_responses_and_rows() -> None:
    got = []

    def score(prompts, responses, rows):
        got.append((prompts, responses, rows))
        return [0.0] * len(rows)

    reward(score)(PROMPTS, TEXTS)
    assert got == [(list("01234"), TEXTS, [prompt.row for prompt in PROMPTS])]


@pytest.mark.parametrize(
    "returned",
    [
        [0, 1, 2, 3, 4],
        (0.0, 1.0, 2.0, 3.0, 4.0),
        np.arange(5),
        torch.arange(5.0, requires_grad=True),
        torch.arange(5)[:, None],
        [False, True, 2, 3, 4],
    ],
)
def test_lists_arrays_and_tensors_are_scores(returned) -> None:
    scores = reward(lambda *_: returned)(PROMPTS, TEXTS)
    assert scores.tolist() == [0, 1, 2, 3, 4]
    assert scores.dtype == torch.float32
    assert not scores.requires_grad


def test_a_function_that_changes_what_it_gets_changes_no_data() -> None:
    """Rows and conversations are copied deep in every call."""
    turns = [{"role": "user", "content": "3 1"}]
    prompts = [Prompt(turns, {"messages": turns, "tags": ["a"], "answer": "1 3"}, "line 1")]

    def score(prompts, responses, rows):
        prompts[0][0]["content"] = "?"
        rows[0]["tags"].append("seen")
        return [float(rows[0].pop("answer") == "1 3")]

    scores = reward(score)
    for _ in range(3):
        assert scores(prompts, ["x"]).tolist() == [1.0]
    kept = [{"role": "user", "content": "3 1"}]
    assert prompts[0].content == kept
    assert prompts[0].row == {"messages": kept, "tags": ["a"], "answer": "1 3"}


def test_what_it_asks_for_is_a_copy_too() -> None:
    def score(prompts, responses, rows, response_ids):
        response_ids[0].clear()
        return [0.0]

    drawn = Extras([False], [[1]], [[2, 3]])
    reward(score)(PROMPTS[:1], ["x"], drawn)
    assert drawn.response_ids == drawn[0].response_ids == [[2, 3]]


def raises_on_x(prompts, responses, rows):
    return [float(text) for text in responses]


def test_the_sample_that_raises_is_named() -> None:
    told = failure(raises_on_x)
    assert "sample 2 of 5 (line 2, response 'x'): raised ValueError: could not convert" in told


def test_a_failure_of_the_whole_batch_alone_says_so() -> None:
    def score(prompts, responses, rows):
        if len(responses) > 1:
            raise RuntimeError("two\nlines")
        return [0.0]

    assert failure(score).endswith(
        "raised RuntimeError: two lines on 5 samples in one batch; each sample alone succeeds"
    )


def test_a_function_that_exits_ends_no_run() -> None:
    assert "raised SystemExit: 3" in failure(lambda *_: sys.exit(3))
    assert "raised SystemExit: 3" in failure(lambda *_: sys.exit(3), timeout=None)


@pytest.mark.parametrize("timeout", [5.0, None])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("half"), "ValueError: half (line "),
        (asyncio.CancelledError(), "CancelledError (line "),
        (GeneratorExit("x"), "GeneratorExit: x"),
        (SystemExit(0), "SystemExit: 0"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_whatever_it_raises_is_told_by_its_sample(error, told: str, timeout: float | None) -> None:
    """Also where it is a generator."""

    def raises(prompts, responses, rows):
        raise error

    def generates(prompts, responses, rows):
        yield 0.0
        raise error

    for function in (raises, generates):
        assert f"sample 0 of 5 (line 0, response '0'): raised {told}" in failure(function, timeout)


def test_a_generator_that_hangs_is_stopped() -> None:
    def hangs(prompts, responses, rows):
        for text in responses:
            if text == "x":
                time.sleep(60)
            yield 0.0

    start = time.monotonic()
    assert "sample 2 of 5 (line 2, response 'x'): took more than 0.3 s" in failure(hangs, 0.3)
    assert time.monotonic() - start < 5
    scores = reward(lambda prompts, responses, rows: (float(i) for i in range(5)))
    assert scores(PROMPTS, TEXTS).tolist() == [0, 1, 2, 3, 4]


class Slow:
    """A score whose number never comes."""

    def __float__(self) -> float:
        time.sleep(60)
        return 0.0


def test_the_limit_holds_for_what_it_returns() -> None:
    start = time.monotonic()
    assert "took more than 0.3 s" in failure(lambda p, responses, r: [Slow()] * len(responses), 0.3)
    assert time.monotonic() - start < 5


def one(value: object) -> list[object]:
    """Scores of which the second is this one."""
    return [0.0, value, 0.0, 0.0, 0.0]


SECOND = "sample 1 of 5 (line 1, response '1'): returned "


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        *((one(float(x)), f"{SECOND}{x}") for x in ("nan", "inf", "-inf")),
        (one(None), f"{SECOND}None, not a number"),
        (one("0.5"), f"{SECOND}'0.5', not a number"),
        (one(np.str_("0.5")), f"{SECOND}np.str_('0.5'), not a number"),
        (one(b"1"), f"{SECOND}b'1', not a number"),
        (one([1.0, 2.0]), f"{SECOND}[1.0, 2.0], not a number"),
        (one(10**400), f"{SECOND}an int, too large for float32"),
        (one(1e39), f"{SECOND}1e+39, too large for float32"),
        ([0.0] * 4, "returned 4 scores for 5 samples"),
        (np.zeros(6), "returned 6 scores for 5 samples"),
        (None, "returned NoneType, not a list of 5 numbers"),
        (1.0, "returned float, not a list of 5 numbers"),
        (torch.tensor(1.0), "returned Tensor, not a list of 5 numbers"),
        ("01234", "returned str, not a list of 5 numbers"),
        (dict.fromkeys(range(5), 1.0), "returned dict, not a list of 5 numbers"),
        (set(range(5)), "returned set, not a list of 5 numbers"),
    ],
    ids=range(18),
)
def test_what_is_no_list_of_numbers_is_told(returned, told: str) -> None:
    for timeout in (5.0, None):
        assert failure(lambda *_: returned, timeout).endswith(told)


def test_the_sample_that_hangs_is_named_in_about_two_limits() -> None:
    def score(prompts, responses, rows):
        if "x" in responses:
            time.sleep(60)
        return [0.0] * len(responses)

    start = time.monotonic()
    told = failure(score, timeout=0.3)
    assert "sample 2 of 5 (line 2, response 'x'): took more than 0.3 s on the batch; hangs" in told
    assert time.monotonic() - start < 3


def test_a_batch_that_is_only_slow_accuses_no_sample() -> None:
    calls = []

    def score(prompts, responses, rows):
        calls.append(len(responses))
        time.sleep(0.2 * len(responses))
        return [0.0] * len(responses)

    assert failure(score, 0.5) == "env.reward=mine:score: took more than 0.5 s on 5 samples"
    assert calls.count(1) < 5  # looking for one to blame has a limit too


def test_without_a_limit_the_function_runs_on_the_main_thread() -> None:
    threads = []

    def score(prompts, responses, rows):
        threads.append(threading.current_thread())
        return [0.0] * len(responses)

    reward(score, timeout=None)(PROMPTS, TEXTS)
    reward(score, timeout=5.0)(PROMPTS, TEXTS)
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()
    assert threads[1].daemon


def test_a_function_with_an_alarm_of_its_own_is_told_how_to_run() -> None:
    def score(prompts, responses, rows):
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.signal(signal.SIGALRM, before)
        return [0.0] * len(responses)

    assert "main thread" in failure(score)
    assert "env.reward_timeout=null calls it on the main thread" in failure(score)
    assert reward(score, timeout=None)(PROMPTS, TEXTS).tolist() == [0.0] * 5


def test_ctrl_c_gets_through_a_function_that_hangs() -> None:
    def interrupt() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            reward(lambda *_: time.sleep(60), timeout=30.0)(PROMPTS, TEXTS)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_responses_lose_their_last_eos_and_nothing_else(pad_is_eos: bool) -> None:
    tokenizer = toys.tokenizer(pad_is_eos=pad_is_eos)
    eos = tokenizer.eos_token_id
    one, two = (tokenizer(word)["input_ids"][0] for word in ("o", "t"))
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    rows = [
        [one, two, eos],  # ended
        [one, two, one, two, one],  # truncated
        [one, start, eos],  # a special token inside
        [eos],  # ended at once
        [one, eos, two, eos],  # an earlier turn's EOS inside
    ]
    expected = ["ot", "ototo", "o<|im_start|>", "", "o<|im_end|>t"]
    assert response_texts(tokenizer, rows, (tokenizer.eos_token_id,)) == expected


TRL = """
def full(prompts, completions, completion_ids, answer, **kwargs):
    assert sorted(kwargs) == ["digits"], kwargs
    assert [len(ids) for ids in completion_ids] == [2] * len(completions)
    return [float(p + c == 2 * a) for p, c, a in zip(prompts, completions, answer)]

def part(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

def turns(completions, **kwargs):
    return [float(turn["role"] == "assistant") * len(turn["content"]) for [turn] in completions]
"""


def test_a_reward_function_of_trl_is_called_as_trl_calls_it() -> None:
    module("of_trl", TRL)
    ids = [[1, 2]] * 5
    extras = Extras([False] * 5, ids, ids)
    expected = [1.0, 1.0, 0.0, 1.0, 1.0]
    assert Reward("of_trl:full", 5.0)(PROMPTS, TEXTS, extras).tolist() == expected
    assert Reward("of_trl:part", 5.0)(PROMPTS, TEXTS).tolist() == expected
    chats = [Prompt([{"role": "user", "content": "?"}], {}, f"line {i}") for i in range(2)]
    assert Reward("of_trl:turns", 5.0)(chats, ["ab", "c"]).tolist() == [2.0, 1.0]


def test_a_function_without_a_signature_is_called_as_it_is(monkeypatch, tmp_path) -> None:
    """As some that are written in C or Rust."""
    monkeypatch.chdir(tmp_path)
    Path("native.py").write_text("score = max\n")
    function = find_reward("native.py:score")
    assert function([1], [2], [3]) == [3]
