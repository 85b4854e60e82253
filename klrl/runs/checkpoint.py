"""Saves and loads the checkpoints of a run: the last two, and the best.

``checkpoints/last`` and ``checkpoints/best`` contain entries: folders ``frames-N``, written by
:mod:`klrl.runs.entry`. A new entry is written under a temporary name, synced to the disk, and
renamed; then older entries are removed. If the run was resumed, an entry with the new entry's name
may exist; it is removed just before the rename, so a kill in between loses it. ``last`` keeps two
entries, so that a run can resume from the older if the newer is damaged.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torchrl.checkpoint import GlobalRNGState

from klrl.base import ranks
from klrl.base.errors import ConfigError, RankError, first_line
from klrl.base.files import make_folder, sync
from klrl.base.text import warn
from klrl.runs.entry import CheckpointEntry, DamagedEntry, write_entry
from klrl.runs.find import no_checkpoint
from klrl.runs.folder import STAGING, UNREADABLE, remove_leftovers, run_id
from klrl.runs.one_run import other_run_error
from klrl.runs.state import Component, State

Say = Callable[[str], None]

#: Folder -> number of entries that it keeps; folder -> components that its entries leave out.
_KEPT = {"last": 2, "best": 1}
_LEFT_OUT: dict[str, set[str]] = {"last": set(), "best": {"optimizer", "rollout", "rollouts"}}
#: Components that an old entry may lack; without ``rollout``, a resumed run begins new episodes.
_MAY_LACK = {"rollout"}


class Counters:
    """A run's counters and its best return, as a component of checkpoints."""

    def __init__(self) -> None:
        self.iteration = 0
        self.frames = 0
        # With held-out data, this is the highest -nll/held_out.
        self.best_return: float | None = None
        self.best_iteration = 0

    def state_dict(self) -> dict[str, object]:
        """Return all attributes."""
        return dict(vars(self))

    def load_state_dict(self, state: State) -> None:
        """Restore all attributes."""
        best, self.best_iteration = state["best_return"], int(state["best_iteration"])
        self.iteration, self.frames = int(state["iteration"]), int(state["frames"])
        self.best_return = None if best is None else float(best)


class Generators(GlobalRNGState):
    """The global random generators of Python, numpy, and torch on the CPU and the run's GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators."""
        state = super().state_dict()
        if state.pop("torch_cuda", None) and self._device.type == "cuda":
            state["torch_cuda"] = [torch.cuda.get_rng_state(self._device)]
        return state

    def load_state_dict(self, state: State) -> None:
        """Restore the generators; ignore the GPU's if this run uses no GPU."""
        super().load_state_dict({k: v for k, v in state.items() if k != "torch_cuda"})
        if "torch_cuda" in state and self._device.type == "cuda":
            torch.cuda.set_rng_state(state["torch_cuda"][0].cpu(), self._device)


#: Bytes of an element -> the integers that have the same bits; elements of a checksum's piece.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 2**20


def checksum(value: torch.Tensor) -> int:
    """Return a number that changes if one element of a tensor changes; on the tensor's device."""
    words = value.detach().contiguous().reshape(-1).view(_INTEGERS[value.element_size()])
    total = 0
    for piece in words.split(_PIECE):
        places = torch.arange(1, len(piece) + 1, device=piece.device)
        total = (31 * total + int((piece.to(torch.int64) * places).sum())) % 2**61
    return total


class Checkpoints:
    """Saves named components of a run as ``last`` or ``best``, and restores them from ``last``."""

    def __init__(
        self, folder: Path, components: Mapping[str, Component], device: str | torch.device = "cpu"
    ) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)  # not later, when the run may have been moved
        self._components = {**components, "rng": Generators(torch.device(device))}
        self._refused: list[Path] = []

    def save(self, which: str, step: int, metadata: Mapping[str, object]) -> None:
        """Write an entry of ``last`` or ``best``, in rank 0; ``step`` is the number of frames.

        Raises:
            OSError: writing failed, as on a full disk; earlier entries are kept.
            RankError: the policies of the run's processes differ.
        """
        self._compare()
        ranks.first(partial(self._save, which, step, metadata))

    def _compare(self) -> None:
        """Compare the policies of the run's processes, by a digest of each tensor."""
        if ranks.world() == 1:
            return
        state = self._components["agent"].state_dict()
        digests = {name: checksum(each) for name, each in state.items() if torch.is_tensor(each)}
        found = ranks.gathered(digests)
        usual = max(found, key=found.count)
        for rank, each in enumerate(found):
            if each != usual:
                name = next(name for name in usual if usual[name] != each.get(name))
                raise RankError(
                    f"rank {rank}: its weights differ from those of the other processes, first in "
                    f"{name}; the last checkpoint is kept"
                )

    def _save(self, which: str, step: int, metadata: Mapping[str, object]) -> None:
        remove_leftovers(self._folder.parent)
        destination = self._folder / which / f"frames-{step:012d}"
        chosen = {n: c for n, c in self._components.items() if n not in _LEFT_OUT[which]}
        staging = self._staging()
        try:
            write_entry(staging, chosen, step, metadata)
            make_folder(destination.parent)
            if destination.exists():
                self._remove(destination)
            staging.rename(destination)
            sync(destination.parent)  # so that the new name is on the disk
            sync(self._folder)
            self._prune(destination)
        except OSError as error:
            error.filename = error.filename or str(destination)
            raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def load_last(self, device: torch.device) -> State:
        """Restore all components from the newest intact entry of ``last``; return its metadata.

        Rank 0 reads the entry, and sends each component's state to the other processes.
        """
        metadata = ranks.first(partial(self._newest, device))
        for component in self._components.values() if ranks.world() > 1 else ():
            state = ranks.first(component.state_dict)
            if ranks.rank():
                component.load_state_dict(state)
        return metadata

    def _newest(self, device: torch.device) -> State:
        for which in _KEPT:
            _refuse_foreign(self._folder / which, run_id(self._folder.parent), "resume")
        folder = self._folder / "last"
        entry, self._refused = _load(folder, self._components, device, warn, "resume")
        return entry.metadata

    def drop_best(self, after: int) -> bool:
        """Remove ``best`` entries of more than ``after`` frames; return whether one is left."""
        return ranks.first(partial(self._drop_best, after))

    def _drop_best(self, after: int) -> bool:
        entries = _newest_first(self._folder / "best")
        later = [path for path in entries if int(path.name.removeprefix("frames-")) > after]
        for path in later:
            self._remove(path)
        return len(later) < len(entries)

    # ----------------------------------------------------------------------------------- files

    def _staging(self) -> Path:
        # Not in ``last`` or ``best``, where a sweep would take the temporary folder for an entry.
        return self._folder / f"{STAGING}{uuid4().hex}"

    def _prune(self, written: Path) -> None:
        """Remove entries beyond the number to keep, and those that ``load_last`` found damaged."""
        others = [path for path in _newest_first(written.parent) if path != written]
        refused = [path for path in others if path in self._refused]
        # Count the new entry as the newest: entries from before a resume may have more frames.
        whole = [written, *(path for path in others if path not in refused)]
        for path in [*whole[_KEPT[written.parent.name] :], *refused]:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        """Rename an entry, then delete it: a half-deleted folder must not look like an entry."""
        gone = self._staging()
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def load_component(
    run: Path, which: str, name: str, module: Component, device: torch.device, say: Say = warn
) -> int:
    """Restore a component from a run's ``last`` or ``best``; return the frames of the entry.

    Calls ``say`` with a line for each damaged entry that was skipped.
    """
    folder = run / "checkpoints" / which
    if not _newest_first(folder):
        raise no_checkpoint(str(run), which)
    _refuse_foreign(folder, run_id(run), str(run))
    entry, _ = _load(folder, {name: module}, device, say, str(run))
    return entry.frames


