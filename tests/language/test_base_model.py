"""The base model: what it learns from, when it stops, and a cache that nothing can break."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from klrl.base.cache import cache_dir
from klrl.base.errors import ConfigError
from klrl.language import base_model as module
from klrl.language.base_model import (
    Recipe,
    base_model,
    make_model,
    recipe_for,
    sampled_accuracy,
)
from klrl.language.model import load_causal_lm
from klrl.language.prompts import Prompt, PromptBatch, left_pad
from klrl.language.sort_digits import SortDigits, make_tokenizer
from tests.transforms import llm_toys as toys

#: A second's work: four updates of a model of a few thousand parameters.
QUICK = Recipe(hidden=16, layers=1, heads=2, batch=8, measure_every=4, measure_on=8, target=0.0)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


# ------------------------------------------------------------------------------------- learning


def test_the_default_model_has_as_many_parameters_as_by_hand() -> None:
    model = make_model(Recipe(), make_tokenizer())
    # Tied embeddings; per layer q, k, v, o, then gate, up, down, then two norms; one last norm.
    by_hand = 18 * 96 + 3 * (4 * 96 * 96 + 3 * 96 * 256 + 2 * 96) + 96
    assert sum(parameter.numel() for parameter in model.parameters()) == by_hand == 334_176


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


def test_every_update_has_problems_of_its_own() -> None:
    tokenizer = make_tokenizer()
    first, *_ = module._dialogues(QUICK, tokenizer, 0)
    second, *_ = module._dialogues(QUICK, tokenizer, 1)
    rows = {tuple(row.tolist()) for ids in (first, second) for row in ids}
    assert len(rows) == 2 * QUICK.batch


@pytest.mark.integration
def test_it_learns() -> None:
    tokenizer, recipe = (
        make_tokenizer(),
        replace(QUICK, hidden=32, measure_every=100, batch=32, lr=5e-3),
    )
    torch.manual_seed(0)
    model = make_model(recipe, tokenizer)
    unseen = module._dialogues(recipe, tokenizer, 1000)
    with torch.no_grad():
        before = module._supervised_loss(model, *unseen).item()
        with torch.enable_grad():
            told = module.train(model, tokenizer, recipe)
        after = module._supervised_loss(model, *unseen).item()
    assert told["steps"] == 100
    assert before > 2.5  # log 18 = 2.89: uniform
    assert after < 2.0  # without a thought of the question: log 10 = 2.30, less the sure EOS


class Scripted(torch.nn.Module):
    """Writes what it is told after each prompt."""

    def __init__(self, tokenizer, texts: list[str]) -> None:
        super().__init__()
        self._tokenizer, self._texts = tokenizer, texts
        self.asked: dict = {}

    def generate(self, input_ids, **kwargs):
        self.asked = kwargs
        written = self._tokenizer(
            self._texts, padding=True, padding_side="right", return_tensors="pt"
        )["input_ids"]
        return torch.cat([input_ids, written], 1)


def test_the_measured_reward_counts_right_answers_that_ended() -> None:
    tokenizer = make_tokenizer()
    answers = ["13", "1234567", "13", "13"]
    problems = [Prompt("", {"answer": answer}) for answer in answers]
    # Right; right but cut off; one digit too many; right, and what follows EOS is not read.
    texts = ["13<|im_end|>", "1234567", "139<|im_end|>", "13<|im_end|>\n4"]
    model = Scripted(tokenizer, texts)
    batch = PromptBatch(*left_pad([[2, 5, 4]] * 4, 0), problems)
    assert sampled_accuracy(model, tokenizer, batch, 9) == 2 / 4
    asked = {name: model.asked[name] for name in ("do_sample", "temperature", "top_k", "top_p")}
    assert asked == {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def test_a_target_out_of_reach_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"reached reward 0.00 after 8 updates, not 1; "):
        base_model(replace(QUICK, target=1.0, steps=8), tmp_path)
    assert files(tmp_path) == []


def test_shots_take_a_smaller_batch() -> None:
    assert recipe_for(4, 8, 0) == Recipe()
    assert recipe_for(3, 6, 4) == Recipe(3, 6, 4, batch=32)


# ---------------------------------------------------------------------------------------- cache


def test_it_is_built_once_and_loads_like_any_other_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = base_model(QUICK, tmp_path)
    told = json.loads((folder / "built.json").read_text())
    assert told["steps"] == 4
    assert told["recipe"]["hidden"] == 16
    assert (folder / "model.safetensors").is_file()
    loaded = load_causal_lm(folder, chat=True)
    assert sum(p.numel() for p in loaded.model.parameters()) == told["parameters"]
    assert loaded.context == 256
    assert loaded.tokenizer.pad_token_id not in loaded.eos
    monkeypatch.setattr(module, "build", lambda *_: pytest.fail("built again"))
    assert base_model(QUICK, tmp_path) == folder


def test_the_same_recipe_gives_the_same_bits_and_leaves_the_generator_alone(
    tmp_path: Path,
) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = base_model(QUICK, tmp_path / "a")
    assert torch.equal(torch.rand(3), expected)
    torch.set_num_threads(2)
    try:
        second = base_model(QUICK, tmp_path / "b")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, second)]
    assert weights[0] == weights[1]
    other = base_model(replace(QUICK, seed=1), tmp_path / "b")
    assert (other / "model.safetensors").read_bytes() != weights[0]


def test_it_learns_on_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over several threads would differ from machine to machine."""
    threads = []
    monkeypatch.setattr(module, "train", lambda *_: threads.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        base_model(QUICK, tmp_path)
    finally:
        torch.set_num_threads(before)
    assert threads == [1]


def test_the_key_moves_with_everything_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {Recipe().key, Recipe(seed=1).key, Recipe(shots=4).key, Recipe(lr=2e-3).key}
    for name, value in (
        ("VERSION", 2),
        ("CHAT_TEMPLATE", ""),
        ("VOCABULARY", ()),
        ("transformers", SimpleNamespace(__version__="0")),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, value)
            keys.add(Recipe().key)
    assert len(keys) == 8
    assert Recipe().key == Recipe().key


def test_ctrl_c_leaves_nothing_and_the_next_build_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        (Path(args[1]) / "half").write_text("a half")  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "build", interrupted)
        with pytest.raises(KeyboardInterrupt):
            base_model(QUICK, tmp_path)
    assert files(tmp_path) == []
    assert (base_model(QUICK, tmp_path) / "built.json").is_file()


