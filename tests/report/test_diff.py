"""``klrl.report.diff``: what differs between two run folders made by hand."""

import pytest

from klrl.cli.diff import main
from klrl.runs.metrics import METRICS
from tests.report.toys import rows_of, write_run


def test_settings_circumstances_and_metrics_side_by_side(tmp_path, capsys):
    write_run(tmp_path / "a", rows=rows_of(reward=10.0))
    write_run(
        tmp_path / "b",
        seed=1,
        rows=[{**row, "loss/kl_ref": 2.0} for row in rows_of(reward=14.0)],
        config={"kl": {"mode": "retrieve", "estimator": "k3"}},
        versions={"numpy": "2.1"},
    )
    main([str(tmp_path / "a"), str(tmp_path / "b")])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    at = [i for i, line in enumerate(lines) if line and line[-1].endswith(":")]
    assert lines[at[0] + 1 : at[1] - 1] == [
        ["kl", "legacy", "retrieve"],
        ["kl.estimator", "-", "k3"],
    ]
    assert lines[at[1] + 1 : at[2] - 1] == [["seed", "0", "1"], ["numpy", "2.0", "2.1"]]
    assert ["reward/episode", "9.5", "13.5", "+4"] in lines
    assert ["loss/kl_ref", "-", "2"] in lines


def test_equal_runs_differ_in_nothing(tmp_path, capsys):
    for name in "ab":
        write_run(tmp_path / name)
    main([str(tmp_path / "a"), str(tmp_path / "b")])
    assert capsys.readouterr().out.count("nothing differs") == 2


def test_metrics_stand_in_the_order_in_which_klrl_declares_them(tmp_path, capsys):
    first = [{"frames": 1, "users/own": 1.0, "kl/ref/exact": 0.1}]
    second = [{"frames": 1, "reward/episode": 2.0, "kl/ref/exact": 0.1}]
    write_run(tmp_path / "a", rows=first)
    write_run(tmp_path / "b", rows=second)
    main([str(tmp_path / "a"), str(tmp_path / "b")])
    table = capsys.readouterr().out.partition("metrics, ")[2].splitlines()[1:]
    names = [line.split()[0] for line in table]
    assert names[-1] == "users/own"
    assert names[:-1] == [name for name in METRICS if name in names]


@pytest.mark.parametrize("other, told", [("c", "no such folder"), ("empty", "no manifest.json")])
def test_refusals_in_one_line(other, told, tmp_path, capsys):
    write_run(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "a"), str(tmp_path / other)])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("klrl diff: ")
    assert told in error
    assert error.count("\n") == 1