def digests(run: Path, which: str, names: Sequence[str]) -> tuple[int, dict[str, str]] | None:
    """Return the frames of a run's newest intact entry, and component -> SHA-256 of its tensors.

    Components without tensors are left out. Returns None if no entry is intact.
    """
    for path in _candidates(run / "checkpoints" / which):
        try:
            entry = _checked(path)
        except DamagedEntry:
            continue
        return entry.frames, entry.digests(names)
    return None


# ---------------------------------------------------------------------------------------- reading


def _load(
    folder: Path, components: Mapping[str, Component], device: torch.device, say: Say, setting: str
) -> tuple[CheckpointEntry, list[Path]]:
    """Restore components from the newest intact entry; return it, and the skipped entries."""
    refused: dict[Path, DamagedEntry] = {}
    for path in _candidates(folder):
        try:
            entry = _checked(path)
            for name, component in components.items():
                _restore(component, entry.state(name, device), f"{setting}: {path}", name)
        except DamagedEntry as error:
            if path.exists():  # otherwise the run still trains, and has just removed the entry
                refused[path] = error
            continue
        for other, damage in refused.items():
            say(f"checkpoint {other} is refused ({damage}), so {path.name} is used")
        return entry, list(refused)
    why = [f"{path.name}/{damage}" for path, damage in refused.items()] or ["no entry found"]
    raise ConfigError(
        f"{setting}: {folder}: no complete checkpoint ({'; '.join(why)}); restore its files, or "
        "choose another run"
    )


def _refuse_foreign(folder: Path, run: str | None, setting: str) -> None:
    """Refuse entries of a different run, which this run would load or remove."""
    for path in _newest_first(folder) if run is not None else ():
        with suppress(DamagedEntry):  # ``_load`` reports the damage
            theirs = CheckpointEntry(path).metadata.get("run")
            if theirs != run:
                raise other_run_error(f"{setting}: {path}", theirs, run)


def _restore(component: Component, state: State | None, place: str, name: str) -> None:
    if state is None and name in _MAY_LACK:
        return
    if state is None:
        raise ConfigError(f"{place}: the checkpoint does not fit this run: it has no '{name}'")
    try:
        component.load_state_dict(state)
    except ConfigError as error:  # its message says what does not fit
        raise ConfigError(f"{place}: {first_line(error)}") from error
    # Modules, optimisers and klrl's components raise these if a state does not fit.
    except (RuntimeError, *UNREADABLE) as error:
        raise ConfigError(f"{place}: does not fit this run: {first_line(error)}") from error


def _checked(path: Path) -> CheckpointEntry:
    entry = CheckpointEntry(path)
    entry.check()
    if path.name.removeprefix("frames-").lstrip("0") != str(entry.frames).lstrip("0"):
        raise DamagedEntry(f"manifest.json: frames {entry.frames:,} contradict the folder's name")
    return entry


def _candidates(folder: Path) -> Iterator[Path]:
    """Yield entries, newest first; list the folder before each, since the run may add entries."""
    seen: set[Path] = set()
    while new := [path for path in _newest_first(folder) if path not in seen]:
        seen.add(new[0])
        yield new[0]


def _newest_first(folder: Path) -> list[Path]:
    """List the entries of ``last`` or ``best``, intact or damaged."""
    named = {path.name.removeprefix("frames-"): path for path in folder.glob("frames-*")}
    return [named[steps] for steps in sorted(filter(str.isdecimal, named), key=int, reverse=True)]
