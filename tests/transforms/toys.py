"""A small policy, before and after it moved."""

from __future__ import annotations

import torch
from tensordict.nn import (
    NormalParamExtractor,
    TensorDictModule,
)
from torch import nn
from torchrl.modules import (
    IndependentNormal,
    ProbabilisticActor,
)

COUNT = 16


def actor(distribution: type = IndependentNormal, **kwargs) -> ProbabilisticActor:
    module = TensorDictModule(
        nn.Sequential(nn.Linear(3, 4), NormalParamExtractor()), ["observation"], ["loc", "scale"]
    )
    return ProbabilisticActor(
        module, ["loc", "scale"], distribution_class=distribution, return_log_prob=True, **kwargs
    )


def moved(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model
