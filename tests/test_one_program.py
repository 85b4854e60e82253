"""Control and language are one program: on one step and one token they give the same numbers.

Both domains get the problem of ``tests/one_step.py`` (the same logits of pi_old, pi_theta and
pi_ref, the same values and scores) and the settings that a user types, and take one iteration of a
run. What they charge, measure, estimate, minimise (with its gradient) and record is compared with
each other and with the closed form.

The parameters are all that the registry and the table of placements hold. What is added there fails
here, by name, until its closed form is written in ``tests/one_step.py``.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from torch import Tensor

from klrl.config import CHOICES, CONTROL, LANGUAGE, JobConfig, choices_for
from klrl.config.compose import Composer
from klrl.config.overrides import parse
from klrl.config.placement import DIVERGENCES, ESTIMATORS, PLACEMENTS, VERDICTS, Gradient
from tests.one_step import (
    BETA,
    COEF,
    KL_OLD,
    LR,
    OLD,
    THETA,
    D,
    G,
    Numbers,
    closed_form,
    entropy,
    kl,
    known,
)
from tests.one_step_runs import RUNS, iterate, language_run, shared

BOUND = 1e-12


COMPOSER = Composer()
#: Each pass is one minibatch, and Adam's eps so large that its step moves nothing.
BOTH = (
    *("device=cpu", "learner.minibatches=1", "learner.compile=false"),
    *(f"optim.lr={LR}", "optim.eps=1e30", "optim.max_grad_norm=1e6"),
)
JOB = {
    CONTROL: ("env=cartpole", "env.normalize_observation=false", *BOTH),
    LANGUAGE: (
        "experiment=sort_digits",
        f"collector.prompts={D}",
        f"collector.group_size={G}",
        *BOTH,
    ),
}
#: Two ways to set all else.
SHARED = {
    "plain": ("loss.normalize_advantage=false", "loss.entropy_coeff=0.05", "learner.epochs=1"),
    "other": ("loss.normalize_advantage=true", "loss.entropy_coeff=0.1", "learner.epochs=2"),
}
ADVANTAGE_WORDS = {
    "gae": {
        "plain": ("loss.critic_coeff=0.4", "loss.loss_critic_type=l2"),
        "other": (
            "loss.critic_coeff=0.6",
            "loss.loss_critic_type=smooth_l1",
            "loss.clip_value=0.1",
            "advantage.reward_weight=0.6",
        ),
    },
    "group": {
        "plain": ("advantage.baseline=normalized", "advantage.reward_weight=0.4"),
        "other": ("advantage.baseline=leave_one_out", "advantage.reward_weight=0.6"),
    },
}
#: KL(old||new) ends at KL_OLD: far above the target, or near it, where no line search is due.
PENALTY_WORDS = {
    "plain": (f"loss.beta={BETA}", f"loss.dtarg={KL_OLD / 2}", "loss.line_search=none"),
    "other": (f"loss.beta={BETA}", f"loss.dtarg={KL_OLD * 0.8}", "loss.kl_old=sampled"),
}
LOSS_WORDS = {
    "klpen": PENALTY_WORDS,
    "klpen_held": PENALTY_WORDS,
    "clip": {"plain": (), "other": (f"loss.target_kl={KL_OLD / 2}",)},
}
#: On one token ``sequence`` is the mean that ``token`` is.
REDUCTION = {
    CONTROL: {"plain": "mean", "other": "mean"},
    LANGUAGE: {"plain": "token", "other": "sequence"},
}


def kl_words() -> Iterator[str]:
    """Every choice of ``kl``, and of kl=retrieve all that is not refused."""
    for name in CHOICES["kl"]:
        if name != "retrieve":
            yield f"kl={name}" + (f" kl.coef={COEF}" if name != "none" else "")
            continue
        for placement, estimator in itertools.product(PLACEMENTS, ESTIMATORS):
            verdict = VERDICTS[placement][estimator]
            if verdict is not Gradient.TWICE:
                biased = " kl.allow_biased=true" if verdict is Gradient.WRONG else ""
                pair = f"kl.placement={placement} kl.estimator={estimator}"
                yield f"kl=retrieve kl.coef={COEF} {pair}{biased}"
        for placement, divergence in itertools.product(("loss", "split"), DIVERGENCES[1:]):
            words = f"kl.placement={placement} kl.estimator=exact kl.divergence={divergence}"
            yield f"kl=retrieve kl.coef={COEF} {words}"


@cache
def job(domain: str, loss: str, kl: str, advantage: str, settings: str, *more: str) -> JobConfig:
    """A job of these choices, composed and checked as a user's."""
    words = [*JOB[domain], f"loss={loss}", f"loss.reduction={REDUCTION[domain][settings]}"]
    words += known(LOSS_WORDS, "loss", loss)[settings]
    words += [f"advantage={advantage}", *known(ADVANTAGE_WORDS, "advantage", advantage)[settings]]
    return COMPOSER.job_config(parse([*words, *SHARED[settings], *kl.split(), *more]))


