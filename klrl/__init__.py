"""klrl: a laboratory for KL-regularised reinforcement learning on TorchRL.

To train a policy, use the command line ``klrl`` (or ``python -m klrl``), or :func:`run` in Python.
For your own training loop, ``klrl.kl`` has transforms and controllers, ``klrl.losses`` has losses.
``import klrl`` does not import torch.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from klrl.base.imports import lazy_attribute
from klrl.base.programs import protect

__all__ = [
    "Callback",
    "Run",
    "Sweep",
    "__version__",
    "compose",
    "kl",
    "load_policy",
    "load_run",
    "losses",
    "multirun",
    "run",
]

__version__ = "0.4.0"

_WHERE = {
    "Callback": "klrl.train.callbacks",
    "Run": "klrl.api",
    "Sweep": "klrl.api_sweep",
    "compose": "klrl.api",
    "load_policy": "klrl.api",
    "load_run": "klrl.api",
    "multirun": "klrl.api_sweep",
    "run": "klrl.api",
}

if find_spec("fcntl") is None:  # Windows has no fcntl
    print("klrl: runs on Linux and macOS; on Windows, install it in WSL", file=sys.stderr)
    raise SystemExit(2)
protect()


def __getattr__(name: str) -> Any:
    if name in ("kl", "losses"):
        return import_module(f"klrl.{name}")
    return lazy_attribute(__name__, _WHERE, name)


def __dir__() -> list[str]:
    """List the public names, which are imported on first use."""
    return sorted(__all__)
