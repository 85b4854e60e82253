"""Runs :func:`klrl.cli.main.main` for ``python -m klrl`` and for the installed command ``klrl``."""

from __future__ import annotations

import sys

try:
    from klrl.cli.main import main
except ModuleNotFoundError as error:  # this Python lacks a dependency of klrl
    remedy = "start klrl with the Python of its environment, as .venv/bin/python -m klrl"
    print(f"klrl: {sys.executable} has no module {error.name}; {remedy}", file=sys.stderr)
    raise SystemExit(2) from None

__all__ = ["main"]


if __name__ == "__main__":
    main()
