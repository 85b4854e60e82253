"""The results that ship: each table is that of its cells, and klrl takes the pages' commands."""

import json
import math
import re
import shlex

import numpy as np
import pytest

from benchmarks.pages import mujoco
from benchmarks.pages.__main__ import FOLDER, PAGES, page_of
from benchmarks.pages.mujoco import ACTION, CLIP, HELD, KLPEN, SEARCHED, TASKS, TRPO, Known, values
from benchmarks.pages.tables import Measure, Row, cell, worst
from klrl.config.overrides import expand, parse, separate
from klrl.report.statistics import Array

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("name", PAGES)
def test_every_table_is_that_of_the_committed_cells(name) -> None:
    path, text = page_of(name)
    assert path.read_text("utf-8") == text, "make results writes it"


def test_a_table_without_cells_is_refused(tmp_path, monkeypatch) -> None:
    (tmp_path / "README.md").write_text("<!-- table: other -->\n\nx\n\n<!-- end of table -->\n")
    monkeypatch.setitem(PAGES, "", lambda folder: {"results": "y"})
    with pytest.raises(SystemExit, match="other"):
        page_of("", tmp_path)
    monkeypatch.setitem(PAGES, "", lambda folder: {"other": "y"})
    assert "\n\ny\n\n" in page_of("", tmp_path)[1]


