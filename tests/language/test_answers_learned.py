"""``experiment=sft``: the likelihood of the data's answers, by the loop of every other run."""

import json
from pathlib import Path
from shutil import copytree

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from klrl.language.data.batch import SCORE
from klrl.language.data.prompts import parse_row, read_json_file
from klrl.language.data.sort_digits import SortDigits
from klrl.language.run.verify import verify_run
from klrl.losses.policy import PolicyLoss
from klrl.train.learner import Coefficients
from klrl.train.loop import Training
from tests.runs.commands import manifest_of, rows_of, timeless

ROWS = [SortDigits()(i) for i in range(24)]
#: Words over experiment=sort_digits, which the fixtures begin with.
SFT = (
    *("collector=answers", "loss=nll", "kl=none", "advantage.baseline=mean"),
    *("collector.group_size=1", "collector.prompts=8", "collector.max_new_tokens=12"),
)


def written(name: str = "rows.jsonl", *, messages: bool = False, **more: str) -> str:
    """The problems as rows with an answer, or as conversations that end with it."""
    lines = []
    for prompt in ROWS:
        turns = [dict(turn) for turn in prompt.content]
        answer = {"role": "assistant", "content": prompt.row["answer"]}
        plain = {"prompt": turns, "answer": prompt.row["answer"]}
        lines.append(json.dumps({"messages": [*turns, answer]} if messages else plain | more))
    Path(name).write_text("\n".join(lines), "utf-8")
    return name


def sft(*words: str, data: str = "rows.jsonl") -> tuple[str, ...]:
    return ("experiment=sft", "env.reward=exact", *SFT[3:], f"data={data}", *words)


def test_the_loss_is_that_of_transformers_with_masked_prompts(job, model) -> None:
    parts = Training(job(*SFT, "actor.dtype=float64", "learner.minibatches=1")).parts
    batch = parts.rollout(0).collect()
    parts.charge_kl(batch)
    parts.estimate_advantage(batch)
    steps = parts.learner.steps
    terms = steps.loss_terms(steps.lay_out(batch), Coefficients(0.1, 0.0, 0.0))
    plain = AutoModelForCausalLM.from_pretrained(model).double()
    tokenizer = AutoTokenizer.from_pretrained(model)
    losses, gradients, total = 0.0, [torch.zeros_like(p) for p in plain.parameters()], 0
    stream = parts.task.stream(tokenizer, None)
    for prompt in stream.take(8).prompts:
        turns = [dict(turn) for turn in prompt.content]
        head = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        tail = tokenizer(prompt.row["answer"], add_special_tokens=False)["input_ids"]
        tail = [*tail, tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(head) + tail])
        loss = plain(input_ids=torch.tensor([[*head, *tail]]), labels=labels).loss * len(tail)
        losses, total = losses + loss.item(), total + len(tail)
        for sum_, each in zip(
            gradients, torch.autograd.grad(loss, list(plain.parameters())), strict=True
        ):
            sum_ += each
    assert terms.total.item() == pytest.approx(losses / total, abs=1e-7)  # theirs in float32
    terms.total.backward()
    ours = dict(parts.policy.model.named_parameters())
    for (name, _), expected in zip(plain.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(ours[name].grad, expected / total, atol=1e-7, rtol=1e-5)


def test_the_held_out_likelihood_is_of_the_evaluation_split(job, model) -> None:
    parts = Training(job(*SFT)).parts
    plain, tokenizer = (
        kind.from_pretrained(model) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    losses, total = 0.0, 0
    for i in range(8):
        prompt = SortDigits(seed=0, split="eval")(i)
        turns = [dict(turn) for turn in prompt.content]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        tail = tokenizer(prompt.row["answer"], add_special_tokens=False)["input_ids"]
        tail = [*tail, tokenizer.eos_token_id]
        logits = plain(torch.tensor([[*ids, *tail]])).logits[0, len(ids) - 1 : -1]
        losses -= logits.log_softmax(-1)[range(len(tail)), tail].sum().item()
        total += len(tail)
    assert parts.held_out()["nll/held_out"] == pytest.approx(losses / total, rel=1e-5)


@pytest.mark.integration
def test_rows_and_conversations_learn_the_same_and_resume_to_the_bit(exits) -> None:
    written(), written("turns.jsonl", messages=True)
    assert exits(*sft("frames=32"))[0] == 0
    assert exits(*sft("frames=32", "hydra.run.dir=turns", data="turns.jsonl"))[0] == 0
    rows = timeless(rows_of(Path("run")))
    assert rows == timeless(rows_of(Path("turns")))
    assert rows[-1]["nll/held_out"] < rows[0]["nll/held_out"]
    assert rows[-1]["reward/raw"] > 0  # the data's answers are right: exact
    assert "reward/episode" not in rows[-1]
    assert exits(*sft("frames=16", "optim.lr_floor=0.01", "hydra.run.dir=part"))[0] == 0
    assert exits("resume=part", "frames=32")[0] == 0
    assert rows == timeless(rows_of(Path("part")))
    assert manifest_of(Path("part"))["status"] == "finished"
    assert verify_run("run").problems == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("collector.max_new_tokens=3",), "collector.max_new_tokens=3: env.data=rows.jsonl line 1"),
        (
            ("collector.group_size=2",),
            "collector.group_size=2: a row has one answer; drop it",
        ),
        *(
            (
                ("loss=custom", "loss.target=a:B", word),
                f"{word}: a row has one answer, so the advantage is NaN",
            )
            for word in ("advantage.baseline=normalized", "advantage.baseline=leave_one_out")
        ),
        (("loss=clip",), "loss=clip: collector=answers reads actions that another policy chose"),
        (("kl=retrieve",), "kl=retrieve: is estimated from the policy's own actions"),
        (("data=none.jsonl",), "env.data=none.jsonl: No such file"),
    ],
)
def test_answers_that_cannot_be_learned_are_refused(words, says, exits) -> None:
    written()
    code, _, error = exits(*sft(*words))
    assert code == 2
    assert says in error
    assert not Path("run").exists()


