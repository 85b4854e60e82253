"""The arithmetic of ``benchmarks/``; the measurements themselves are no tests."""

import ast
import importlib.util
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from benchmarks import copies, language, limit, results, rounds
from benchmarks.language import WORKLOADS
from benchmarks.peers import klrl_lm, klrl_loop, lm, trl_grpo
from benchmarks.throughput import summarise
from klrl.config.checks import to_config
from klrl.config.compose import compose
from klrl.language.data.tasks import make_task


def test_new_cells_hold_commit_versions_and_processor(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(results, "tables", tuple)
    held = json.loads(results.save("kl", {**results.about(), "rows": [1]}).read_text())["kl"]
    words = ("git", "rev-parse", "HEAD")
    head = subprocess.run(words, cwd=results.ROOT, capture_output=True, text=True).stdout.strip()
    assert (held["commit"] or "").rstrip("+") == head
    assert held["versions"]["numpy"] == np.__version__
    assert held["processor"] == results.cpu_name()
    assert held["rows"] == [1]


def test_ratios_are_taken_within_a_round():
    def line(speed: float) -> dict:
        return {"frames_per_cpu_second": speed, "phases": {"update": 1.0}}

    found = {
        "klrl eager": [line(10.0), line(40.0), line(30.0)],
        "Stable-Baselines3": [line(1.0), line(2.0), line(10.0)],
        "JAX": ["no compiler"],
    }
    summary = summarise(found)
    ratios = summary["klrl eager"]["ratios"]
    assert ratios == {"Stable-Baselines3": {"median": 10.0, "min": 3.0, "max": 20.0}}
    assert summary["JAX"] == {"error": "no compiler"}
    assert "no compiler" in results.speeds(summary)


def test_an_older_checkout_is_no_target_and_a_part_that_was_not_measured_stays(
    tmp_path, monkeypatch
):
    def line(speed: float) -> dict:
        told = {"reward_first": 0.1, "reward_last": 0.2, "frames": 32, "n": 2, "t": 8, "last": 1}
        phases = {"env": 0.0, "policy": 1.0, "update": 2.0}
        told |= {"tokens": 9.0, "peak_mb": 500, "versions": {"trl": "1"}, "phases": phases}
        return {**told, "frames_per_cpu_second": speed}

    rounds_of = {"klrl": [3.0, 4.0], "klrl before": [3.0, 2.0], "TRL": [1.0, 1.0]}
    found = {name: [line(x) for x in speeds] for name, speeds in rounds_of.items()}
    summary = language.summarise(found, WORKLOADS["smollm"])
    assert summary["klrl"]["ratios"]["klrl before"] == {"median": 1.5, "min": 1.0, "max": 2.0}
    assert summary["klrl before"]["phases"] == {"sampling and scoring": 1.0, "update": 2.0}
    assert language.good_enough(summary)
    assert not language.good_enough(summary | {"klrl": summary["klrl"] | {"target": 3.6}})
    part = {"before": "ab" * 20, "versions": {}, "epochs": 1, "last": 5, "contenders": summary}
    monkeypatch.setattr(results, "tables", tuple)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    results.save("language", {"one": part})
    whole = json.loads(results.save("language", {"two": part}).read_text())
    told = results.ratios(whole)
    assert "| one | TRL | 3.50 [3.00, 4.00] |" in told
    assert "| two | klrl before | 1.50 [1.00, 2.00] |" in told
    assert "before: abababab," in told
    assert "| klrl before | 2.50 [2.00, 3.00] |  |  | 0.10" in results.language(whole["language"])


def test_a_round_at_a_load_above_the_cores_is_marked(monkeypatch, capsys):
    loads = iter([0.5, rounds.CORES + 0.6])
    monkeypatch.setattr(rounds.os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    line = {"frames_per_cpu_second": 10.0}
    told = rounds.rounds({"klrl": lambda _: line}, 2)
    said = capsys.readouterr().out.splitlines()
    assert ["LOADED" in each for each in said] == [False, True]
    assert rounds.loads(told) == [0.5, rounds.CORES + 0.6, rounds.CORES]
    part = {"commit": "ab" * 20 + "+", "versions": {}, "load": rounds.loads(told)}
    assert "abababab+" in results.told_about(part)
    assert "LOADED" in results.told_about(part)
    assert "LOADED" not in results.told_about({**part, "load": [0.5, rounds.CORES, rounds.CORES]})


def test_the_limit_counts_the_work_of_a_frame():
    """Pendulum, 64 wide: 8,704 products a frame forward, 10 epochs forward and backward."""
    products = (3 * 64 + 64 * 64 + 64) * 2
    flop, moved, state = limit.work("pendulum", 64)
    assert flop == 2 * products + 10 * (6 * products - 2 * 2 * 2 * 3 * 64 // 2)
    assert moved == pytest.approx(products * 7 * 4 * 10 / 64)
    assert state == 16 * products


def test_the_picture_of_copies_shows_the_means_of_the_rounds() -> None:
    found = json.loads(copies.FILE.read_text("utf-8"))
    means = {
        (each["contender"], each["copies"], each["width"]): np.mean(each["us"])
        for each in found["points"]
    }
    figure = copies.draw(found)
    left, right = figure.axes
    drawn = {curve.get_label(): curve.get_xydata().T for curve in left.lines}
    assert list(drawn) == ["klrl", "klrl, TorchRL's pendulum", "Stable-Baselines3", "TorchRL"]
    for name, (counts, us) in drawn.items():
        assert list(counts) == [n for n in copies.STEPS if (name, n, 64) in means]
        assert list(us) == pytest.approx([means[name, n, 64] for n in counts])
    for curve, n in zip(right.lines, (64, 8, 8), strict=True):
        name = curve.get_label().split(",")[0]
        widths, speed = curve.get_xydata().T
        assert list(widths) == [w for w in copies.WIDTHS if (name, n, w) in means]
        assert list(speed) == pytest.approx([1e6 / means[name, n, width] for width in widths])
    loaded = copies.draw({**found, "load": [0.5, 2.4, 2]})
    assert "LOADED" in loaded.get_suptitle()
    assert not copies.draw({**found, "load": [0.5, 2.0, 2]}).get_suptitle()


def test_bytes_per_frame_are_those_of_the_arrays() -> None:
    after = {"done": torch.zeros(4, 6, 1, dtype=torch.bool), "ids": torch.zeros(4, 6).long()}
    batch = TensorDict({"observation": torch.zeros(4, 6, 3), "next": after}, [4, 6])
    found = klrl_loop.bytes_of(batch)
    assert found == {"observation": 12, "next done": 1, "next ids": 8}


def klrl_imports(source: str) -> Iterator[tuple[str, str]]:
    """(module, name) of every ``from klrl... import``, those in functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "klrl":
            yield from ((node.module, each.name) for each in node.names)


def test_benchmarks_import_what_is_there():
    files = Path(results.__file__).parent.rglob("*.py")
    imports = {each for path in files for each in klrl_imports(path.read_text("utf-8"))}
    assert ("klrl.runs.folder", "RunFolder") in imports
    for module, name in imports:
        found = hasattr(importlib.import_module(module), name)
        assert found or importlib.util.find_spec(f"{module}.{name}"), (module, name)


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