def domains(**chosen: str) -> list[str]:
    """Those that have all of these choices."""
    return [d for d in JOB if all(name in choices_for(g, d) for g, name in chosen.items())]


def close(a: Tensor, b: Tensor) -> bool:
    """Within the bound everywhere; a NaN never is."""
    return a.shape == b.shape and bool(((a == b) | ((a - b).abs() < BOUND)).all())


def assert_same(numbers: Numbers, expected: Numbers) -> None:
    """The same names and numbers."""
    assert set(numbers) == set(expected)
    wrong = [name for name in numbers if not close(numbers[name], expected[name])]
    far = {name: float((numbers[name] - expected[name]).abs().max()) for name in wrong}
    assert not far, f"largest differences: {far}"


#: Custom parts are compared with klrl's in tests/extending; trpo is control's alone; dppo is
#: language's alone, and enumerated in tests/losses/test_sampler; nll has data, and is compared with
#: torch and transformers (test_demonstrations, test_answers_learned).
LOSS = pytest.mark.parametrize(
    "loss", [n for n in CHOICES["loss"] if n not in ("custom", "trpo", "dppo", "nll")]
)
KL = pytest.mark.parametrize("kl", list(kl_words()))
EITHER = pytest.mark.parametrize(
    "advantage", [name for name in CHOICES["advantage"] if name != "custom"]
)
SETTINGS = pytest.mark.parametrize("settings", SHARED)


@pytest.mark.integration
@LOSS
@KL
@EITHER
@SETTINGS
def test_control_and_language_give_the_same_numbers(loss, kl, advantage, settings) -> None:
    having = domains(loss=loss, kl=kl.split()[0].partition("=")[2], advantage=advantage)
    jobs = {domain: job(domain, loss, kl, advantage, settings) for domain in having}
    numbers = {domain: iterate(RUNS[domain](config)) for domain, config in jobs.items()}
    for domain in having:
        assert_same(shared(numbers[domain]), closed_form(jobs[domain]))
    if len(having) == 2:
        assert_same(*map(shared, numbers.values()))


@pytest.mark.integration
@LOSS
@KL
@EITHER
@SETTINGS
def test_padding_changes_no_number(loss, kl, advantage, settings) -> None:
    """A response's second position is padding: whatever stands there counts nowhere."""
    config = job(LANGUAGE, loss, kl, advantage, settings)
    expected = closed_form(config)
    fill = 1e3 if settings == "plain" else math.nan
    assert_same(shared(iterate(language_run(config, fill))), expected)


@LOSS
def test_without_a_bonus_entropies_differ(loss) -> None:
    """Control measures pi_theta's; language pi_old's, which its own tokens give at no cost."""
    for domain, logits in {CONTROL: THETA, LANGUAGE: OLD}.items():
        config = job(domain, loss, "kl=none", "gae", "plain", "loss.entropy_coeff=0")
        numbers = iterate(RUNS[domain](config))
        assert close(numbers["row/policy/entropy"], entropy(logits).mean()), domain
        assert numbers["row/loss/entropy"] == 0


def test_a_line_search_ends_at_the_same_step() -> None:
    """It goes from pi_old towards pi_theta until KL(old||new) is within a tenth of dtarg."""
    words = ("loss.line_search=both", f"loss.dtarg={KL_OLD / 2}")
    jobs = {domain: job(domain, "klpen_held", "kl=none", "gae", "plain", *words) for domain in JOB}
    numbers = {domain: shared(iterate(RUNS[domain](config))) for domain, config in jobs.items()}
    assert_same(*numbers.values())
    alpha, ended = (numbers[CONTROL][f"row/{n}"] for n in ("learner/alpha", "kl/old/exact"))
    assert 0 < alpha < 1
    assert close(ended, kl(OLD, OLD + alpha * (THETA - OLD)).mean())
    assert abs(math.log(ended / (KL_OLD / 2))) < 0.1


def test_a_response_of_one_token_has_that_tokens_kl() -> None:
    numbers = iterate(language_run(job(LANGUAGE, "clip", "kl=retrieve", "gae", "plain")))
    for name in ESTIMATORS:
        assert close(numbers[f"row/kl/ref/{name}_seq"], numbers[f"row/kl/ref/{name}"])


def test_a_choice_without_a_closed_form_is_named() -> None:
    config = job(CONTROL, "clip", "kl=none", "gae", "plain")
    spo = replace(config, loss=replace(config.loss, name="spo"))
    with pytest.raises(pytest.fail.Exception, match="loss=spo is compared nowhere"):
        closed_form(spo)
