"""Both domains: logger, evaluations, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Optional

from omegaconf import MISSING

from klrl.config.fields import ChoiceConfig, OwnPart, Settings, added, choice, number


@dataclass
class LoggerConfig(ChoiceConfig):
    """``metrics.jsonl``, and what needs no settings: ``tensorboard``, ``csv``."""

    also: list[str] = field(default_factory=list, metadata={"added": []})

    def offline(self) -> LoggerConfig:
        """The same logger, sending nothing over the network."""
        return self


@dataclass
class WandbConfig(LoggerConfig):
    """``metrics.jsonl`` and a wandb run."""

    mode: str = choice("auto", "offline", "online")
    project: str = MISSING
    entity: Optional[str] = None  # noqa: UP045
    tags: list[str] = MISSING

    def offline(self) -> WandbConfig:
        """Wandb's records stay in the run folder."""
        return replace(self, mode="offline")


@dataclass
class CustomLoggerConfig(OwnPart, LoggerConfig):
    """``metrics.jsonl`` and a custom logger."""


@dataclass
class EvalConfig(Settings):
    """Episodes (language: responses) in separate environments, during training and at its end."""

    every: Optional[int] = number(ge=0)  # noqa: UP045
    episodes: int = number(ge=1)
    evaluations: int = added(number(ge=0), 10)
    steps: int = added(number(ge=1), 10_000)
    share: float = added(number(gt=0), 1.0)
    final: int = added(number(ge=0), 0)
    sampled: bool = added(field(), False)

    @property
    def on(self) -> bool:
        """Whether a run is evaluated at all."""
        return (self.evaluations if self.every is None else self.every) > 0


@dataclass
class CheckpointConfig(Settings):
    """How often a checkpoint is written."""

    every: int = number(ge=1)
