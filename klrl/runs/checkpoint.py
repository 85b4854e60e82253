"""Checkpoints of a run, through ``torchrl.checkpoint`` in its pickle-free formats.

``checkpoints/last`` and ``checkpoints/best`` are rotations that keep one entry each. A new entry is
complete before the old one goes, so a run that is killed at any moment keeps a whole one. (Saving
over one folder leaves a moment without it: torchrl's replacement is two renames.)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torchrl.checkpoint import Checkpoint, CheckpointRotation, GlobalRNGState

from klrl.base.errors import ConfigError, first_line


class Counters:
    """The numbers of a run that no module holds, as one checkpoint component.

    Attributes:
        iteration: rollouts done.
        frames: environment steps done.
        best_return: the best evaluation so far.
    """

    def __init__(self) -> None:
        self.iteration = 0
        self.frames = 0
        self.best_return: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """All of them."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them up; unknown names are an error."""
        unknown = set(state) - set(vars(self))
        if unknown:
            raise KeyError(f"checkpoint counters {sorted(unknown)} are unknown to this version")
        vars(self).update(state)


class Checkpoints:
    """The two rotations of a run.

    Args:
        folder: ``checkpoints`` of the run folder.
        components: named objects with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, folder: Path, components: Mapping[str, Any]) -> None:
        self._checkpoint = Checkpoint(**components, rng=GlobalRNGState())
        self._rotations = {name: _rotation(folder / name) for name in ("last", "best")}

    def save(self, which: str, step: int, metadata: Mapping[str, Any]) -> None:
        """Write ``last`` or ``best``; ``step`` is the run's frames."""
        rotation = self._rotations[which]
        latest = rotation.latest()
        if latest is None or Checkpoint.manifest(latest)["metadata"].get("frames") != step:
            rotation.save(self._checkpoint, step=step, metadata={**metadata, "frames": step})

    def load_last(self, device: torch.device) -> None:
        """Restore every component from ``last``.

        Raises:
            ConfigError: there is none, or it was made with other settings.
        """
        try:
            self._rotations["last"].load_latest(self._checkpoint, map_location=device)
        except (FileNotFoundError, RuntimeError) as error:
            raise ConfigError(f"resume: {error}; the checkpoint does not fit this run") from error


def load_component(run: Path, which: str, name: str, module: Any, device: torch.device) -> int:
    """Restore one component of another run.

    Args:
        run: the run folder.
        which: last or best.
        name: the component.
        module: takes its state.
        device: where tensors go.

    Returns:
        The frames that the run had seen.

    Raises:
        ConfigError: no such checkpoint, or the state does not fit the module.
    """
    latest = _rotation(run / "checkpoints" / which).latest()
    if latest is None:
        raise ConfigError(f"{run}: has no checkpoint '{which}'; choose another of last, best")
    try:
        loaded = Checkpoint(**{name: module}).load(latest, map_location=device)
    except RuntimeError as error:
        why = first_line(error)
        raise ConfigError(f"{latest}: does not fit this network: {why}") from error
    return int(loaded.manifest["metadata"]["frames"])


def _rotation(folder: Path) -> CheckpointRotation:
    return CheckpointRotation(folder, keep_last=1, prefix="frames")
