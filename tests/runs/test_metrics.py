"""The metrics: declared once, complete, read by all that show them; numbers as people see them."""

import inspect
import io
import math
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from klrl.base.digits import number
from klrl.base.tables import read_table
from klrl.control.run.parts import rewards_of as control_rewards
from klrl.domains import CONTROL, DOMAINS, LANGUAGE, Domain
from klrl.kl.charge import KL_KEY, RAW_REWARD_KEY, ReferenceKL
from klrl.language.data.batch import SAMPLER_LOG_PROBS, Responses, make_batch
from klrl.language.run.kl import CHARGED
from klrl.language.run.record import rewards_of as language_rewards
from klrl.language.run.rollout import GOLD, rounding
from klrl.language.run.stale import SAMPLER_KL, sampler_row
from klrl.runs.checkpoint import Counters
from klrl.runs.curves import curves_figure, draw_curves
from klrl.runs.folder import RunFolder
from klrl.runs.loggers import LoggedRun
from klrl.runs.metrics import METRICS, PANELS, Metric, metrics_of
from klrl.runs.progress import Progress
from klrl.runs.record import summary
from klrl.runs.wandb_logger import wandb_run
from klrl.train.loop import Rewards, Training
from klrl.train.scores import Evaluation
from klrl.train.stale import compare
from tests.losses.test_policy import loss_of
from tests.report.toys import rows_of, write_run
from tests.runs.commands import exits

#: What an update gives, and its loss of what it charges.
LEARNED = dict.fromkeys(
    (
        *loss_of("klpen", "k3").measures,
        *("kl/old/beta", "kl/old/target", "kl/ref/at_bound"),
        *(f"learner/{name}" for name in ("grad_norm", "lr", "epochs", "alpha")),
    ),
    1.0,
)
KL = ReferenceKL(0.5, "k3", "split")
ESTIMATES = tuple(f"kl/ref/{name}" for name in ("exact", "forward", "k1", "k2", "k3"))
PHASES = ("sampling", "reward", "scoring", "update")
#: Of two episodes of an evaluation, to the reference.
KLS = [{"reverse": np.ones(2), "forward": np.ones(2)}] * 2
#: What the loop adds to an evaluation; see tests/runs/test_evaluations.py.
BY_THE_LOOP = dict.fromkeys(
    ("eval/best_return", "eval/best_return_se", "time/evaluation", "nll/held_out"), 1.0
)


def row_of(
    domain: Domain, batch: TensorDict, rewards: Rewards, measured: dict[str, torch.Tensor]
) -> dict[str, float]:
    phases = {n: 1.0 for n in PHASES if n != "reward" or domain is LANGUAGE}
    phase = SimpleNamespace(take=lambda: phases)
    run = SimpleNamespace(
        domain=domain,
        counters=Counters(),
        parts=SimpleNamespace(rewards=lambda _: rewards, kl=KL, phase=phase),
        controller=SimpleNamespace(row=dict),
    )
    row = Training.make_row(run, batch, measured, LEARNED, 4.0)
    assert row[f"time/{domain.axis}_per_second"] == 0.5
    return row


def control_row() -> dict[str, float]:
    """Every column that a control run can have."""
    after = TensorDict(
        {
            "reward": torch.tensor([[[1.0]], [[3.0]]]),
            RAW_REWARD_KEY: torch.tensor([[[2.0]], [[6.0]]]),
            KL_KEY: torch.tensor([[[2.0]], [[6.0]]]),
            "done": torch.ones(2, 1, 1, dtype=torch.bool),
            "episode_reward": torch.ones(2, 1, 1),
            "step_count": torch.ones(2, 1, 1),
        },
        [2, 1],
    )
    batch = TensorDict({"next": after}, [2, 1])
    names = (*ESTIMATES, "div/ref/charged", "div/ref/charged_error")
    measured = {name: torch.tensor(0.1) for name in names}
    row = row_of(CONTROL, batch, control_rewards(batch, KL, scale=1.0), measured)
    assert (row["reward/raw"], row["reward/shaped"], row["kl/ref/penalty"]) == (4.0, 2.0, 2.0)
    row |= compare(*torch.zeros(3, 2, 1), 1) | {"loss/masked": 0.5}  # with collector.staleness
    return row | BY_THE_LOOP | Evaluation([1.0, 3.0], CONTROL, "deterministic", cut=1, kls=KLS).row


