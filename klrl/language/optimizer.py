"""The optimiser of a language policy: Adam on the separate parameters, not on a flat copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from klrl.config import AdamWConfig, OptimConfig


class Optimizer:
    """Adam or AdamW with gradient clipping; its state as named tensors, for checkpoints.

    Args:
        config: the optim group.
        parameters: each once.
        weight_decay: decoupled from the gradient; 0 is plain Adam.
    """

    def __init__(
        self, config: OptimConfig, parameters: list[nn.Parameter], weight_decay: float
    ) -> None:
        self.parameters, self._max_norm = parameters, config.max_grad_norm
        self._adam = torch.optim.AdamW(
            parameters, lr=config.lr, eps=config.eps, weight_decay=weight_decay, foreach=True
        )

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._adam.zero_grad(set_to_none=True)

    def step(self, lr: float) -> Tensor:
        """Clip the gradient and update; returns the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self._max_norm)
        for group in self._adam.param_groups:
            group["lr"] = lr
        if torch.isfinite(norm):  # else the checkpoint keeps the last finite weights
            self._adam.step()
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """``0.step``, ``0.exp_avg``, ...; empty before the first step."""
        state = self._adam.state
        return {
            f"{index}.{name}": value
            for index, p in enumerate(self.parameters)
            for name, value in state.get(p, {}).items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a checkpoint's moments."""
        for key, value in state.items():
            index, _, name = key.partition(".")
            parameter = self.parameters[int(index)]
            # AdamW keeps step on the CPU.
            moved = value.cpu() if name == "step" else value.to(parameter)
            self._adam.state[parameter][name] = moved.clone()


def adam(config: OptimConfig, parameters: list[nn.Parameter]) -> Optimizer:
    """``optim=adam``."""
    return Optimizer(config, parameters, weight_decay=0.0)


def adamw(config: AdamWConfig, parameters: list[nn.Parameter]) -> Optimizer:
    """``optim=adamw``."""
    return Optimizer(config, parameters, config.weight_decay)
