"""``klrl.report.diff``: what differs between two run folders made by hand."""

import torch

from klrl.runs.checkpoint import Checkpoints
from tests.report.toys import rows_of, write_run
from tests.runs.commands import exits
from tests.runs.saves import Held


def test_settings_circumstances_and_metrics_side_by_side(tmp_path, capsys):
    write_run(tmp_path / "a", rows=rows_of(reward=10.0))
    write_run(
        tmp_path / "b",
        seed=1,
        rows=[{**row, "loss/kl_ref": 2.0} for row in rows_of(reward=14.0)],
        config={"kl": {"name": "retrieve", "estimator": "k3"}},
        versions={"numpy": "2.1"},
    )
    assert exits("diff", str(tmp_path / "a"), str(tmp_path / "b")) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    at = [i for i, line in enumerate(lines) if line and line[-1].endswith(":")]
    # Below: settings that the runs lack, as runs of an older klrl do, and that kl=retrieve has.
    assert lines[at[0] + 1 : at[0] + 3] == [
        ["kl", "legacy", "retrieve"],
        ["kl.estimator", "-", "k3"],
    ]
    assert lines[at[1] + 1 : at[2] - 1] == [["seed", "0", "1"], ["numpy", "2.0", "2.1"]]
    assert ["reward/episode", "9.5", "13.5", "+4"] in lines
    assert ["loss/kl_ref", "-", "2"] in lines


def test_a_run_that_was_resumed_with_other_frames_is_told(tmp_path, capsys):
    """Its learning rate was higher or lower than that of a run planned with them."""
    for name, planned in (("a", [2000]), ("b", [1000, 2000]), ("c", [2000])):
        write_run(tmp_path / name, planned=planned)
    assert exits("diff", str(tmp_path / "a"), str(tmp_path / "b")) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["planned", "-", "[1000,", "2000]"] in lines
    assert exits("diff", str(tmp_path / "a"), str(tmp_path / "c")) == 0
    assert "planned" not in capsys.readouterr().out


def bits(capsys, first, second) -> str:
    assert exits("diff", str(first), str(second), "--bits") == 0
    return capsys.readouterr().out.rstrip("\n")


def test_bits_names_the_first_iteration_and_metric_that_differ(tmp_path, capsys):
    a = write_run(tmp_path / "a")
    timed = [{**row, "time/iteration": 9.0} for row in rows_of()]
    changed = [dict(row) for row in timed]
    changed[11] |= {"kl/ref/coef": 0.1 + 2**-56, "loss/own": 1.0}
    changed[14]["reward/episode"] = 7.0
    without = [{k: v for k, v in row.items() if k != "kl/ref/coef"} for row in changed]
    no_checkpoint = f"{a} has no complete checkpoint of this format"
    for name, rows, said in (
        ("b", timed, f"equal to the bit: 20 rows; parameters not compared: {no_checkpoint}"),
        ("c", changed, "iteration 12: kl/ref/coef is 0.1 and 0.10000000000000002"),
        ("d", [*timed[:11], *without[11:]], "iteration 12: kl/ref/coef is 0.1 and absent"),
        ("e", timed[:7], "row 8: only the first run has it, the second ends at 7"),
    ):
        assert bits(capsys, a, write_run(tmp_path / name, rows=rows)) == said


def test_bits_compares_the_parameters_of_the_last_checkpoints(tmp_path, capsys, monkeypatch):
    weights = torch.arange(4.0)
    for name, changed, step in (("a", 0, 64), ("b", 0, 64), ("c", 2**-24, 64), ("d", 0, 128)):
        run = write_run(tmp_path / name)
        agent = {"weight": weights + torch.tensor([changed, 0, 0, 0])}
        Checkpoints(run / "checkpoints", {"agent": Held(agent)}).save("last", step, {})
    told = {name: bits(capsys, tmp_path / "a", tmp_path / name) for name in "bcd"}
    assert told["b"].startswith("equal to the bit: 20 rows; parameters at 64, SHA-256 ")
    assert told["c"] == "rows are equal, but at 64 the last checkpoints differ in agent"
    assert told["d"] == "rows are equal, but the last checkpoints are at 64 and 128"