def responses() -> TensorDict:
    """Two prompts of two tokens with a response of three each, scored 1 and 3, KL 0.5 a token."""
    tokens, mask = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool)
    told = Responses(tokens, mask, torch.zeros(2, 3), torch.tensor([False, True]))
    batch = make_batch(tokens[:, :2], mask[:, :2], told, 1)
    batch["next", "reward_raw"] = torch.tensor([[[1.0]], [[3.0]]])
    batch["next", "reward"] = torch.ones(2, 3, 1)
    batch[CHARGED] = torch.full((2, 3, 1), 0.5)
    batch[GOLD] = torch.ones(2, 1, 1)
    return batch


def words_row() -> dict[str, float]:
    """Every column that a language run can have."""
    names = [name + unit for name in (*ESTIMATES, "div/ref/charged") for unit in ("", "_seq")]
    measured = {name: torch.tensor(0.1) for name in names}
    batch = responses()
    row = row_of(LANGUAGE, batch, language_rewards(batch, KL, 2), measured)
    assert (row["reward/episode"], row["reward/truncated"]) == (2.0, 0.5)
    assert row["kl/ref/penalty"] == 0.25
    full = batch["log_probs", "full"][:, 2:]
    row |= {"kl/old/k3": row["kl/old/exact"]}  # with kl.exact=every:N
    row |= rounding(full, full, torch.ones_like(full, dtype=torch.bool))
    batch[SAMPLER_LOG_PROBS], batch[SAMPLER_KL] = batch["log_probs", "full"], torch.zeros(2, 3)
    row |= sampler_row(batch, 1) | {"loss/masked": 0.5}  # with loss=dppo
    return row | BY_THE_LOOP | Evaluation([1.0, 3.0], LANGUAGE, "greedy", [0.5, 0.5], kls=KLS).row


@pytest.mark.parametrize("domain, row", [(CONTROL, control_row), (LANGUAGE, words_row)])
def test_what_is_written_is_declared_and_what_is_declared_is_written(domain, row) -> None:
    assert set(row()) == set(metrics_of(domain))


#: What is a ratio, or in units of the learner's own scale.
UNITLESS = {
    *("loss/objective", "loss/critic", "loss/entropy"),
    *("learner/grad_norm", "learner/lr"),
}


@pytest.mark.parametrize("domain", DOMAINS.values(), ids=DOMAINS)
def test_every_metric_has_a_title_a_unit_digits_and_a_panel_that_exists(domain) -> None:
    metrics = metrics_of(domain)
    for name, metric in metrics.items():
        texts = (metric.title, metric.unit, metric.what, metric.short)
        assert not any(re.search(r"[{}]", text) for text in texts), name
        assert metric.title, name
        assert metric.what, name
        assert bool(metric.unit) != (name in UNITLESS), name
        assert metric.digits is not None, name
        assert metric.panel is None or metric.panel in PANELS, name
    titles = [(metric.title, metric.unit) for metric in metrics.values()]
    assert len(set(titles)) == len(titles)
    assert {metric.domain for metric in METRICS.values()} <= {None, *DOMAINS}
    names = [
        entry["name"] for entry in read_table(Path(inspect.getfile(Metric)).with_suffix(".yaml"))
    ]
    assert len(set(names)) == len(names), "a name is declared once"
    unit = {"control": "frame", "language": "token"}[domain.name]
    assert metrics["kl/ref/exact"].unit == f"nats per {unit}"
    assert metrics[domain.axis].digits == 0


