"""The processor: its short name decides how a run rounds, its instructions what machine code is."""

from __future__ import annotations

import platform
import re
from pathlib import Path


def processor() -> str:
    """Name what decides how a run on a CPU rounds: the processor and its instructions, and BLAS.

    Machines with one model name may differ in family, model and stepping.
    """
    import torch

    found = dict(re.findall(r"^(model name|cpu family|model|stepping)\s*: (.*)$", _first(), re.M))
    name = found.pop("model name", platform.machine())
    blas = "MKL" if torch.backends.mkl.is_available() else "no MKL"
    used = (torch.backends.cpu.get_cpu_capability(), blas)
    return ", ".join((name, *(f"{key} {value}" for key, value in found.items()), *used))


def instructions() -> str:
    """Return :func:`processor` with all flags, since machine code runs only where they are."""
    flags = re.findall(r"^(?:flags|Features)\s*: (.*)$", _first(), re.M)
    return ", ".join((processor(), *flags))


def _first() -> str:
    """Linux's description of the first processor; empty elsewhere."""
    info = Path("/proc/cpuinfo")
    return info.read_text("utf-8").partition("\n\n")[0] if info.exists() else ""