COMMANDS = [
    line
    for page in sorted(FOLDER.glob("*/README.md"))
    for line in re.findall(r"^    python -m klrl -m (.*)$", page.read_text("utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_klrl_accepts_the_words_of_every_sweep(command) -> None:
    from klrl.config.checks import to_config
    from klrl.config.compose import Composer
    from klrl.config.rules.unread import check_all_read

    given = parse(shlex.split(command))
    jobs, composer = expand(separate(given, multirun=True).job), Composer()
    assert len(jobs) > 1
    for words in (jobs[0], jobs[-1]):
        check_all_read(to_config(composer.composed(words)), words)


#: Of a mean of .5 and s = .2 * sqrt(2.5): 2.7764 standard errors for five seeds.
REACH = 2.776445 * 0.2 * np.sqrt(2.5) / np.sqrt(5)
STUDENTS = rf"0\.5000 \[{0.5 - REACH:.4f}, {0.5 + REACH:.4f}\], IQM 0\.5000"


@pytest.mark.parametrize(
    ("values", "how", "text"),
    [
        # The mean of the middle three of five is the IQM.
        ([0.0, 0.4, 0.5, 0.6, 2.0], {}, r"0\.70 \[.*\], IQM 0\.50, worst 0\.00"),
        ([0.0, 0.4, 0.5, 0.6, 2.0], {"worst": ""}, r"0\.70 \[.*\], IQM 0\.50"),
        ([0.1, 0.3, 0.5, 0.7, 0.9], {"form": ",.4f", "worst": ""}, STUDENTS),
        # An interval ends where the measure does; below five seeds there is none.
        ([0, 1, 1, 1, 1], {"worst": "", "bounds": (0.0, 1.0)}, r"0\.80 \[0\.\d\d, 1\.00\], .*"),
        ([1.0, 2.0, 6.0], {}, r"1\.00 to 6\.00, mean 3\.00"),
        ([1.0, 1.001, 1.002], {}, r"1\.00"),
        ([-0.001], {}, r"0\.00"),
    ],
)
def test_a_cell_has_the_mean_its_interval_the_iqm_and_the_worst_seed(values, how, text) -> None:
    measure = Measure("x", "in band", "share", **how)
    assert re.fullmatch(text, cell(Row({}, {"x": np.array(values, dtype=float)}), measure))


def test_the_worst_seed_is_the_least_the_most_or_the_farthest_from_1() -> None:
    values = np.array([0.2, 1.1, 1.5])
    assert [worst(values, kind) for kind in ("low", "high", "far")] == [0.2, 1.5, 0.2]


# ----------------------------------------------------------------------------------------- MuJoCo


def cells_of(**returns: dict[str, list[float]]) -> Known:
    return {
        setting: {task: [{"return": x} for x in of] for task, of in by_task.items()}
        for setting, by_task in returns.items()
    }


@pytest.mark.parametrize(
    ("held", "excluded"), [((98, 99, 100, 101, 102), "yes"), ((93, 94, 95, 96, 97), "no")]
)
def test_a_loss_of_five_percent_is_excluded_by_welchs_interval(held, excluded) -> None:
    cells = cells_of(klpen_held={"hopper": held}, clip={"hopper": (98, 99, 100, 101, 102)})
    line = mujoco.difference(cells, HELD, CLIP, "hopper")
    # Variances of 2.5, five each: a standard error of 1, eight degrees of freedom.
    gap = np.mean(held) - 100
    assert line[2] == f"{gap:+,.0f} [{gap - 2.306:+,.0f}, {gap + 2.306:+,.0f}]"
    assert line[-1] == excluded


def test_the_mean_over_tasks_has_the_same_verdict_from_both_sides() -> None:
    scaled = {"hopper": 1.0, "ant": 30.0}  # the unit of a task's reward does not matter
    cells = cells_of(
        klpen_held={task: [unit * x for x in range(98, 103)] for task, unit in scaled.items()},
        clip={task: [unit * x for x in range(95, 100)] for task, unit in scaled.items()},
    )
    # log(100 / 97); variances of 2.5 / 5, over the squared means, of two tasks: 16 degrees of
    # freedom, whose quantile is 2.120.
    gap = np.log(100 / 97)
    reach = 2.120 * np.sqrt(0.5 * (1 / 100**2 + 1 / 97**2) / 2)
    for first, second, sign in ((HELD, CLIP, 1), (CLIP, HELD, -1)):
        line = mujoco.over_tasks(cells, first, second)
        low, high = (100 * np.expm1(sign * gap + each) for each in (-reach, reach))
        assert line[3] == f"{100 * np.expm1(sign * gap):+.0f} [{low:+.0f}, {high:+.0f}]"
        assert line[-1] == "yes"  # -5 is excluded from both sides


def test_a_score_is_the_geometric_mean_over_tasks_of_means_over_seeds() -> None:
    assert mujoco.score([[3.0, 6.0], [9.0, 18.0]]) == pytest.approx(6 * 2**0.5)
    assert mujoco.score([[3.0, -6.0]]) == 0


def takes_over(challenger: list[Array], default: list[Array]) -> bool:
    """The protocol's rule: a loss of 5 % over tasks is excluded, and no task loses 20 %."""
    by_task = [mujoco.log_ratio([a], [b]) for a, b in zip(challenger, default, strict=True)]
    _, low, _ = mujoco.log_ratio(challenger, default)
    return low > math.log(0.95) and all(high > math.log(0.8) for *_, high in by_task)


def test_the_pages_verdict_is_that_of_the_cells() -> None:
    cells = mujoco.read_cells(FOLDER / "mujoco")
    of = {s: [values(cells, s, task) for task in TASKS] for s in (HELD, KLPEN, *SEARCHED)}
    ahead = [each for each in (HELD, *SEARCHED) if takes_over(of[each], of[KLPEN])]
    best = max(ahead, key=lambda each: mujoco.log_ratio(of[each], of[KLPEN])[0])
    assert best == TRPO
    assert takes_over(of[ACTION], of[HELD])
    page = " ".join((FOLDER / "mujoco" / "README.md").read_text("utf-8").split())
    assert "**Default: trpo takes klpen's place in the presets of these 5 tasks. " in page
    assert "shipped values change to those per action.**" in page


def test_question_a_is_judged_by_the_protocols_rule() -> None:
    cells, told = mujoco.read_cells(FOLDER / "mujoco"), {}
    for key in ("return", "training"):
        of = [[values(cells, s, t, key) for t in TASKS] for s in (mujoco.SAME_SIZE, TRPO)]
        assert {len(x) for each in of for x in each} == {10}
        value, low, high = map(math.exp, mujoco.log_ratio(*of))
        assert high < 1, "so klpen is neither superior nor excludes a loss of 5 %"
        told[key] = f"{value:.2f} [{low:.2f}, {high:.2f}]".replace("0.", ".")
    page, presets = (
        " ".join((FOLDER.parent / name).read_text("utf-8").split())
        for name in ("results/mujoco/README.md", "presets.md")
    )
    assert f"returns {told['return']} of trpo over the five tasks" in page
    assert f"(in training {told['training']})" in page
    assert f"`klpen` of trpo's size returns {told['return']} of it" in presets


def test_question_b_is_told_by_fishers_test() -> None:
    # The lady tasting tea (Fisher 1935): three of four cups against one of four.
    assert mujoco.fisher((3, 4), (1, 4)) == pytest.approx(34 / 70)
    assert mujoco.fisher((0, 20), (10, 20)) == pytest.approx(2 * 184756 / 847660528)
    cells = mujoco.read_cells(FOLDER / "mujoco")
    held, trpo = (values(cells, s, "hopper") for s in (mujoco.HELD_SMALL, mujoco.TRPO_SMALL))
    assert len(held) == len(trpo) == 20
    _, low, high = mujoco.log_ratio([held], [trpo])
    assert low < 0 < high
    few = [int((x <= 1500).sum()) for x in (held, trpo, values(cells, TRPO, "hopper"))]
    assert mujoco.fisher((few[0], 20), (few[1], 20)) > 0.05
    page = " ".join((FOLDER / "mujoco" / "README.md").read_text("utf-8").split())
    assert "**B: open.** With KL(old||new) of .0105 and .0150 nats a frame neither loss" in page
    assert f"trpo's runs with .01 per action {few[2]} of 10 fell, with .005 {few[1]} of 20" in page


def test_the_presets_page_weighs_returns_per_cpu_second_as_the_cells_do() -> None:
    cells, told = mujoco.read_cells(FOLDER / "mujoco"), []
    for key in ("return", "cpu", None):
        of = [
            [values(cells, s, t, key or "return") / (1 if key else values(cells, s, t, "cpu"))
             for t in TASKS]
            for s in (TRPO, ACTION)
        ]  # fmt: skip
        value, low, high = (f"{math.exp(x):.2f}" for x in mujoco.log_ratio(*of))
        told.append(f"{value} [{low}, {high}]".replace("0.", "."))
    page = " ".join((FOLDER.parent / "presets.md").read_text("utf-8").split())
    by = ("by return,", "by CPU seconds and", "by return per CPU second")
    assert " ".join(f"{x} {y}" for x, y in zip(told, by, strict=True)) in page


def test_the_controllers_page_tells_how_far_the_coefficient_moves() -> None:
    text = (FOLDER / "controllers" / "moves.jsonl").read_text("utf-8")
    moved: dict[tuple[str, str], list[float]] = {}
    for cell_ in map(json.loads, text.splitlines()):
        coef = np.array(cell_["coef"])
        steps = np.abs(coef[1:] / coef[:-1] - 1)[len(coef) // 2 :]
        moved.setdefault((cell_["controller"], cell_["env"]), []).append(float(np.median(steps)))
    page = " ".join((FOLDER / "controllers" / "README.md").read_text("utf-8").split())
    for name, words in (("held", "to the next by"), ("dual", "that of `dual` by")):
        of = [100 * np.mean(moved[name, env]) for env in ("pendulum", "hopper", "half_cheetah")]
        assert "{} {:.0f}, {:.0f} and {:.0f} %".format(words, *of) in page


def test_the_indexs_numbers_are_those_of_the_committed_cells() -> None:
    found = mujoco.read_cells(FOLDER / "mujoco")
    told = " ".join((FOLDER / "README.md").read_text("utf-8").split())

    def runs(setting: str, key: str) -> list[float]:
        return [line[key] for task in TASKS for line in found[setting][task]]

    bands = min(runs(TRPO, "band")), min(runs(HELD, "band") + runs(ACTION, "band"))
    assert (
        "in {:.0%} of the iterations of every run, `klpen_held` in {:.0%} or more".format(*bands)
        in told
    )
    ends = [values(found, ACTION, task, "band_end").mean() for task in TASKS]
    assert f"has {100 * min(ends):.0f} to {max(ends):.0%} (means by task)" in told
    minutes = [each / 60 for setting in (HELD, *SEARCHED) for each in runs(setting, "cpu")]
    assert f"{min(minutes):.0f} to {max(minutes):.0f} minutes of CPU a run" in told

    def ratio(setting: str, key: str) -> str:
        of = [[values(found, each, task, key) for task in TASKS] for each in (setting, KLPEN)]
        return "{:.2f} [{:.2f}, {:.2f}]".format(*map(math.exp, mujoco.log_ratio(*of)))

    names = {
        TRPO: "`trpo`",
        ACTION: "`klpen_held` per action",
        HELD: "`klpen_held`",
        CLIP: "`clip`",
    }
    told_as = {"return": "Return", "training": "Return in training (sampled actions, the picture)"}
    for key, what in told_as.items():
        times = ", ".join(f"{name} {ratio(setting, key)}" for setting, name in names.items())
        assert f"{what}, relative to `klpen`: {times}." in told

    def of_zoo(key: str, task: str = "") -> list[float]:
        text = (FOLDER / "mujoco" / "second.jsonl").read_text("utf-8")
        lines = map(json.loads, text.splitlines())
        return sorted(each[key] for each in lines if f"{task} sb3_zoo" in each["name"])

    least, _, most = of_zoo("return", "half_cheetah")
    assert f"HalfCheetah returns {least:,.0f} to {most:,.0f}." in told
    assert "Hopper returns {:.0f}, {:.0f} and {:.0f} (".format(*of_zoo("return", "hopper")) in told
    training = of_zoo("training", "hopper")
    assert f"({training[0]:.0f} to {training[-1]:.0f} in training)" in told
    cpu = of_zoo("cpu")
    assert f"PPO ({cpu[0] / 60:.0f} to {cpu[-1] / 60:.0f} minutes of CPU a run)" in told
