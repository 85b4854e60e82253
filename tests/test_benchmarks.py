"""The arithmetic of ``benchmarks/``; the measurements themselves are no tests."""

import ast
import importlib
import json
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import language, ranges, results
from benchmarks.language import WORKLOADS
from benchmarks.peers import klrl_lm, lm, trl_grpo
from benchmarks.throughput import summarise
from klrl.config.checks import to_config
from klrl.config.compose import compose
from klrl.language.data.tasks import make_task


def test_ranges_enumerates_every_response_once():
    responses, mask = ranges.all_responses()
    logits = torch.randn(ranges.CONTEXTS, ranges.V, dtype=torch.float64)
    p = ranges.chosen(logits, responses, mask).sum(1).exp()
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-12)
    lengths, of = torch.tensor([1, 2]), torch.tensor([0.25, 0.75], dtype=torch.float64)
    share = ranges.expected_share(lengths, of, 3)
    by_hand = [
        3 * (0.0625 / (n + 2) + 0.375 / (n + 3) + 0.5625 / (n + 4)) for n in lengths.tolist()
    ]
    assert share.tolist() == pytest.approx(by_hand, abs=1e-12)


def test_the_published_figures_are_those_of_seed_0():
    """Gradients: three KLs, three cosines and one error each; the spreads of a sequence's KL."""
    published = {
        0.10: (0.25, -0.46, -0.53, 0.12),
        0.89: (0.45, 0.78, 0.54, 0.20),
        1.90: (-0.19, 0.20, -0.13, 0.63),
    }
    for row, (kl, figures) in zip(ranges.placements(1), published.items(), strict=True):
        assert [float(each) for each in row[:-1]] == [kl, *figures]
        assert float(row[-1]) < 1e-12, "k1 in the reward, and split, are exact"
    ((kl, *spreads),) = ranges.sequences(1)
    assert float(kl) == pytest.approx(0.14, abs=0.005)
    found = [float(each) for each in spreads]
    for mine, theirs, error in zip(found, (3.77, 0.27, 0.083), (0.03, 0.006, 0.0015), strict=True):
        assert mine == pytest.approx(theirs, abs=error), "20,000 samples, a recursion"


