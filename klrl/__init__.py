"""klrl: a laboratory for KL-regularised reinforcement learning on TorchRL.

``python -m klrl`` is the command line; :func:`run` and :func:`load_policy` do the same from Python.
Nothing here imports torch before it is needed.
"""

from typing import Any

from klrl._version import __version__

__all__ = ["__version__", "load_policy", "run"]


def __getattr__(name: str) -> Any:
    """Import the two functions that need torch on first use."""
    if name == "run":
        from klrl.experiment import run

        return run
    if name == "load_policy":
        from klrl.load import load_policy

        return load_policy
    raise AttributeError(f"module 'klrl' has no attribute {name!r}")