def test_a_row_without_an_answer_is_refused(exits) -> None:
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(4)), "utf-8")
    code, _, error = exits(*sft("env.reward=tests.language.test_answers_learned:zero"))
    assert (code, "line 1: has no answer to learn" in error) == (2, True)
    code, _, error = exits(*sft())
    assert code == 2
    assert "env.reward=exact: env.data=rows.jsonl line 1 has no answer" in error
    assert not Path("run").exists()


def test_an_answer_that_differs_from_the_last_turn_is_not_learned(exits) -> None:
    turn = {"role": "assistant", "content": "01569"}
    rows = [
        {"messages": [{"role": "user", "content": asked}, turn], "answer": answer}
        for asked, answer in (("10569", "01569"), ("15690", "7"))
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    code, _, error = exits(*sft())
    assert code == 2
    assert 'env.data=rows.jsonl line 2: its answer is "7", but the assistant' in error
    assert 'last turn is "01569"; drop one of the two' in error
    assert not Path("run").exists()
    prompts = read_json_file("rows.jsonl")
    assert [each.row["answer"] for each in prompts] == ["01569", "7"]  # rewards read it


def test_a_null_answer_is_none() -> None:
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    assert parse_row({"messages": turns, "answer": None}, "row").row["answer"] == "2"


def test_a_custom_loss_hears_that_the_advantage_of_a_single_answer_is_0(job) -> None:
    written()
    own = "loss.target=tests.language.test_answers_learned:Weighted"
    parts = Training(job(*sft(), "loss=custom", own)).parts
    batch = parts.rollout(0).collect()
    parts.charge_kl(batch)
    parts.estimate_advantage(batch)
    assert batch[SCORE].any()
    assert not batch["advantage"].any()
    (line,) = (line for line in parts.preflight if line.startswith("loss=custom"))
    assert "advantage=group gives 0" in line


class Weighted(PolicyLoss):
    """The likelihood of the answers, each weighted by its advantage."""

    def gain(self, scored, advantage, beta):
        return scored.log_prob * advantage


def zero(prompts, responses, rows):
    return [0.0] * len(responses)


def test_a_last_turn_of_the_assistants_is_the_answer() -> None:
    written("turns.jsonl", messages=True)
    (first, *_) = read_json_file("turns.jsonl")
    assert first.content == [dict(turn) for turn in ROWS[0].content]
    assert first.row["answer"] == ROWS[0].row["answer"]


def ends_with_any(model: str, eos: str = "<unk>") -> str:
    """The model, of a tokenizer with another EOS than the template; it lists both as ends."""
    copytree(model, "several")
    for file, words in (
        ("tokenizer_config", {"eos_token": eos}),
        ("generation_config", {"eos_token_id": [1, 3]}),
    ):
        path = Path("several", f"{file}.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), **words}))
    return "actor.model=several"


def test_an_answer_ends_as_the_template_ends_a_turn(job, model) -> None:
    written("turns.jsonl", messages=True)
    Path("texts.jsonl").write_text('{"prompt": "531", "answer": "135"}\n' * 8, "utf-8")
    several = ends_with_any(model)
    tokenizer = AutoTokenizer.from_pretrained("several")
    parts = Training(job(*sft(several, data="turns.jsonl"))).parts
    batch = parts.rollout(0).collect()
    prompts = parts.task.stream(tokenizer, None).take(8).prompts
    real = batch["masks", "all_attention_mask"].bool()
    tokens = torch.cat([batch["tokens", "prompt"], batch["tokens", "response"]], 1)
    for row, kept, prompt in zip(tokens, real, prompts, strict=True):
        turns = [*prompt.content, {"role": "assistant", "content": prompt.row["answer"]}]
        whole = tokenizer.apply_chat_template(turns, return_dict=False)
        assert row[kept].tolist() == whole[:-1], "but for the newline after the turn"
    batch = (
        Training(job(*sft(several, "env.eval_share=0", data="texts.jsonl")))
        .parts.rollout(0)
        .collect()
    )
    assert batch["tokens", "response"].tolist() == [[9, 11, 13, 1]] * 8, "the tokenizer's EOS"
