"""Declares the settings outside any group, and the root schema of a job's config."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import Optional

from omegaconf import MISSING

from klrl.config.choices import GROUPS
from klrl.config.fields import number
from klrl.config.schemas.record import CheckpointConfig, EvalConfig
from klrl.config.types import Group, Whole


@dataclass
class Ungrouped:
    """The settings outside any group."""

    #: total environment steps of training (language: samples); rounded up to whole rollouts
    frames: Whole = number(gt=0, whole=True, optional=False)
    #: seeds parameters, actions, minibatches, environments, and the global generators of Python,
    #: numpy and torch
    seed: int = number(ge=0)
    #: auto (cuda if there is a GPU, else cpu), cpu, cuda, or one of several GPUs: cuda:1
    device: str = MISSING
    threads: int = number(ge=1, le=4096)  # CPU threads of torch; small networks are fastest with 1
    #: experiment=clone: a folder of demonstrations; experiment=sft: prompts with answers
    data: Optional[str] = None
    resume: Optional[str] = None  # the folder of a run to continue, as in resume=outputs/NAME
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


#: The ungrouped settings, and for each group a field, which holds an instance of a schema.
RootConfig = make_dataclass(
    "RootConfig", [(group, Group, None) for group in GROUPS], bases=(Ungrouped,)
)