@pytest.mark.parametrize(
    "value, digits, told",
    [
        (-0.0, 4, "0"),
        (-0.3, 0, "0"),
        (-1e-9, 4, "-1e-09"),
        (-1040.184, 5, "-1040.2"),
        (0.1295882, 4, "0.1296"),
        (123456.7, 5, "123,457"),
        (99999.7, 5, "100,000"),
        (99999.4, 5, "99999"),
        (4096, 0, "4,096"),
        (1e15, 4, "1e+15"),
        (math.nan, 4, "nan"),
        (-math.inf, 4, "-inf"),
    ],
)
def test_numbers_as_people_read_them(value, digits, told) -> None:
    assert number(value, digits) == told


def test_a_difference_has_its_sign_and_none_has_none() -> None:
    assert [number(v, 4, signed=True) for v in (2.0, -2.0, 0.0, -0.0)] == ["+2", "-2", "0", "0"]


@given(st.floats(-1e300, 1e300), st.integers(0, 6))
def test_a_number_reads_back_and_zero_is_never_negative(value, digits) -> None:
    read = float(number(value, digits).replace(",", ""))
    assert math.copysign(1.0, read) == (1.0 if read == 0 else math.copysign(1.0, value))
    if digits:
        assert read == pytest.approx(value, rel=0.5 * 10 ** (1 - digits), abs=0)
    else:
        assert abs(read - value) <= max(0.5, 1e-15 * abs(value))


def test_a_kl_of_rounding_size_is_printed_as_nothing_and_a_coefficient_is_not() -> None:
    names = ("kl/ref/exact", "kl/old/exact", "kl/ref/k1", "kl/ref/penalty", "loss/kl_ref")
    for value in (3e-9, -1e-10, 9e-8, -9e-8):
        assert {METRICS[name].show(value) for name in names} == {"0"}
        assert METRICS["kl/ref/exact"].show(value, signed=True) == "0"
    assert METRICS["kl/ref/exact"].show(1.2e-7) == "1.2e-07"
    assert METRICS["kl/ref/coef"].show(3e-9) == "3e-09"
    assert METRICS["learner/lr"].show(3e-9) == "3e-09"


@pytest.mark.parametrize(
    ("words", "kl", "line"),
    [
        ((), 0.5, "  the penalty is 25% of the reward (mean sizes per frame); if the policy "
         "learns too little, set kl.coef=0.01\n"),
        (("kl.placement=loss", "kl.estimator=exact"), 0.5, "the penalty is 25% of the reward"),
        ((), 0.29, None),
        (("controller=adaptive", "controller.target=0.01"), 0.5, None),
        (("advantage.reward_weight=0",), 0.5, None),
        ((), 3.7, "  the penalty is 185% of the reward (mean sizes per frame); if the policy "
         "drifts too far, set kl.coef=1\n"),
        (("kl.placement=loss", "kl.estimator=exact"), 1.2, "drifts too far, set kl.coef=1\n"),
    ],
)  # fmt: skip
def test_a_run_closes_with_a_penalty_that_is_a_large_share_of_the_reward(
    settings, tmp_path, words, kl: float, line: str | None
) -> None:
    """0.1 * 0.5 nats a frame against rewards of 0.1, 0.3, and an evaluation's row without any."""
    rows = [{"iteration": 0, "frames": 0, "eval/return": 1.0}]
    for i, reward in enumerate((-0.1, 0.3), 1):
        row = {"iteration": i, "frames": 64 * i, "reward/raw": reward, "reward/shaped": reward}
        rows.append({**row, "kl/ref/coef": 0.1, "kl/ref/exact": kl, "kl/ref/penalty": 0.1 * kl})
    write_run(tmp_path / "a", rows=rows)
    said = summary(RunFolder(tmp_path / "a"), settings(*words), 128)
    assert (line in said) if line else ("of the reward" not in said)
    assert "hardly moved" not in said


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_the_penalty_of_the_last_rollout_is_shown_wherever_it_is_charged(
    settings, tmp_path, placement: str
) -> None:
    row = {"iteration": 1, "frames": 64, "reward/raw": 1.0, "kl/ref/exact": 0.5}
    penalty = {"kl/ref/coef": 0.3, "kl/ref/penalty": 0.3 * 0.5 * (placement == "reward")}
    write_run(tmp_path / "a", rows=[row | penalty])
    words = ("kl.estimator=exact",) if placement == "loss" else ()
    said = summary(RunFolder(tmp_path / "a"), settings(f"kl.placement={placement}", *words), 64)
    assert "penalty 0.15 reward per frame, kl.coef 0.3 " in said


