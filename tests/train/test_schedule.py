"""When a run is evaluated, and how much."""

from dataclasses import replace
from functools import cache

import pytest

from klrl.config import JobConfig
from klrl.config.checks import to_config
from klrl.config.compose import compose
from klrl.domains import CONTROL, LANGUAGE
from klrl.train.schedule import Schedule, fitting, schedule
from klrl.train.scores import Size


def of(*words: str, longest: int | None) -> Schedule:
    return schedule(to_config(compose(list(words))), longest)


def test_the_main_job_is_evaluated_ten_times() -> None:
    """98 iterations of 1,024 frames; ten times 15 episodes of 200 steps are .3 of them."""
    main = of("env=pendulum", longest=200)
    assert sorted(main.iterations) == [0, 11, 22, 33, 44, 54, 65, 76, 87, 98]
    assert (fitting(main.size, 200), main.size.steps) == (15, 3010)
    assert fitting(main.closing, 200) == 900
    assert (
        main.line(CONTROL, 200)
        == "evaluations: 10 during the run (15 to 20 episodes each), then 900 episodes at the end"
    )
    few = main.line(CONTROL, 200, (16, 7))
    assert (
        few == "evaluations: 10 during the run (15 to 16 episodes each), then 7 episodes at the end"
    )


def test_an_evaluation_has_a_whole_episode_however_long() -> None:
    """Two of 12,000 steps need more than eval.steps; without a share for them there is none."""
    long = of("env=pendulum", "frames=1e6", longest=12_000)
    assert long.iterations
    assert fitting(long.size, 12_000) >= 2
    short = of("env=pendulum", "frames=4096", longest=12_000)
    assert not short.iterations
    every = of("env=hopper", "eval.every=10", "eval.steps=500", longest=1_000)
    assert fitting(every.size, 1_000) == 2


@cache
def job(env: str) -> JobConfig:
    """The preset's."""
    return to_config(compose([f"env={env}"]))


@pytest.mark.parametrize("env", ["pendulum", "half_cheetah", "hopper", "cartpole"])
@pytest.mark.parametrize("frames", [1_000, 4_096, 30_000, 100_000, 300_000, 1_000_000, 10_000_000])
@pytest.mark.parametrize("longest", [15, 200, 1_000, None])
def test_all_together_take_their_share_at_most(env: str, frames: int, longest) -> None:
    config = replace(job(env), frames=frames)
    planned = schedule(config, longest)
    steps = longest or 1_000
    each = fitting(planned.size, longest)
    trained = config.iterations * config.frames_per_iteration
    assert len(planned.iterations) <= 10
    assert each <= 20
    assert each * steps <= 10_000
    assert len(planned.iterations) * (planned.size.steps or 0) <= config.eval.share * trained
    if planned.iterations:
        assert {0, config.iterations} <= planned.iterations
        # A quarter of 20 episodes at least.
        assert each >= (2 if len(planned.iterations) == 2 else 5)
    else:
        assert config.eval.share * trained < 2 * 2 * steps
    # Where a step costs little, the closing evaluation may take more than half the frames.
    final, most = (900, int(1.8 * trained)) if env == "pendulum" else (100, trained // 2)
    assert fitting(planned.closing, longest) == max(2, min(final, most // steps))


@pytest.mark.parametrize(
    ("words", "iterations"),
    [
        (["eval.every=3"], {3, 6, 9, 10}),
        (["eval.every=5"], {5, 10}),
        (["eval.every=50"], {10}),
        (["eval.evaluations=1"], {10}),
        (["eval.evaluations=2"], {0, 10}),
        (["eval.evaluations=3"], {0, 5, 10}),
        (["eval.evaluations=50"], set(range(11))),
        (["eval.every=0"], set()),
        (["eval.evaluations=0"], set()),
    ],
    ids=lambda value: str(value),
)
def test_when(words: list[str], iterations: set[int]) -> None:
    """Ten iterations of 1,024 frames; an episode is of 10 steps."""
    planned = of("env=pendulum", "frames=10240", *words, longest=10)
    assert planned.iterations == iterations
    assert (planned.closing.episodes == 0) == (not iterations)


def test_every_says_how_often_whatever_it_costs() -> None:
    planned = of("env=pendulum", "frames=10240", "eval.every=1", longest=200)
    assert len(planned.iterations) == 10
    assert fitting(planned.size, 200) == 20


def test_an_episode_that_is_longer_than_the_share_is_left_to_the_end() -> None:
    planned = of("env=half_cheetah", "frames=8192", longest=1_000)
    assert not planned.iterations
    assert fitting(planned.closing, 1_000) == 4
    assert planned.line(CONTROL, 1_000) == (
        "evaluations: none during the run (eval.share is too small for evaluations at start and "
        "end), then 4 to 100 episodes at the end"
    )


def test_language_counts_responses() -> None:
    """A quarter of 10,240 samples are ten times 256."""
    planned = of("experiment=sort_digits", longest=1)
    assert sorted(planned.iterations) == [0, 4, 9, 13, 18, 22, 27, 31, 36, 40]
    assert planned.size == Size(256, 256)
    assert fitting(planned.closing, 1) == 512
    # A response is one step, so the steps of an evaluation are its responses.
    few = of("experiment=sort_digits", "frames=1024", longest=1).line(LANGUAGE, 1)
    assert few == (
        "evaluations: 4 during the run (64 responses each), then 512 responses at the end"
    )
