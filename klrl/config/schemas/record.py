"""Declares settings of both domains: the logger, evaluations, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from omegaconf import MISSING

from klrl.config.choices import registered
from klrl.config.fields import ChoiceConfig, Count, Natural, OwnPart, Positive, Settings, setting

#: No setting of a logger changes a result.
ALL = ("*",)


@registered("logger", "none", "only metrics.jsonl", both="runs.loggers:no_logger", free=ALL)
@registered(
    "logger",
    "tensorboard",
    "files for TensorBoard",
    both="runs.loggers:tensorboard_run",
    free=ALL,
    package="tensorboard",
    remedy="pip install 'klrl[tensorboard]', or choose logger=none",
)
class LoggerConfig(ChoiceConfig):
    """A logger without settings; every run also writes ``metrics.jsonl``."""

    #: further loggers: tensorboard
    also: list[str] = setting([], added=True)


@registered(
    "logger",
    "wandb",
    both="runs.wandb_logger:wandb_run",
    free=ALL,
    package="wandb",
    remedy="pip install wandb, or choose logger=none",
)
class WandbConfig(LoggerConfig):
    """Wandb, in addition to metrics.jsonl; offline unless a key is found."""

    #: auto (WANDB_MODE, else online with a key, else offline), offline or online
    mode: Literal["auto", "offline", "online"] = "auto"
    project: str = "klrl"  # wandb project
    entity: str | None = None  # wandb team or user
    tags: list[str] = setting([])  # wandb tags, in addition to the run's choices
    group: str | None = setting(None, added=True)  # wandb group; null: the sweep's name
    notes: str | None = setting(None, added=True)  # wandb notes
    #: also upload checkpoints, curves, rows and settings when the run ends
    artifacts: bool = setting(False, added=True)


@registered("logger", "custom", both="runs.loggers:custom_run", free=ALL)
class CustomLoggerConfig(OwnPart, LoggerConfig):
    """A custom logger: logger.target=package.module:Name, whose log(row) takes each row."""


@dataclass
class EvalConfig(Settings):
    """Episodes (language: responses) in separate environments, during training and at its end."""

    #: iterations between evaluations; 0 = no evaluations; null: evaluations and share decide
    every: Natural | None = MISSING
    episodes: Count = MISSING  # episodes (responses) of an evaluation during the run
    #: largest number of evaluations, from before the first update to after the last; 0 = none
    evaluations: Natural = setting(10, added=True)
    steps: Count = setting(10_000, added=True)  # most steps of one evaluation during the run
    #: all evaluations during the run together take at most share x frames steps
    share: Positive = setting(1.0, added=True)
    #: episodes of a further evaluation at the end, from other start states; 0 = none
    final: Natural = setting(0, added=True)
    #: false: the likeliest actions (language: tokens), true: sampled as in training
    sampled: bool = setting(False, added=True)

    @property
    def on(self) -> bool:
        """Whether a run is evaluated at all."""
        return (self.evaluations if self.every is None else self.every) > 0


@dataclass
class CheckpointConfig(Settings):
    """When a run writes checkpoints."""

    #: iterations between checkpoints; the last iteration always writes one
    every: Count = MISSING
