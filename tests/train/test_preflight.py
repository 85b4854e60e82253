"""Checks before the first iteration: a line with a number each, fatal where one fails."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from klrl.base.errors import ConfigError
from klrl.control.run.kl import preflight_checks
from klrl.domains import CONTROL, LANGUAGE
from klrl.kl.reference import FrozenReference, OtherPolicyReference
from klrl.runs.folder import RunFolder
from klrl.train.loop import Training
from klrl.train.preflight import Check, kl_at_start, run_checks


def test_a_check_is_a_line() -> None:
    check = Check("x", 0.25, 0.5, "y", "do z")
    assert str(check) == "x: 0.25 (at most 0.5) ok; y"
    assert str(dataclasses.replace(check, value=1.0)) == "x: 1 (at most 0.5) FAILED; y"
    assert run_checks(["a note", check]) == ["preflight: a note", f"preflight: {check}"]


@pytest.mark.parametrize("value", [0.51, math.inf, math.nan])
def test_the_first_check_that_fails_ends_the_run_with_its_remedy(value: float) -> None:
    checks = iter([Check("x", value, 0.5, remedy="do z"), Check("later", 0.0, 0.0)])
    with pytest.raises(ConfigError) as error:
        run_checks(checks)
    assert str(error.value) == f"preflight: x: {value:g} (at most 0.5) FAILED; do z"
    assert next(checks).name == "later", "what costs time is not run any more"


def test_kl_at_the_start_is_a_mean_over_what_is_real() -> None:
    kl = torch.tensor([[0.5, -0.25], [0.25, math.nan]])
    mask = kl.isfinite()
    check = kl_at_start(kl, LANGUAGE, torch.float32, "", mask)
    assert check.name == "KL(policy||reference) at the start, nats/token"
    assert check.value == pytest.approx(0.5 / 3)
    assert not kl_at_start(kl, CONTROL, torch.float32, "").ok
    assert kl_at_start(kl[:1], CONTROL, torch.float32, "").value == pytest.approx(0.125)
    assert not kl_at_start(-kl[:1], CONTROL, torch.bfloat16, "").ok


def test_a_reference_that_forbids_what_the_policy_allows_is_refused() -> None:
    check = kl_at_start(torch.tensor([math.inf]), LANGUAGE, torch.float32, None)
    with pytest.raises(
        ConfigError, match="FAILED; the reference forbids what the policy allows; c"
    ):
        run_checks([check])


@pytest.mark.integration
def test_a_control_run_with_another_reference_says_how_far_it_starts(settings) -> None:
    """Of another run, and of the user; where the policy starts at that run, 0."""
    Training(settings("frames=512", "optim.lr=0.1", "eval.every=0")).train(RunFolder(Path("t")))
    lines = {}
    for init in ([], ["actor.init=t"]):
        words = (*init, "reference=checkpoint", "reference.path=t")
        [lines[bool(init)]] = Training(settings(*words)).parts.preflight
    start = "preflight: KL(policy||reference) at the start, nats/frame: "
    assert float(lines[False].removeprefix(start).split(";")[0]) > 1e-3
    assert "; the reference is not where the policy starts" in lines[False]
    assert lines[True].startswith(start + "0")
    assert "not where" not in lines[True]


@pytest.mark.parametrize("actor", ["normal", "tanh_normal"])
def test_a_control_run_says_that_it_starts_at_its_reference(actor: str, settings) -> None:
    training = Training(settings(f"actor={actor}"))
    line = "preflight: KL(policy||reference) at the start, nats/frame: 0 (at most 1e-05) ok"
    assert training.parts.preflight == [line]
    assert Training(settings("kl=none")).parts.preflight == []


def test_a_reference_that_is_not_the_policy_is_refused(settings) -> None:
    """A mean that is .01 off, at a standard deviation of 1: KL = .01^2 / 2 = 5e-5 nats."""
    config = settings("actor=normal", "actor.init_std=1")
    parts = Training(config).parts
    state = torch.get_rng_state()
    with torch.no_grad():
        parts.agent.policy_net.head.bias += 0.01
    with pytest.raises(ConfigError, match=r"nats/frame: 5e-05 \(at most 1e-05\) FAILED; report"):
        preflight_checks(parts.agent, parts.reference)
    rule = OtherPolicyReference(parts.reference.rule.config)
    other = FrozenReference(rule, parts.reference.module)
    [line] = preflight_checks(parts.agent, other)
    assert "start, nats/frame: 5e-05; the reference is not where the policy starts" in line
    with torch.no_grad():
        parts.agent.policy_net.head.bias -= 0.01
    [line] = preflight_checks(parts.agent, other)
    assert "not where" not in line
    assert torch.equal(torch.get_rng_state(), state), "the run draws what it would have drawn"