def test_new_cells_hold_commit_versions_and_processor(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(results, "PAGE", tmp_path / "none.md")
    held = json.loads(results.save("kl", {"rows": [1]}).read_text())["kl"]
    words = ("git", "rev-parse", "HEAD")
    head = subprocess.run(words, cwd=results.ROOT, capture_output=True, text=True).stdout.strip()
    assert (held["commit"] or "").rstrip("+") == head
    assert held["versions"]["numpy"] == np.__version__
    assert held["processor"] == results.cpu_name()
    assert held["rows"] == [1]


def test_only_split_has_the_gradient_of_another_divergence():
    for _, _, split, loss, reward in ranges.divergences(1):
        assert float(split) == 0.0
        assert 0.1 < float(loss) < 0.25
        assert float(reward) > 0.9, "f(u) alone"


def test_moments_of_sequences_are_those_of_all_sequences():
    log_p = torch.randn(3, 3, dtype=torch.float64).log_softmax(-1)
    adds = torch.randn(3, 3, dtype=torch.float64)
    weights, sums = [], []
    for sequence in product(range(3), repeat=4):
        steps = list(zip((0, *sequence), sequence, strict=False))
        weights.append(sum(float(log_p[step]) for step in steps))
        sums.append(sum(float(adds[step]) for step in steps))
    p, x = torch.tensor(weights, dtype=torch.float64).exp(), torch.tensor(sums, dtype=torch.float64)
    mean = float((p * x).sum())
    std = float((p * (x - mean) ** 2).sum().sqrt())
    assert ranges.moments(log_p, adds, 4) == pytest.approx((mean, std), rel=1e-9)


def test_ratios_are_taken_within_a_round():
    def line(speed: float) -> dict:
        return {"frames_per_cpu_second": speed, "compile_seconds": 0.0, "phases": {"update": 1.0}}

    found = {
        "klrl eager": [line(10.0), line(40.0), line(30.0)],
        "Stable-Baselines3": [line(1.0), line(2.0), line(10.0)],
        "floor": ["no compiler"],
    }
    summary = summarise(found)
    ratios = summary["klrl eager"]["ratios"]
    assert ratios == {"Stable-Baselines3": {"median": 10.0, "min": 3.0, "max": 20.0}}
    assert summary["floor"] == {"error": "no compiler"}
    assert "no compiler" in results.speeds(summary)


def klrl_imports(source: str) -> Iterator[tuple[str, str]]:
    """(module, name) of every ``from klrl... import``, those in functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "klrl":
            yield from ((node.module, each.name) for each in node.names)


def test_benchmarks_import_what_is_there():
    files = Path(results.__file__).parent.rglob("*.py")
    imports = {each for path in files for each in klrl_imports(path.read_text("utf-8"))}
    assert ("klrl.cli.main", "main") in imports
    for module, name in imports:
        assert hasattr(importlib.import_module(module), name), (module, name)


@pytest.mark.parametrize("key", WORKLOADS)
def test_both_language_contenders_take_a_workload_and_are_asked_the_same(key, tmp_path) -> None:
    """klrl's words are a job of its own; the prompts written for TRL are those that klrl draws."""
    workload = WORKLOADS[key]
    words = language.make_words(workload, tmp_path, seed=3, iterations=2, epochs=1)
    args = lm.make_parser("about").parse_args(words)
    args.words = []
    config = to_config(compose(klrl_lm.make_words(args)))
    asked = make_task(config.env, config.seed)
    language.write_prompts(tmp_path / "asked.json", workload, seed=3, count=4)
    rows = json.loads((tmp_path / "asked.json").read_text())
    assert [list(asked.train(i).content) for i in range(4)] == [row["prompt"] for row in rows]
    drawn = [asked.train(i).row for i in range(4)]
    assert lm.checksum(workload.task, rows) == lm.checksum(workload.task, drawn)
    assert lm.checksum(workload.task, rows[1:]) != lm.checksum(workload.task, drawn)
    assert trl_grpo.settings(args, "")["temperature"] == config.collector.temperature
    assert config.frames == 2 * 8 * workload.settings["prompts"]


def test_the_true_kl_is_that_of_every_response_alone() -> None:
    """Two toy models whose logits do not depend on the context: KL by hand, padding left out."""
    a, b = torch.tensor([0.2, 0.5, 0.3]).log(), torch.tensor([0.6, 0.2, 0.2]).log()

    def model(logits: torch.Tensor):
        def forward(input_ids: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=2 * logits.expand(*input_ids.shape, 3))

        return forward

    trainer = SimpleNamespace(model=model(a), ref_model=model(b), temperature=2.0)
    inputs = {
        "prompt_ids": torch.tensor([[0, 1], [2, 2]]),
        "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "completion_ids": torch.tensor([[1, 2], [0, 0]]),
        "completion_mask": torch.tensor([[1, 1], [1, 0]]),
    }
    tokens, exact, k3 = trl_grpo.true_kl(trainer, inputs)
    kl = float((a.exp() * (a - b)).sum())
    assert tokens == [2, 1]
    assert exact == pytest.approx([2 * kl, kl], rel=1e-5)
    r = (b - a)[[1, 2, 0]]
    each = r.exp() - 1 - r
    assert k3 == pytest.approx([float(each[:2].sum()), float(each[2])], rel=1e-5)


def test_kls_beside_the_truth_are_means_over_tokens_with_an_error() -> None:
    """Responses of one token: the standard error is that of a mean of differences."""
    k3, exact = [0.2, 0.4, 0.6, 0.0], [0.1, 0.3, 0.2, 0.2]
    told = {"logged": [0.3, 0.5], "tokens": [1, 1, 1, 1], "exact": exact, "k3": k3}
    found = language.kl_beside_truth(told)
    assert (found["logged"], found["responses"]) == (0.4, 4)
    assert (found["k3"], found["exact"]) == pytest.approx((0.3, 0.2))
    off = np.array(k3) - np.array(exact)
    assert found["k3_error"] == pytest.approx(off.std(ddof=1) / 2)
    longer = {**told, "tokens": [3, 1, 1, 1]}
    assert language.kl_beside_truth(longer)["exact"] == pytest.approx(0.8 / 6)
    # Residuals .3 - 3 r, .1 - r, .2 - r, -.2 - r with r = .4 / 6.
    rest = np.array([0.1, 0.1, 0.4, -0.2]) - 0.4 / 6 * np.array([3, 1, 1, 1])
    error = np.sqrt(4 / 3 * (rest**2).sum()) / 6
    assert language.kl_beside_truth(longer)["k3_error"] == pytest.approx(error)
