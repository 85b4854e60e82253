"""The errors that klrl raises on purpose. No torch in here: the command line needs them first."""


class ConfigError(ValueError):
    """A setting that cannot be run. Its text names the setting, its value and the remedy.

    The command line prints it in one or two lines and exits with 2, having written nothing.
    """


class NonFiniteError(FloatingPointError):
    """NaN or infinity in an observation, a reward, a loss or a gradient; the text names the place.

    The run stops with exit code 1 and keeps its last good checkpoint.
    """


class RewardError(RuntimeError):
    """A reward function that raised, hung or returned no scores; the text names it and the sample.

    The run stops with exit code 1 and keeps its last good checkpoint.
    """


class WorkerError(RuntimeError):
    """A rollout worker of ``collector=ray`` that cannot be started, or died again and again.

    The run stops with exit code 1 and keeps its last good checkpoint.
    """


#: A run that ends with one of them says so in a line and exits with 1; its checkpoint is kept.
FAILURES = (NonFiniteError, RewardError, WorkerError)


class Interrupted(BaseException):
    """The run was told to stop (Ctrl-C or SIGTERM), wrote its checkpoint and ended in good order.

    Not an ``Exception``: a sweep must not go on to its next job.

    Args:
        signum: the signal's number; the exit code is 128 + signum (130 or 143).
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect of a process ended by this signal."""
        return 128 + self.signum


def in_one_line(error: BaseException, limit: int | None = 200) -> str:
    """An error with its type, cut off after so many characters: ``KeyError: 'answer'``."""
    text = " ".join(str(error).split())[:limit]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
