"""What the doctor's reports on a loss say."""

from klrl.doctor.loss import LossReport
from klrl.doctor.problems import KINDS

ONE, THREE, MANY = (kind.name for kind in KINDS)
#: Kind of problem -> codes of its faults.
Faults = dict[str, list[str]]


def codes(report: LossReport) -> Faults:
    """What is wrong with each kind."""
    return {k.name: [f.code for f in k.faults] for k in report.kinds if k.faults}


def everywhere(*faults: str) -> Faults:
    return {kind: list(faults) for kind in (ONE, THREE, MANY)}


def longer(*faults: str) -> Faults:
    """For one step there is no difference."""
    return {kind: list(faults) for kind in (THREE, MANY)}
