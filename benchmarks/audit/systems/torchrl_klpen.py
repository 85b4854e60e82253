"""TorchRL: ``KLPENPPOLoss`` (torchrl/objectives/ppo.py): beta times KL(old||pi), exact."""

import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch.distributions import Categorical
from torchrl.objectives import KLPENPPOLoss

SYSTEM, DIVERGENCE = "TorchRL 0.14.1", "forward"


def loss(logits, old_logits, actions, old_log_probs, mask, coef):
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(torch.nn.Identity(), ["now"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )
    nothing = torch.zeros_like(old_log_probs)[..., None]
    data = TensorDict(
        {
            "now": logits, "logits": old_logits, "action": actions,
            "action_log_prob": old_log_probs, "advantage": nothing,
        },
        mask.shape,
    )[mask]  # fmt: skip
    module = KLPENPPOLoss(actor, None, beta=coef, entropy_bonus=False)
    return module(data)["loss_objective"] * mask.sum() / len(mask)


ROWS = {"KLPENPPOLoss, beta": loss}
