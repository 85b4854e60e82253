"""The errors that klrl raises, and functions that format errors in one line."""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: The folders of klrl and of the standard library, whose files the user did not write.
_NOT_USERS = (Path(__file__).parents[1], Path(traceback.__file__).parent)


class ConfigError(ValueError):
    """A setting is invalid; the message names the setting, its value and the remedy.

    The command line prints the message in one line and exits with code 2.
    """


class NonFiniteError(FloatingPointError):
    """An observation, reward, loss or gradient is NaN or infinite; the message says which.

    The run stops with exit code 1 and keeps its last good checkpoint.
    """


class EnvError(RuntimeError):
    """An environment failed, hung or broke Gymnasium's API; the message names its copy and step.

    The run stops with exit code 1 and keeps its last good checkpoint.
    """


class RewardError(RuntimeError):
    """A reward function failed, hung or returned no scores; the message names function and sample.

    The run stops with exit code 1 and keeps its last good checkpoint.
    """


class WorkerError(RuntimeError):
    """Ray does not start, or its cluster has no room for the jobs of ``launcher=ray``.

    The sweep stops with exit code 1; a second start of the sweep resumes its jobs.
    """


class RankError(RuntimeError):
    """A process of torchrun has ended, hangs, or has other weights; the message says which.

    The run stops with exit code 1 and keeps its last good checkpoint.
    """


class LossError(RuntimeError):
    """The user's loss raised an error in ``klrl doctor --loss``; the message names the line."""


class OwnerError(RuntimeError):
    """The run folder was moved or deleted, or another process took it over; the message says which.

    The run stops with exit code 1 and writes nothing more.
    """


class ExitError(RuntimeError):
    """User code called ``sys.exit`` during a run, or raised another exception that is no error.

    The run stops with exit code 1 and keeps its last good checkpoint.
    """


#: Errors that the command line prints in one line, with exit code 1.
FAILURES = (
    *(NonFiniteError, EnvError, RewardError, WorkerError, OwnerError, RankError, LossError),
    ExitError,
)


class Interrupted(BaseException):
    """A signal, or a call that requests a stop, ended a run, a sweep or another command.

    Not an ``Exception``, since a sweep goes on with the next job after an ``Exception`` of a job.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect from a process that this signal ended."""
        return 128 + self.signum


STOPS = (KeyboardInterrupt, Interrupted)
#: Failures of user code; :func:`user_code` turns other exceptions into ExitErrors.
FAULTS = (Exception, SystemExit, GeneratorExit)


@contextmanager
def user_code() -> Iterator[None]:
    """Return to the current folder at the end, and turn SystemExit and the like into ExitError."""
    here = os.open(".", os.O_RDONLY)  # not its path, since the folder may be renamed
    try:
        yield
    except (Exception, *STOPS):
        raise
    except BaseException as error:
        told = "code that klrl called ended the process; it must return, or raise an error"
        raise ExitError(f"{with_line(error)}: {told}") from error
    finally:
        os.fchdir(here)
        os.close(here)


def raise_stop(error: BaseException | None) -> None:
    """Raise the request to stop that led to an error: OmegaConf's ``finally`` may replace it."""
    while error is not None and not isinstance(error, STOPS):
        error = error.__context__
    if error is not None:
        raise error


def _text(error: BaseException | None) -> str:
    try:
        return str(error)
    except (Exception, SystemExit):  # __str__ is the user's code
        return "its text cannot be read"


def in_one_line(error: BaseException, limit: int | None = 200) -> str:
    """Format an error as type and text, cut at ``limit`` characters: ``KeyError: 'answer'``."""
    text = " ".join(_text(error).split())[:limit]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def with_line(error: BaseException) -> str:
    """Format an error, with the last line of the user's code in its traceback."""
    if isinstance(error, SyntaxError):
        return in_one_line(error)  # the text of a SyntaxError names the line
    users = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and "site-packages" not in frame.filename
        and not any(Path(frame.filename).is_relative_to(each) for each in _NOT_USERS)
    ]
    if not users:
        return in_one_line(error)
    return f"{in_one_line(error)} (line {users[-1].lineno} of {Path(users[-1].filename).name})"


def last_line(error: BaseException | None) -> str:
    """Return the last line of an error's text, or its type if the text is empty."""
    return (_text(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if the text is empty."""
    text = _text(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
