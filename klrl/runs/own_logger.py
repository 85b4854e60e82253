"""``logger=custom``: passes each row to the user's object."""

from __future__ import annotations

from typing import Any

from klrl.base.errors import ConfigError
from klrl.config import CustomLoggerConfig
from klrl.config.own import import_target, make_own
from klrl.runs.loggers import LoggedRun, Logger, OpenLoggers, guarded
from klrl.runs.metrics import Row


def custom_run(config: CustomLoggerConfig, logged: LoggedRun) -> OpenLoggers:
    """``logger=custom``: make the user's logger; if it fails, the run continues without it."""
    given = {
        "folder": logged.folder,
        "settings": logged.settings,
        "group": logged.group,
        "axis": logged.domain.axis,
    }
    return guarded(logged, _UserLogger.part, lambda: _UserLogger(make_own("logger", config, given)))


def check_logger(config: CustomLoggerConfig) -> None:
    """Refuse a class without a method ``log``, before the run begins."""
    target = import_target("logger", config)
    if isinstance(target, type) and not callable(getattr(target, "log", None)):
        raise ConfigError(
            f"logger.target={config.target}: has no method log; add log(self, row), which takes a "
            "dictionary per iteration"
        )


class _UserLogger(Logger):
    """Calls the user's logger, whose optional methods replace those of the base class."""

    part = "logger"

    def __init__(self, logger: Any) -> None:
        if not callable(getattr(logger, "log", None)):
            raise TypeError(f"made {type(logger).__name__}, which has no method log")
        self._logger = logger
        for name in ("log_samples", "log_video", "close"):
            if callable(method := getattr(logger, name, None)):
                setattr(self, name, method)

    def log(self, row: Row) -> None:
        self._logger.log(dict(row))  # a copy, which the user may change
