"""KLPENPPOLoss and ClipPPOLoss, importable as from ``torchrl.objectives``."""

from klrl.base.imports import lazy_attribute
from klrl.losses import WHERE

__all__ = list(WHERE)


def __getattr__(name: str) -> object:
    return lazy_attribute(__name__, WHERE, name)
