"""The budget of ``budget.py``: what an iteration asks of a GPU does not grow unseen."""

from __future__ import annotations

import pytest

from tests.device.budget import budget

#: As counted with torch 2.13; a categorical's KL takes 8 to be inf where pi_ref forbids an action.
MOST = {"main job": 121, "main job, KL in the loss": 140, "clip, categorical": 102}


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    return budget()


def test_nothing_waits_between_two_minibatches(found: dict[str, float]) -> None:
    waits = {name: number for name, number in found.items() if "between two minibatches" in name}
    assert len(waits) == 6
    assert set(waits.values()) == {0}


def test_a_captured_step_is_one_graph(found: dict[str, float]) -> None:
    """One replay, two copies into its inputs and one of its metrics out."""
    captured = {name: number for name, number in found.items() if name.endswith("step, captured")}
    assert len(captured) == 3
    assert set(captured.values()) == {4}


def test_an_eager_step_launches_no_more_than_it_did(found: dict[str, float]) -> None:
    for name, most in MOST.items():
        assert found[f"{name}: launches per gradient step, eager"] <= most


def test_an_environment_step_copies_once_in_and_once_out(found: dict[str, float]) -> None:
    assert found["copies in per environment step, pixels"] == 1
    assert found["copies out per environment step, pixels"] == 1


def test_a_decoded_token_waits_once(found: dict[str, float]) -> None:
    assert found["waits per decoded token"] == 1
