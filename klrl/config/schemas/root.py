"""Declares the settings outside any group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from omegaconf import MISSING
from pydantic import Field

from klrl.config.fields import Count, Natural, Place, Positive, Settings, Whole, setting
from klrl.config.schemas.record import CheckpointConfig, EvalConfig


@dataclass
class Ungrouped(Settings):
    """The settings outside any group."""

    #: total environment steps of training (language: samples); rounded up to whole rollouts
    frames: Count = MISSING
    #: seeds parameters, actions, minibatches, environments, and the global generators of Python,
    #: numpy and torch
    seed: Natural = MISSING
    #: auto (cuda if there is a GPU, else cpu), cpu, cuda, or one of several GPUs: cuda:1
    device: str = MISSING
    #: CPU threads of torch; small networks are fastest with 1
    threads: Annotated[Whole, Field(ge=1, le=4096)] = MISSING
    #: seconds to wait for another process of torchrun, which evaluates alone, before the run fails
    rank_timeout: Annotated[Positive, Field(le=1e6)] = setting(1800.0, added=True, free=True)
    #: experiment=clone: a folder of demonstrations; experiment=sft: prompts with answers
    data: Place | None = None
    resume: str | None = None  # the folder of a run to continue, as in resume=outputs/NAME
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