@pytest.mark.parametrize(
    ("kls", "evaluated", "words", "remedy"),
    [
        ([0.0, 2.5e-6], None, (), "raise optim.lr=0.001 or lower kl.coef=0.1; do the rewards"),
        ([0.0], 3e-5, (), "raise optim.lr=0.001 or lower"),
        ([0.0, 2.5e-6], None, ("controller=held", "controller.target=0.1"), "raise optim.lr=0.001"),
        ([0.0], None, (), None),  # measured before the only update
        ([0.0, 2.5e-6], 0.01, (), None),
        ([0.0, 0.2, 2.5e-6], None, (), None),  # it returned to its reference
        ([0.9, 2.5e-6], None, ("advantage.reward_weight=0",), None),  # a student at its teacher
        ([0.0, 2.5e-6], None, ("reference=ema",), None),  # the reference follows
    ],
)
def test_a_policy_that_did_not_move_is_reported_with_a_remedy(
    settings, tmp_path, kls: list[float], evaluated: float | None, words, remedy: str | None
) -> None:
    rows = [{"iteration": 0, "frames": 0, "eval/return": 1.0, "eval/kl_ref": 0.0}]
    for i, kl in enumerate(kls, 1):
        row = {"iteration": i, "frames": 64 * i, "reward/raw": 1.0, "kl/ref/coef": 0.1}
        rows.append(row | {"kl/ref/exact": kl, "kl/ref/penalty": 0.1 * kl})
    if evaluated is not None:
        both = {"eval/kl_ref": evaluated, "eval/kl_ref_forward": evaluated}
        rows[-1] |= {"eval/return": 1.0, **both}
    write_run(tmp_path / "a", rows=rows)
    said = summary(RunFolder(tmp_path / "a"), settings(*words), 64)
    assert ("hardly moved: KL(policy||reference) at most" in said) == (remedy is not None)
    assert remedy is None or remedy in said


@pytest.fixture
def curvature(monkeypatch: pytest.MonkeyPatch) -> Metric:
    """A metric that is declared for the time of a test, and nowhere else."""
    metric = Metric(
        "learner/curvature",
        "curvature",
        "how bent the policy is",
        "nats per {unit} squared",
        digits=2,
        panel="kl",
        short="bent",
    )
    monkeypatch.setitem(METRICS, metric.name, metric)
    return metric


def bent_rows() -> list[dict]:
    return [{**row, "learner/curvature": 0.125} for row in rows_of()]


def test_a_metric_that_is_declared_is_drawn_in_its_panel(curvature, monkeypatch) -> None:
    from matplotlib.figure import Figure

    drawn = []

    def save(figure: Figure, path: Path, **_: object) -> None:
        drawn.append(figure)
        path.touch()

    monkeypatch.setattr(Figure, "savefig", save)
    draw_curves(bent_rows(), Path("curves.png"), "title", CONTROL)
    panels = {axes.get_title(): axes for axes in drawn[0].axes}
    assert list(panels) == ["Return", "KL", "Coefficient"]
    lines = {line.get_label(): line for line in panels["KL"].lines}
    assert list(lines) == ["KL(policy||reference)", "KL(old||new)", "curvature"]
    assert set(lines["curvature"].get_ydata()) == {0.125}
    assert panels["KL"].get_yscale() == "log"
    assert panels["KL"].get_ylabel() == "nats per frame, nats per frame squared"


