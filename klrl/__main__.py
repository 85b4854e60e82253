"""``python -m klrl`` and the installed command ``klrl``: both are :func:`klrl.cli.main.main`."""

from __future__ import annotations

from typing import Any

from klrl.cli.main import main

__all__ = ["compose", "main"]  # noqa: F822 (compose comes from __getattr__)


def __getattr__(name: str) -> Any:
    """``compose`` on first use: ``klrl --version`` and completion do without Hydra."""
    if name == "compose":
        from klrl.config.compose import compose

        return compose
    raise AttributeError(f"module 'klrl.__main__' has no attribute {name!r}")


if __name__ == "__main__":
    main()
