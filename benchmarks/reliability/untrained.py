"""``python -m benchmarks.reliability.untrained ...``: klrl, up to the first iteration of a run.

All is composed, checked and built, and a checkpoint loaded; then the command ends with 0, and its
folder goes as that of a job that did not begin.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from klrl.base.errors import Interrupted


class Accepted(Interrupted):
    """The job would train now."""

    def __init__(self) -> None:
        super().__init__(0)

    @property
    def exit_code(self) -> int:
        """As of a command that is done."""
        return 0


def _accept(*args: Any, **options: Any) -> NoReturn:
    raise Accepted


def without_training(argv: Sequence[str]) -> NoReturn:
    """The command line, changed in this process so that nothing trains."""
    import klrl.sweep.run
    import klrl.sweep.search
    import klrl.train.loop
    from klrl.cli.main import main

    klrl.train.loop.Training._open = _accept  # type: ignore[method-assign]
    klrl.sweep.run.run_jobs = klrl.sweep.search.run_jobs = _accept
    main(argv)


if __name__ == "__main__":
    without_training(sys.argv[1:])
