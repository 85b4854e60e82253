"""The settings of what a run writes: logger, evaluations, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Optional

from omegaconf import MISSING

from klrl.config.fields import ChoiceConfig, choice, number


@dataclass
class LoggerConfig(ChoiceConfig):
    """``metrics.jsonl`` alone."""

    def offline(self) -> LoggerConfig:
        """The same logger, sending nothing over the network."""
        return self


@dataclass
class WandbConfig(LoggerConfig):
    """``metrics.jsonl`` and a wandb run."""

    mode: str = choice("auto", "offline", "online")
    project: str = MISSING
    entity: Optional[str] = None  # noqa: UP045 (OmegaConf reads this annotation)
    tags: list[str] = MISSING

    def offline(self) -> WandbConfig:
        """Wandb's records stay in the run folder."""
        return replace(self, mode="offline")


@dataclass
class EvalConfig:
    """Deterministic episodes in separate environments during training."""

    every: int = number(ge=0)
    episodes: int = number(ge=1)


@dataclass
class CheckpointConfig:
    """How often a checkpoint is written."""

    every: int = number(ge=1)
