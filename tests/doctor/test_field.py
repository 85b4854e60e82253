"""Losses as the field writes them: right ones pass under their name, the fault of others is named."""

from pathlib import Path

import pytest

from klrl.doctor.loss import LossReport, examine_loss, report_text
from klrl.doctor.problems import KINDS

FIELD = Path(__file__).with_name("field.py")
ONE, THREE, MANY = (kind.name for kind in KINDS)


def examine(name: str, options: str = "", seeds: int = 6) -> LossReport:
    """With options as of the command line, without their dashes."""
    words = options.split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    return examine_loss(f"{FIELD}:{name}", seeds=seeds, **given)  # type: ignore[arg-type]


def codes(report: LossReport) -> dict[str, list[str]]:
    """kind -> what is wrong with it."""
    return {k.name: [f.code for f in k.faults] for k in report.kinds if k.faults}


def everywhere(*faults: str) -> dict[str, list[str]]:
    return dict.fromkeys((ONE, THREE, MANY), list(faults))


def longer(*faults: str) -> dict[str, list[str]]:
    """For one step there is no difference."""
    return dict.fromkeys((THREE, MANY), list(faults))


#: loss, options, a phrase of the objective
RIGHT = [
    ("forward_distillation", "divergence forward", "the forward KL(ref||pi) of each step alone"),
    ("forward_of_sequences", "divergence forward scope sequence", "KL(ref||pi) of whole episodes"),
    (
        "forward_everywhere",
        "divergence forward scope sequence placement split",
        "KL(ref||pi) of each step on pi's way, later states counted",
    ),
    ("js_of_steps", "divergence js", "the Jensen-Shannon divergence of pi and ref of each step"),
    ("tv_of_steps", "divergence tv", "the total variation of pi and ref of each step alone"),
    ("tv_of_sequences", "divergence tv scope sequence", "total variation of pi and ref of whole"),
    ("whitened_shaped", "", "the reverse KL(pi||ref) of whole episodes"),
    ("policy_gradient", "divergence none", "E[return],"),
    ("own_step", "scope token", "the reverse KL(pi||ref) of each step alone"),
]


@pytest.mark.parametrize(("name", "options", "objective"), RIGHT)
def test_right_losses_pass_under_their_own_name(name: str, options: str, objective: str) -> None:
    report = examine(name, options)
    assert codes(report) == {}
    assert objective in report_text(report)
    for kind in report.kinds:
        assert kind.cosine.min > 1 - 1e-12
        assert kind.error.max < 1e-6


#: loss, options, its faults, a phrase of the verdict
WRONG = [
    ("js_of_steps", "", everywhere("is_js_token"), "add --divergence js --scope token"),
    (
        "forward_of_sequences",
        "",
        {ONE: ["forward_kl"], **longer("is_forward_sequence")},
        "add --divergence forward --scope sequence",
    ),
    ("own_step", "divergence forward", everywhere("is_reverse_token"), "KL(pi||ref) of each step"),
    ("forward_of_sequences", "divergence forward", longer("is_forward_sequence"), "of whole"),
    ("whitened_shaped", "divergence forward", everywhere("mixture"), "+ 1.00 x the KL of later"),
    ("per_response", "divergence none", {MANY: ["return_length"]}, "divided by its own length"),
]


@pytest.mark.parametrize(("name", "options", "expected", "words"), WRONG)
def test_wrong_losses_are_named(name: str, options: str, expected: dict, words: str) -> None:
    report = examine(name, options)
    assert not report.ok
    assert codes(report) == expected
    assert words in report_text(report)


def test_whitening_is_a_factor_that_depends_on_coef() -> None:
    report = examine("whitened_shaped")
    assert report_text(report).endswith("problem, up to a factor that depends on coef")
    assert all(kind.varies for kind in report.kinds)
    assert not any(kind.varies for kind in examine("policy_gradient", "divergence none").kinds)
