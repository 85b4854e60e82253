"""The processes (ranks) that train one run together, started by torchrun; else there is one.

Each process calls each function here in the same order, with the values that its docstring names.
Without torchrun each function returns its argument, and torch.distributed is not imported.

torchrun sets the environment variables: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from klrl.base.errors import ConfigError, RankError, first_line

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
#: How long a process waits for the others to start.
_STARTING = timedelta(minutes=10)
#: How long a process that fails waits for rank 0 to end.
_ENDING = timedelta(seconds=10)


def world() -> int:
    """Return the number of processes of this run."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def rank() -> int:
    """Return this process's number, 0 .. world - 1; 0 owns the folder, rewards and evaluations."""
    return int(os.environ["RANK"]) if world() > 1 else 0


def local_rank() -> int | None:
    """Return this process's number on its machine, which is that of its GPU; None if alone."""
    return int(os.environ["LOCAL_RANK"]) if world() > 1 else None


class _Links:
    """The open process group: ``all`` ranks, by gloo for the CPU and NCCL for GPUs."""

    all: Any = None
    #: How many groups this process has opened; each has its own names in torchrun's store.
    opened: int = 0


@contextmanager
def joined() -> Iterator[None]:
    """Connect the processes, inside the context; the inner of two contexts does nothing."""
    if world() == 1 or _Links.all is not None:
        yield
        return
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    with _answered():
        store = dist.PrefixStore(f"klrl{_Links.opened}", next(dist.rendezvous("env://"))[0])
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            timeout=_STARTING,
            store=store,
            rank=rank(),
            world_size=world(),
        )
    _Links.all = dist.group.WORLD
    _Links.opened += 1
    failed = True
    try:
        yield
        failed = False
    finally:
        _Links.all = None
        dist.destroy_process_group()
        # When a process ends with an error, torchrun ends the others: so rank 0, which closes the
        # record and prints the error, ends first.
        with suppress(RuntimeError):  # rank 0 was killed, and its store with it
            if not rank():
                store.set("ended", "")
            elif failed:
                store.wait(["ended"], _ENDING)


@contextmanager
def waiting(seconds: float) -> Iterator[None]:
    """Inside the context, wait at most ``seconds`` for a process that does not answer."""
    if world() == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    before, gpu = _Links.all, torch.cuda.is_available()
    with _answered():
        _Links.all = dist.new_group(
            timeout=timedelta(seconds=seconds), backend="cpu:gloo,cuda:nccl" if gpu else "gloo"
        )
    try:
        yield
    finally:
        _Links.all = before


@contextmanager
def _answered() -> Iterator[None]:
    """Turn the error of a collective into a RankError; gloo and NCCL raise RuntimeErrors."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            f"rank {rank()} of {world()}: another process has ended or does not answer "
            f"({first_line(error)[:120]}); the last checkpoint is kept"
        ) from error


def summed(value: Tensor) -> Tensor:
    """Return the sum of a tensor over all processes; equal to the bit in each of them."""
    if world() > 1:
        import torch.distributed as dist

        with _answered():
            dist.all_reduce(value, group=_Links.all)
    return value


def gathered(value: T) -> list[T]:
    """Return the values of all processes, by rank."""
    if world() == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * world()
    with _answered():
        dist.all_gather_object(values, value, group=_Links.all)
    return values


def first(function: Callable[[], T]) -> T:
    """Call ``function`` in rank 0; return its result, or raise its error, in all processes."""
    if world() == 1:
        return function()
    outcome: tuple[Any, Exception | None] = (None, None)
    if rank() == 0:
        try:
            outcome = (function(), None)
        except Exception as error:  # any: if the others did not raise it too, they would wait
            outcome = (None, error)
    import torch.distributed as dist

    outcomes = [outcome]
    with _answered():
        dist.broadcast_object_list(outcomes, 0, group=_Links.all)
    result, failure = outcomes[0]
    if failure is not None:
        raise failure
    return result


def concatenated(value: Tensor) -> Tensor:
    """Return the rows of all processes, by rank; their tensors have equal shapes."""
    if world() == 1:
        return value
    import torch
    import torch.distributed as dist

    values = [torch.empty_like(value) for _ in range(world())]
    with _answered():
        dist.all_gather(values, value.contiguous(), group=_Links.all)
    return torch.cat(values)


def agreed(value: int | None) -> int | None:
    """Return the largest number of any process, or None if all have None."""
    return max((each for each in gathered(value) if each is not None), default=None)


@contextmanager
def agreeing() -> Iterator[None]:
    """If a process raises a ConfigError inside the context, raise it in all; rank 0 prints it."""
    if world() == 1:
        yield
        return
    refused = None
    try:
        yield
    except ConfigError as error:
        refused = error
    found = gathered(None if refused is None else str(refused))
    told = [(i, each) for i, each in enumerate(found) if each is not None]
    if told:
        number, line = told[0]
        raise ConfigError(line if len(told) == len(found) else f"rank {number}: {line}")


def require_equal(what: str, value: object) -> None:
    """Refuse values that differ between processes: the message names the first other rank."""
    values = gathered(value)
    for other, each in enumerate(values):
        if each != values[0]:
            raise ConfigError(f"{what}: rank {other} has {each}, rank 0 {values[0]}")
