"""A critic on the policy's own hidden states: no second network, no second forward."""

from __future__ import annotations

from torch import Tensor, nn

from klrl.language.causal_lm import model_device, model_dtype, unwrapped


class ValueHead(nn.Module):
    """V(s_t) = w . h_t + b, from the hidden state h_t that predicts token t. w and b start at 0.

    Args:
        model: the causal LM whose hidden states it reads; gives width, device and dtype.
        detach: keep the critic's gradient out of the policy's network.
    """

    def __init__(self, model: nn.Module, detach: bool = False) -> None:
        super().__init__()
        self.detach = detach
        width = unwrapped(model).config.get_text_config().hidden_size
        self.linear = nn.Linear(width, 1, device=model_device(model), dtype=model_dtype(model))
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        """[B, R, D] -> [B, R], in reward units."""
        return self.linear(states.detach() if self.detach else states).squeeze(-1)
