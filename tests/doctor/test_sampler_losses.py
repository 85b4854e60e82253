"""The doctor on ``loss=dppo`` and each ``loss.sampler_weight``: right until a limit binds."""

from pathlib import Path
from runpy import run_path

import pytest

from klrl.doctor.loss import examine_loss
from klrl.doctor.user_loss import Loss
from klrl.losses.sampler import WEIGHTS

EXAMPLES = run_path(str(Path(__file__).parents[2] / "docs" / "examples" / "losses.py"))
FREE = {"cap": 1e9, "low": 1e-9, "high": 1e9}
#: Weight -> what the doctor finds three updates from the sampler, with klrl's limits, per token.
FOUND = {
    "truncate": set(),  # no weight is above 2 on these problems; above 1.2 some are
    "mask": {"return_clipped", "return_clip_max"},
    "mask_response": {"return_clipped"},
    "mask_geometric": {"return_clipped", "no_return", "return_unknown"},
}


def codes(name: str, scope: str, stale: int, **how: object) -> set[str]:
    loss = Loss(name, EXAMPLES[name], how, "loss", "none")
    report = examine_loss(loss, scope=scope, stale=stale, seeds=3)
    return {fault.code for kind in report.kinds for fault in kind.faults}


@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_weight_is_right_until_its_limit_binds(weight: str) -> None:
    assert codes("sampler_weighted", "sequence", 0, weight=weight) == set()
    assert codes("sampler_weighted", "token", 3, weight=weight) == FOUND[weight]
    assert codes("sampler_weighted", "token", 3, weight=weight, **FREE) == set()
    whole = codes("sampler_weighted", "sequence", 3, weight=weight, **FREE)
    assert whole == (set() if weight == "mask_response" else {"return_weight_token"})


def test_a_cap_that_binds_is_found() -> None:
    assert codes("sampler_weighted", "token", 3, cap=1.2) != set()


def test_dppo_is_right_within_its_region() -> None:
    assert codes("dppo", "token", 0) == set()
    assert codes("dppo", "token", 3) == {"return_clipped"}
    assert codes("dppo", "token", 3, delta=1.0) == set()
    assert codes("dppo", "sequence", 3, delta=1.0) == {"return_weight_token"}
