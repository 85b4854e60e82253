"""KL transforms for control, imported on first use."""

from klrl.base.imports import lazy_attribute
from klrl.kl import WHERE

_WHERE = {name: module for name, module in WHERE.items() if module.startswith(f"{__name__}.")}
__all__ = list(_WHERE)


def __getattr__(name: str) -> object:
    return lazy_attribute(__name__, _WHERE, name)
