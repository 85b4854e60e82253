"""``benchmarks/mujoco``: the published figures, SB3's run, intervals, the numbers of the index."""

import json
import math
from math import erf
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.mujoco import sb3, search
from benchmarks.mujoco import second as edition
from benchmarks.mujoco.cells import COMPARABLE, ZOO, Line, job_identity
from benchmarks.mujoco.losses import loss_beside_loss, over_tasks
from benchmarks.mujoco.peers import against_published, chance_interval
from benchmarks.mujoco.published import SOURCES, best
from benchmarks.mujoco.runs import ACTION, CLIP, HELD, KLPEN, MAIN, TRPO, known, values
from benchmarks.mujoco.swimmer import correlation
from benchmarks.results import ROOT
from klrl.report.statistics import chance_of_more, log_ratios

WHOLE = 488 * 2048  # what CleanRL makes of a million


def test_the_best_by_hand():
    assert (best("half_cheetah")[0], best("ant")[0], best("reacher")[0]) == (5819.099, 3258.4, -4.1)
    assert best("hopper")[1].name == "XuanCe"
    many = [source for source in SOURCES if (source.seeds or 0) >= 10]
    assert [best("hopper", many)[0], best("walker2d", many)[0]] == [2609.3, 3588.5]
    assert best("walker2d", method="TRPO")[0] == 4933.148
    with pytest.raises(ValueError, match="reacher"):
        best("reacher", SOURCES[:1])


def test_the_learning_rate_is_that_of_cleanrl():
    """frac = 1 - (iteration - 1) / num_iterations, iterations from 1; SB3 tells what is left."""
    for iteration in (1, 2, 488):
        left = 1 - iteration * 2048 / WHOLE
        by_cleanrl = 3e-4 * (1 - (iteration - 1) / 488)
        assert sb3.learning_rate(left, WHOLE) == pytest.approx(by_cleanrl, rel=1e-9)


def test_evaluation_starts_where_klrl_closes(monkeypatch):
    """A policy that does nothing: its returns are those of plain Gymnasium from these seeds."""
    gym = pytest.importorskip("gymnasium")
    monkeypatch.setattr(sb3, "EPISODES", 3)
    normalize = SimpleNamespace(normalize_obs=lambda observation: observation)
    model = SimpleNamespace(
        predict=lambda observation, deterministic: ([0.0], None),
        get_vec_normalize_env=lambda: normalize,
    )
    from klrl.train.evaluate import CLOSING

    steps = []
    for seed in CLOSING.seeds(3):
        env = gym.make("InvertedPendulum-v5")
        env.reset(seed=seed)
        count = 1
        while not env.step([0.0])[2]:
            count += 1
        steps.append(count - 1.0)  # 1 for each step but the one that ends it
    assert sb3.evaluate(model, "inverted_pendulum") == steps


def test_the_interval_of_the_chance_of_more_covers_it_with_few_seeds() -> None:
    """Normal samples of 10 and 3, whose P(A > B) is Phi(shift / sqrt(2))."""
    rng = np.random.default_rng(1)
    for shift in (0.0, 1.0, 2.0):
        truth = 0.5 * (1 + erf(shift / 2))
        held = []
        for _ in range(2000):
            a, b = rng.normal(shift, 1, 10), rng.normal(0, 1, 3)
            low, high = chance_interval(chance_of_more(a, b), 10, 3)
            held.append(low <= truth <= high)
        assert 0.92 < np.mean(held) < 0.995, shift


def test_the_interval_of_the_chance_of_more_solves_newcombes_equation() -> None:
    for chance, m, n in ((0.85, 10, 2), (0.5, 5, 5), (0.02, 7, 9)):
        for p in chance_interval(chance, m, n):
            k = (m + n) / 2 - 1
            variance = p * (1 - p) / (m * n) * (1 + k * (1 - p) / (2 - p) + k * p / (1 + p))
            assert abs(chance - p) == pytest.approx(1.96 * np.sqrt(variance), rel=1e-4)
    low, high = chance_interval(1.0, 10, 3)
    assert high == 1.0
    assert 0 < low < 0.8  # all of ten above all of three is no certainty
    low, high = chance_interval(0.0, 3, 10)
    assert low == 0.0
    assert high == pytest.approx(1 - chance_interval(1.0, 3, 10)[0])


@pytest.mark.parametrize(
    ("held", "excluded"),
    [((98, 99, 100, 101, 102), "yes"), ((93, 94, 95, 96, 97), "no"), ((70, 90, 110, 130), "no")],
)
def test_a_loss_of_five_percent_is_excluded_by_welchs_interval(held, excluded) -> None:
    clip = (98, 99, 100, 101, 102)
    cells = {
        setting: {"hopper": [{"return": value} for value in values]}
        for setting, values in ((HELD, held), (CLIP, clip))
    }
    line = loss_beside_loss(cells, HELD, CLIP, "hopper")
    if len(held) < 5:
        assert "not run yet" in line
    else:
        # Variances of 2.5, five each: a standard error of 1, eight degrees of freedom.
        gap = np.mean(held) - 100
        assert f"[{gap - 2.306:+,.0f}, {gap + 2.306:+,.0f}]" in line
    assert line.endswith(f"| {excluded} |")


