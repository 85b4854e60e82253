"""Declares settings of both domains: the logger, evaluations, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from klrl.config.choices import registered
from klrl.config.fields import ChoiceConfig, OwnPart, Settings, added, choice, number, setting

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
    also: list[str] = field(default_factory=list, metadata={"added": []})


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
    mode: str = choice("auto", "offline", "online")
    project: str = setting("klrl")  # wandb project
    entity: Optional[str] = None  # wandb team or user
    tags: list[str] = setting([])  # wandb tags


@registered("logger", "custom", both="runs.own_logger:custom_run", free=ALL)
class CustomLoggerConfig(OwnPart, LoggerConfig):
    """A logger of your own: logger.target=package.module:Name, whose log(row) takes each row."""


@dataclass
class EvalConfig(Settings):
    """Episodes (language: responses) in separate environments, during training and at its end."""

    #: iterations between evaluations; 0 = no evaluations; null: evaluations and share decide
    every: Optional[int] = number(ge=0)
    episodes: int = number(ge=1)  # episodes (responses) of an evaluation during the run
    #: largest number of evaluations, from before the first update to after the last; 0 = none
    evaluations: int = added(number(ge=0), 10)
    steps: int = added(number(ge=1), 10_000)  # most steps of one evaluation during the run
    #: all evaluations during the run together take at most share x frames steps
    share: float = added(number(gt=0), 1.0)
    #: episodes of a further evaluation at the end, from other start states; 0 = none
    final: int = added(number(ge=0), 0)
    #: false: the likeliest actions (language: tokens), true: sampled as in training
    sampled: bool = added(field(), False)

    @property
    def on(self) -> bool:
        """Whether a run is evaluated at all."""
        return (self.evaluations if self.every is None else self.every) > 0


@dataclass
class CheckpointConfig(Settings):
    """When a run writes checkpoints."""

    #: iterations between checkpoints; the last iteration always writes one
    every: int = number(ge=1)