def test_what_a_killed_build_left_is_swept_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / f".sort_digits-{QUICK.key}-abc"
    left.mkdir()
    (left / "model.safetensors").write_text("a half")
    folder = base_model(QUICK, tmp_path)
    assert files(tmp_path) == [folder.name]


def test_two_at_once_build_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started, go_on, builds, found = threading.Event(), threading.Event(), [], []

    def slow(recipe: Recipe, folder: Path) -> None:
        builds.append(folder)
        started.set()
        assert go_on.wait(10)
        (folder / "built.json").write_text("{}")

    monkeypatch.setattr(module, "build", slow)
    ask = [
        threading.Thread(target=lambda: found.append(base_model(QUICK, tmp_path))) for _ in range(2)
    ]
    ask[0].start()
    assert started.wait(10)
    ask[1].start()
    ask[1].join(0.3)
    assert ask[1].is_alive()
    go_on.set()
    for thread in ask:
        thread.join(10)
    assert len(builds) == 1
    assert found == [tmp_path / f"sort_digits-{QUICK.key}"] * 2
    assert "another process is building the base model" in capsys.readouterr().out


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME: the base model cannot be written") as e:
        base_model(QUICK, tmp_path / "file" / "klrl")
    assert "\n" not in str(e.value)


def test_the_cache_stands_where_the_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "klrl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_dir() == tmp_path / "elsewhere" / "klrl"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "klrl"


def test_saved_weights_are_the_trained_ones(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    folder = base_model(QUICK, tmp_path)
    with torch.random.fork_rng():
        torch.manual_seed(QUICK.seed)
        model = make_model(QUICK, tokenizer)
        module.train(model, tokenizer, QUICK)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