def test_the_mean_over_tasks_has_the_same_verdict_from_both_sides() -> None:
    held, clip = [98, 99, 100, 101, 102], [95, 96, 97, 98, 99]
    scaled = {"hopper": 1.0, "ant": 30.0}  # the unit of a task's reward does not matter
    cells = {
        setting: {task: [{"return": unit * v} for v in values] for task, unit in scaled.items()}
        for setting, values in ((HELD, held), (CLIP, clip))
    }
    # log(100 / 97); variances of 2.5 / 5, over the squared means, of two tasks: 16 degrees of
    # freedom, whose quantile is 2.120.
    gap = np.log(100 / 97)
    reach = 2.120 * np.sqrt(0.5 * (1 / 100**2 + 1 / 97**2) / 2)
    for first, second, sign in ((HELD, CLIP, 1), (CLIP, HELD, -1)):
        line = over_tasks(cells, first, second, list(scaled))
        low, high = (100 * np.expm1(sign * gap + each) for each in (-reach, reach))
        assert f"{100 * np.expm1(sign * gap):+.0f} [{low:+.0f}, {high:+.0f}]" in line
        assert line.endswith("| yes |")  # -5 is excluded from both sides


def test_the_aim_is_the_interquartile_mean_of_the_ratios() -> None:
    cells = {HELD: {task: [{"return": 10.0 * i} for i in range(10)] for task in MAIN}}
    # Of 0 to 9, five times each: the middle half of 50 numbers, 12 cut at either end.
    ordered = np.sort(np.tile(np.arange(10.0), 5))
    assert against_published(cells, HELD, dict.fromkeys(MAIN, 10.0)) == ordered[12:-12].mean()


@pytest.mark.integration
def test_the_indexs_numbers_are_those_of_the_committed_cells() -> None:
    there = edition.lines()
    ours = [cell for cell in edition.cells() if cell.setting != ZOO]
    found: dict[str, dict[str, list[Line]]] = {}
    for cell in ours:
        line = there.get(cell)
        assert line is not None, cell
        found.setdefault(cell.setting, {}).setdefault(cell.task, []).append(line)
    found[KLPEN] = known(KLPEN)
    told = " ".join((ROOT / "docs/results/README.md").read_text("utf-8").split())

    def runs(setting: str, key: str) -> list[float]:
        return [line[key] for task in edition.TASKS for line in found[setting][task]]

    bands = min(runs(TRPO, "band")), min(runs(HELD, "band") + runs(ACTION, "band"))
    assert (
        "in {:.0%} of the iterations of every run, `klpen_held` in {:.0%} or more".format(*bands)
        in told
    )
    minutes = [each / 60 for setting in (HELD, *edition.SEARCHED) for each in runs(setting, "cpu")]
    assert f"{min(minutes):.0f} to {max(minutes):.0f} minutes of CPU a run" in told

    def ratio(setting: str, key: str) -> str:
        both = (setting, KLPEN)
        of = [[values(found, each, task, key) for task in edition.TASKS] for each in both]
        over = log_ratios([(of[0], of[1])])[0]
        return "{:.2f} [{:.2f}, {:.2f}]".format(*map(math.exp, (over.value, over.low, over.high)))

    names = {TRPO: "`trpo`", ACTION: "`klpen_held` per action", CLIP: "`clip`"}
    told_as = {"return": "Return", "training": "Return in training (sampled actions, the picture)"}
    for key, what in told_as.items():
        times = ", ".join(f"{name} {ratio(setting, key)}" for setting, name in names.items())
        assert f"{what}, relative to `klpen`: {times}." in told

    def of_zoo(task: str, column: str = "return") -> list[float]:
        text = (ROOT / "docs/results/mujoco/second.jsonl").read_text("utf-8")
        lines = map(json.loads, text.splitlines())
        return sorted(each[column] for each in lines if each["name"].startswith(f"{task} sb3_zoo"))

    least, _, most = of_zoo("half_cheetah")
    assert f"HalfCheetah returns {least:,.0f} to {most:,.0f} (" in told
    low, _, high = of_zoo("hopper", "training")
    greedy = "Hopper returns {:.0f}, {:.0f} and {:.0f}, ".format(*of_zoo("hopper"))
    assert f"{greedy}in training {low:.0f} to {high:.0f};" in told


def test_fishers_interval_of_a_correlation_by_hand() -> None:
    x, y = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [2.0, 1.0, 4.0, 3.0, 6.0, 5.0, 7.0]
    # Sums of squares of 28, of products 25: r = 25 / 28; atanh(r) = 1.4351, +- 1.96 / 2.
    assert correlation(x, y) == "0.89 [0.43, 0.98]"