@pytest.mark.parametrize("every", [1, 3, 0])
def test_a_kl_without_a_closed_form_is_drawn_by_k3_and_marked(every: int) -> None:
    rows = [{"samples": 0, "kl/ref/k3": 4e-14, "kl/old/k3": 0.0}]  # no such point
    for i in range(1, 7):
        row = {"samples": i, "kl/ref/k1": 9.0, "kl/ref/k3": 0.1 * i, "kl/old/k3": 0.01 * i}
        due = bool(every) and i % every == 0
        rows.append(row | ({"kl/ref/exact": 0.2 * i, "kl/old/exact": 0.02 * i} if due else {}))
    axes = {each.get_title(): each for each in curves_figure(rows, "title", LANGUAGE).axes}["KL"]
    lines = {line.get_label(): line for line in axes.lines}
    known = [i for i in range(1, 7) if every and i % every == 0]
    expected = {}
    for i in range(1, 7):
        mark, k = ("", 2) if i in known else (" by k3", 1)
        for name, size in (("KL(policy||reference)", 0.1), ("KL(old||new)", 0.01)):
            expected.setdefault(name + mark, []).append((i, pytest.approx(size * k * i)))
    assert {n: [*zip(*each.get_data(), strict=True)] for n, each in lines.items()} == expected
    assert {name for name, line in lines.items() if line.get_linestyle() == "--"} == {
        name for name in lines if name.endswith(" by k3")
    }
    progress = Progress(9, LANGUAGE, stream=io.StringIO())
    progress.show(rows[-1])
    mark = "" if every else " by k3"
    assert (
        f"| KL ref{mark} {rows[-1]['kl/ref/exact' if every else 'kl/ref/k3']:.4g} | KL old{mark} 0."
        in progress.line()
    )
    assert progress.line().count("KL ") == 2


def test_a_metric_that_is_declared_has_a_chart_in_the_report(curvature) -> None:
    write_run(Path("runs/a"), rows=bent_rows())
    assert exits("report", "runs") == 0
    page = Path("runs/report/report.html").read_text()
    assert "<figcaption>Curvature<small>how bent the policy is</small>" in page
    assert ">nats per frame squared (log)</text>" in page


def test_a_metric_that_is_declared_is_in_the_live_line_and_in_a_difference(
    curvature, capsys
) -> None:
    progress = Progress(2000, CONTROL, stream=io.StringIO())
    progress.show(bent_rows()[-1])
    assert "| bent 0.12" in progress.line()
    for name in "ab":
        write_run(Path(name), rows=bent_rows())
    assert exits("diff", "a", "b") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["learner/curvature", "0.12", "0.12", "0"] in lines


@pytest.mark.parametrize("domain, other", [(CONTROL, "samples"), (LANGUAGE, "frames")])
def test_wandb_has_every_metric_of_the_domain_against_its_axis(
    domain, other, curvature, settings, monkeypatch, tmp_path
) -> None:
    import wandb

    defined = {}

    class Run:
        id, starting_step, offline, disabled = "id", 1, True, False
        settings, summary = SimpleNamespace(log_internal=""), {}

        def define_metric(self, name: str, **more: object) -> None:
            defined[name] = more

        def finish(self, exit_code: int) -> None: ...

    monkeypatch.setattr(wandb, "init", lambda **_: Run())
    run, config = RunFolder(tmp_path), settings("logger=wandb")
    run.open(config)
    opened = LoggedRun(tmp_path, asdict(config), None, "id", domain, run.guard, list, print)
    with wandb_run(config.logger, opened):
        pass
    assert set(defined) == {*metrics_of(domain), "*"}
    assert other not in defined
    assert defined.pop(domain.axis) == {"step_metric": None, "hidden": True}
    assert {more["step_metric"] for more in defined.values()} == {domain.axis}
    hidden = {name for name, more in defined.items() if more.get("hidden")}
    assert hidden >= {"iteration", "eval/episodes", "eval/return_se", "time/update"}
    assert not hidden & {"eval/return", "kl/ref/exact", "time/iteration", "learner/lr"}


def test_the_score_of_the_live_line_is_the_mean_of_ten_rollouts() -> None:
    progress = Progress(100, LANGUAGE, stream=io.StringIO())
    for i in range(12):
        progress.show({"samples": i, "reward/episode": float(i)})
    assert progress.line().startswith("11/100 samples")
    assert "| sampled score 6.5 |" in progress.line()  # of 2 to 11
