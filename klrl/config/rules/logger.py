"""``logger`` against itself: which may stand beside the chosen one."""

from __future__ import annotations

from klrl.base.errors import ConfigError
from klrl.config import CHOICES, JobConfig, LoggerConfig


def check_also(c: JobConfig) -> None:
    """Only loggers that have no settings of their own stand in ``logger.also``, each once."""
    plain = [
        name
        for name, choice in CHOICES["logger"].items()
        if choice.schema is LoggerConfig and name != "none"
    ]
    names = [c.logger.name, *c.logger.also]
    for name in c.logger.also:
        setting = f"logger.also=[{','.join(map(str, c.logger.also))}]"
        if name not in plain:
            choose = f"; {name} is chosen with logger={name}" if name in CHOICES["logger"] else ""
            raise ConfigError(f"{setting}: may hold {', '.join(plain)}{choose}")
        if names.count(name) > 1:
            raise ConfigError(f"{setting}: {name} is there already; name it once")