class Known(dict[tuple[str, int], Line]):
    """Lines of cells by their setting's name and seed; of both tasks alike but for a factor."""

    def get(self, cell: search.Cell) -> Line | None:  # type: ignore[override]
        found = dict.get(self, (cell.words[-1], cell.seed))
        factor = 2 if cell.task == "half_cheetah" else 1
        return None if found is None else {"return": factor * found}


def test_the_search_takes_the_better_of_the_two_that_went_on() -> None:
    words = search.SEARCHED["trpo"]
    last = [each[-1] for each in words]
    first, second_seed = search.SEEDS
    known = Known({(name, first): value for name, value in zip(last, (3, 9, 8, 1), strict=True)})
    assert search.best_two("trpo", known) == [words[1], words[2]]
    assert search.chosen("trpo", known) == words[1]
    known |= {(last[1], second_seed): 1, (last[2], second_seed): 4}
    # Means of 5 and 6, geometric mean over tasks with a factor of 2: sqrt(2) times.
    assert search.chosen("trpo", known) == words[2]
    assert search.score(words[2], known) == pytest.approx(6 * 2**0.5)
    known[last[2], first] = -8
    assert search.score(words[2], known) == 0


def test_a_stopped_second_edition_has_equally_many_seeds_of_every_setting(monkeypatch) -> None:
    monkeypatch.setattr(search, "lines", lambda: Known())
    cells = edition.cells()
    assert len(cells) == 5 * 4 * 10 + 2 * 3
    assert len({(cell.name, cell.words) for cell in cells}) == len(cells)
    settings = (HELD, CLIP, ACTION, TRPO)
    for stop in range(120):
        counts = [sum(cell.setting == each for cell in cells[:stop]) for each in settings]
        assert max(counts) - min(counts) <= 1
    assert {cell.task for cell in cells[:120]} == {"hopper", "half_cheetah", "swimmer"}
    assert all(cell.setting == ZOO for cell in cells[200:])


def test_the_rule_of_the_second_edition() -> None:
    spread = np.array([0.9, 0.95, 1.0, 1.05, 1.1] * 2)

    def of(**factors: float) -> dict[str, list[np.ndarray]]:
        names = (KLPEN, HELD, CLIP, ACTION, TRPO)
        return {
            name: [unit * factors.get(name, 0.8) * spread for unit in (1, 40)] for name in names
        }

    told = edition.verdict(of(klpen=1.0, trpo=1.2, clip=1.1))
    assert told.startswith("**Default: trpo takes klpen's place in the presets of these 5 tasks.")
    assert "change to those per action" in told
    assert "do not" not in told
    told = edition.verdict(of(klpen=1.0, klpen_held=1.0, klpen_action=0.9))
    assert "klpen_held takes klpen's place" in told
    assert "do not change" in told
    assert "klpen stays" in edition.verdict(of(klpen=1.0, klpen_held=0.9))


def test_the_second_editions_aim_is_of_every_task() -> None:
    # The best of tables that tell three seeds or more; hopper and ant by Tianshou.
    numbers = {"hopper": 2609.3, "half_cheetah": 5783.9, "ant": 3258.4}
    numbers |= {"swimmer": 111.19, "walker2d": 3588.5}
    all_of_it = [np.full(10, 1.2 * numbers[task]) for task in edition.TASKS]
    of = {each: [*all_of_it] for each in (HELD, CLIP, ACTION, TRPO)}
    of[TRPO][0] = of[TRPO][0] / 1.2
    told = edition.aim(of)
    assert "trpo hopper 1.00, half_cheetah 1.20, swimmer 1.20" in told
    assert told.count("(reached)") == 3
    assert told.count("(missed)") == 1


def test_stable_baselines3_gets_the_zoos_settings() -> None:
    pytest.importorskip("stable_baselines3")
    model = sb3.make_model("hopper", 0, 1000, zoo=True)
    assert (model.n_steps, model.batch_size, model.n_epochs) == (512, 32, 5)
    assert model.get_vec_normalize_env().gamma == model.gamma == 0.999
    assert [p.shape[0] for p in model.policy.mlp_extractor.policy_net.parameters()] == [256] * 4
    assert model.policy.log_std.tolist() == [-2.0] * 3
    assert [model.lr_schedule(left) for left in (1.0, 0.1)] == [9.80828e-05] * 2


@pytest.mark.integration
def test_the_committed_cells_are_those_of_the_protocol() -> None:
    """A later line of the search would change a setting, and leave its cells behind."""
    text = edition.lines().path.read_text("utf-8") if edition.lines().path.exists() else ""
    cells = {cell.name: cell for cell in edition.cells() if cell.setting != ZOO}
    for line in map(json.loads, text.splitlines()):
        assert line["machine"]
        assert line["commit"]
        if line["name"] in cells:
            # klpen_held's have been spelt out since its shipped values changed.
            assert {*line["words"]} <= {*cells[line["name"]].words}
            settings, _, numerics = job_identity(cells[line["name"]]).rpartition("-")
            counted = {f"{settings}-{each}" for each in (*COMPARABLE, numerics)}
            assert line["identity"] in counted
