"""Several rewards with weights; what a reward function may ask for; a classifier as reward."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from klrl.base.errors import ConfigError, RewardError
from klrl.language.data.prompts import Prompt
from klrl.language.data.rewards import Extras, Reward, find_reward
from klrl.language.data.tasks import WeightedRewards, labels
from klrl.language.run.verify import verify_run
from klrl.runs.folder import RunFolder
from klrl.train.loop import Training
from tests.runs.commands import rows_of, samples_of
from tests.transforms import llm_toys as toys

PROMPTS = [Prompt(str(i), {"answer": str(i)}, f"line {i}") for i in range(3)]
TEXTS = ["0", "11", "222"]
REWARD_EXTRAS = Extras(
    truncated=[False, True, False],
    prompt_ids=[[5], [6, 6], [7]],
    response_ids=[[1, 2], [3], [4, 4, 2]],
)


def test_a_function_gets_what_its_parameters_name() -> None:
    got = {}

    def score(prompts, responses, rows, lengths, *, truncated, response_ids, prompt_ids=None):
        got.update(lengths=lengths, truncated=truncated, ids=response_ids, prompt=prompt_ids)
        return [float(length) for length in lengths]

    assert Reward("mine:score", 5.0, score)(PROMPTS, TEXTS, REWARD_EXTRAS).tolist() == [2, 1, 3]
    assert got == {
        "lengths": [2, 1, 3],  # the EOS counts
        "truncated": [False, True, False],
        "ids": [[1, 2], [3], [4, 4, 2]],
        "prompt": [[5], [6, 6], [7]],
    }


def test_any_keywords_are_all_of_them() -> None:
    got = {}

    def score(prompts, responses, rows, **more):
        got.update(more)
        return [0.0] * 3

    Reward("mine:score", None, score)(PROMPTS, TEXTS, REWARD_EXTRAS)
    assert set(got) == {"truncated", "lengths", "prompt_ids", "response_ids", "device"}
    assert got["device"] == torch.device("cpu")


def test_a_sum_that_float32_cannot_hold_is_told_by_its_sample() -> None:
    total = WeightedRewards(["exact", "proxy"], [3e38, 3e38], None)
    parts = {"exact": torch.tensor([0.0, 1.0]), "proxy": torch.tensor([1.0, 1.0])}
    with pytest.raises(
        RewardError, match=r"env.reward_weights=\[3e\+38, 3e\+38\]: .* sample 1 of 2"
    ):
        total.total(parts)


def test_a_sample_that_fails_alone_is_called_with_what_is_its_own() -> None:
    def score(prompts, responses, rows, lengths):
        assert len(lengths) == len(responses)
        return [1 / (length - 1) for length in lengths]

    with pytest.raises(RewardError, match="sample 1 of 3 .line 1, response '11'.: raised ZeroDiv"):
        Reward("mine:score", None, score)(PROMPTS, TEXTS, REWARD_EXTRAS)


def test_an_unknown_parameter_is_refused_when_the_function_is_found() -> None:
    Path("asks_reward.py").write_text("def score(prompts, responses, rows, tokens): ...\n")
    with pytest.raises(ConfigError, match="it may also have truncated, lengths, prompt_ids, resp"):
        find_reward("asks_reward:score")


FUNCTIONS = (
    "def length(prompts, responses, rows, lengths):\n"
    "    return [float(n) for n in lengths]\n"
    "def cut(prompts, responses, rows, truncated):\n"
    "    return [-1.0 * t for t in truncated]\n"
)


def test_the_score_is_the_weighted_sum_and_parts_are_recorded(job) -> None:
    Path("parts_reward.py").write_text(FUNCTIONS)
    names = "env.reward=[parts_reward:length,parts_reward:cut,exact]"
    Training(job(names, "env.reward_weights=[0.5,2,1]")).train(RunFolder(Path("run")))
    for row in rows_of(Path("run")):
        length, cut = row["reward/part/length"], row["reward/part/cut"]
        assert length == pytest.approx(row["reward/episode_length"])
        assert cut == pytest.approx(-row["reward/truncated"])
        assert row["reward/part/exact"] == pytest.approx(row["reward/gold"])
        total = 0.5 * length + 2 * cut + row["reward/part/exact"]
        assert row["reward/episode"] == pytest.approx(total, abs=1e-6)
    scored = [json.loads(line) for line in Path("run/samples.jsonl").read_text().splitlines()]
    scored = [sample for sample in scored if "reward" in sample]
    assert len(scored) == 8
    for sample in scored:
        parts = sample["rewards"]
        assert parts["length"] == len(sample["response_ids"])
        assert parts["cut"] == -sample["truncated"]
        assert sample["reward"] == 0.5 * parts["length"] + 2 * parts["cut"] + parts["exact"]


def odd_rows(prompts, responses, rows):
    return [float(row["answer"]) if int(row["answer"]) % 2 else None for row in rows]


def few_rows(prompts, responses, rows):
    return [10.0 if int(row["answer"]) < 2 else None for row in rows]


def test_none_is_not_mine_where_there_are_several_functions() -> None:
    rewards = WeightedRewards(["exact", "proxy"], [2.0, 3.0], None)
    names = ("odd", "few")
    functions = (odd_rows, few_rows)
    rewards._rewards = {
        n: Reward(n, 5.0, f, abstains=True) for n, f in zip(names, functions, strict=True)
    }
    parts = rewards.parts(PROMPTS[:2], TEXTS[:2])
    assert str(parts["odd"].tolist()) == "[nan, 1.0]"
    assert rewards.total(parts).tolist() == [30.0, 32.0]
    with pytest.raises(RewardError, match="sample 2 of 3 .line 2.*each function .* None"):
        rewards(PROMPTS, TEXTS)
    for abstains in (True, False):  # NaN is a fault of the function
        nan = Reward("mine:nan", 5.0, lambda *_: [float("nan")], abstains=abstains)
        with pytest.raises(RewardError, match="returned nan"):
            nan(PROMPTS[:1], TEXTS[:1])


@pytest.mark.integration
def test_means_and_samples_leave_out_what_a_function_left_out(exits) -> None:
    text = "".join(
        f"def {name}(prompts, responses, rows):\n"
        f"    return [{value} if len(row['digits']) % 2 == {rest} else None for row in rows]\n"
        for name, value, rest in (("odd", 4.0, 1), ("even", 1.0, 0), ("never", 0.0, 2))
    )
    Path("kinds.py").write_text(text)
    words = ("env.reward=[kinds.py:odd,kinds.py:even,kinds.py:never]", "env.shortest=2")
    code, _, err = exits(*words)
    assert (code, err) == (0, "")
    for row in rows_of(Path("run")):
        assert "reward/part/never" not in row
        assert {row.get("reward/part/odd", 4.0), row.get("reward/part/even", 1.0)} == {4.0, 1.0}
        assert 1.0 <= row["reward/episode"] <= 4.0
    samples = [s for s in samples_of(Path("run")) if "rewards" in s]
    assert {str(s["rewards"]) for s in samples} == {
        "{'odd': 4.0, 'even': None, 'never': None}",
        "{'odd': None, 'even': 1.0, 'never': None}",
    }
    assert verify_run("run").problems == []


def test_rewards_of_one_name_are_told_apart() -> None:
    for name in ("a_reward", "b_reward"):
        Path(f"{name}.py").write_text("def score(prompts, responses, rows): return [1.0] * 3\n")
    both = WeightedRewards(["a_reward:score", "b_reward:score"], [2.0, 3.0], None)
    assert list(both.parts(PROMPTS, TEXTS, REWARD_EXTRAS)) == ["a_reward.score", "b_reward.score"]
    assert both(PROMPTS, TEXTS, REWARD_EXTRAS).tolist() == [5.0] * 3


def test_a_full_name_that_is_anothers_short_name_is_told_apart() -> None:
    full = ["model.a.score", "a.score", "b.score"]
    assert labels(["model:a.score", "a:score", "b:score"]) == full
    assert labels(["model:a.score", "exact"]) == ["a.score", "exact"]


def classifier(kind: str, pad: int | None = None, labels: int = 1) -> Path:
    """A random sequence classifier with a tokenizer, in a folder of save_pretrained."""
    torch.manual_seed(0)
    size = {"vocab_size": len(toys.tokenizer()), "hidden_size": 16, "num_hidden_layers": 2}
    size |= {"num_attention_heads": 2, "intermediate_size": 32, "num_labels": labels}
    if kind == "llama":
        model = LlamaForSequenceClassification(LlamaConfig(**size, max_position_embeddings=64))
    elif kind == "qwen2":
        size |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
        model = Qwen2ForSequenceClassification(Qwen2Config(**size))
    else:
        model = BertForSequenceClassification(BertConfig(**size, max_position_embeddings=64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    model.config.pad_token_id = pad
    model.save_pretrained("classifier")
    toys.tokenizer().save_pretrained("classifier")
    return Path("classifier")


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


ASKED = [
    *(Prompt(text, {}, "line") for text in ("hello, ", "sort the digits ", "one")),
    *(Prompt(chat(text), {}, "line") for text in ("three", "how are you", "sort one two")),
]
# Qwen2's rules, which AutoTokenizer prefers to those of the folder, would join e and its accent.
ANSWERS = ["how are you?", "one", "", "four", "I am fine, thank you.", "one e\u0301"]


@pytest.mark.parametrize(
    ("kind", "pad"),
    [("llama", None), ("llama", 0), ("llama", 2), ("qwen2", 0), ("bert", 0)],
    ids=str,
)
def test_a_classifiers_scores_are_those_of_plain_transformers(kind, pad) -> None:
    folder = classifier(kind, pad)
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer, expected = toys.tokenizer(), []
    for prompt, answer in zip(ASKED, ANSWERS, strict=True):
        if isinstance(prompt.content, str):
            ids = tokenizer(prompt.content + answer)["input_ids"]
        else:
            turns = [*prompt.content, {"role": "assistant", "content": answer}]
            ids = tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
        with torch.no_grad():
            expected.append(float(plain(torch.tensor([ids])).logits[0, 0]))
    found = Reward("model:classifier", 60.0)(ASKED, ANSWERS)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert found.std() > 0.01  # else any answer would do


def test_a_classifier_may_keep_the_head_of_a_language_model() -> None:
    folder = classifier("llama")
    plain = find_reward(f"model:{folder}")(["hello, "], ["one"], [{}])
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.ones_like(weights["model.embed_tokens.weight"])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(find_reward(f"model:{folder}")(["hello, "], ["one"], [{}]), plain)


def test_a_classifier_in_bfloat16_scores_in_float32() -> None:
    """Its logits near 12 would come in steps of .06."""
    folder = classifier("llama")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)("one two")["input_ids"]
    with torch.no_grad():
        expected = float(plain(torch.tensor([ids])).logits[0, 0])
    found = Reward("model:classifier", None)([Prompt("one ", {}, "line")], ["two"])
    assert float(found[0]) == pytest.approx(expected, abs=1e-6)


def test_a_classifier_without_template_is_refused_where_prompts_are_conversations() -> None:
    classifier("llama")
    for file in Path("classifier").glob("chat_template*"):
        file.unlink()
    file = Path("classifier/tokenizer_config.json")
    kept = {k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}
    file.write_text(json.dumps(kept))
    reward = WeightedRewards(["model:classifier"], None, None)
    reward.prepare(chat=False)
    with pytest.raises(ConfigError, match="env.reward=model:classifier: its tokenizer has no chat"):
        reward.prepare(chat=True)


def test_a_folder_called_model_is_no_module_of_the_users(monkeypatch) -> None:
    Path("model").mkdir()
    monkeypatch.syspath_prepend(".")
    with pytest.raises(ConfigError, match="env.reward=model:nowhere: no such folder"):
        find_reward("model:nowhere")


def test_a_text_that_is_too_long_for_the_classifier_is_told_by_its_sample() -> None:
    classifier("llama")
    with pytest.raises(RewardError, match="sample 1 of 2 .*tokens, more than the classifier's 64"):
        Reward("model:classifier", None)(ASKED[:2], ["one", "one two " * 60])


def _two_labels() -> None:
    classifier("llama", labels=2)


def _pickled() -> None:
    classifier("llama")
    Path("classifier/model.safetensors").rename("classifier/pytorch_model.bin")


def _remote() -> None:
    classifier("llama")
    file = Path("classifier/config.json")
    config = json.loads(file.read_text()) | {"auto_map": {"AutoModel": "x.Y"}, "model_type": "odd"}
    file.write_text(json.dumps(config))


def _spoilt(file: str, **values: object) -> Callable[[], None]:
    def make() -> None:
        path = classifier("llama") / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **values} if values else None))

    return make


def _truncated() -> None:
    _spoilt("config.json", num_hidden_layers=1)()


def _causal() -> None:
    model = toys.network("llama")
    model.config.num_labels = 1
    model.save_pretrained("classifier")
    toys.tokenizer().save_pretrained("classifier")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: None, "no such folder"),
        (_two_labels, "has 2 labels; give a sequence classifier with one"),
        (_pickled, "its weights are pickled ("),
        (_remote, "model type `odd`"),
        (_causal, "its files lack 1 weight (score.weight"),
        (_truncated, "its files have 9 weights that its config.json leaves out (model.layers.1."),
        (_spoilt("config.json", hidden_size="abc"), "'hidden_size' expected int, got str"),
        (_spoilt("config.json"), "classifier: cannot be read ("),
        (_spoilt("config.json", hidden_act="nope"), "its weights cannot be read (KeyError: 'nope'"),
    ],
    ids=["missing", "labels", "pickle", "remote", "causal", "layers", "type", "null", "act"],
)
def test_a_folder_that_is_no_reward_model_is_refused_before_anything_is_written(
    exits, capsys, make, told
) -> None:
    make()
    capsys.readouterr()
    code, _, err = exits("env.reward=model:./classifier")
    assert (code, len(err.splitlines())) == (2, 1), err
    assert "env.reward=model:./classifier" in err
    assert told in err
    assert not Path("run").exists()
