"""The optimisers of a language policy, by name."""

import pytest
import torch

from klrl.config import LANGUAGE, AdamWConfig, OptimConfig, factory

LR, DECAY = 0.1, 0.3
COMMON = {"lr": LR, "lr_floor": 0.0, "eps": 1e-5, "max_grad_norm": 0.5}
CONFIGS = {
    "adam": OptimConfig(name="adam", **COMMON),
    "adamw": AdamWConfig(name="adamw", weight_decay=DECAY, **COMMON),
}


@pytest.mark.parametrize(("name", "kept"), [("adam", 1.0), ("adamw", 1 - LR * DECAY)])
def test_only_adamw_decays(name: str, kept: float) -> None:
    """Without a gradient a step multiplies the weights by 1 - lr * decay (Loshchilov, Hutter)."""
    parameter = torch.nn.Parameter(torch.tensor([2.0, -1.0]))
    optimizer = factory("optim", CONFIGS[name], LANGUAGE)(CONFIGS[name], [parameter])
    for _ in range(2):
        parameter.grad = torch.zeros(2)
        assert float(optimizer.clipped_step(LR)) == 0.0
    torch.testing.assert_close(parameter.detach(), kept**2 * torch.tensor([2.0, -1.0]))


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_first_step_is_lr_against_the_gradients_sign(name: str) -> None:
    """Kingma and Ba: |mean / sqrt(spread)| is 1 at the first step, whatever the gradient."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = factory("optim", CONFIGS[name], LANGUAGE)(CONFIGS[name], [parameter])
    parameter.grad = torch.tensor([3.0, -4.0])
    assert float(optimizer.clipped_step(LR)) == pytest.approx(5.0), "the norm before clipping"
    torch.testing.assert_close(parameter.detach(), torch.tensor([-LR, LR]), rtol=1e-4, atol=0)
    mean = optimizer.state[parameter]["exp_avg"]  # a tenth of the gradient, clipped to a norm of .5
    torch.testing.assert_close(mean, torch.tensor([0.03, -0.04]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("of", [lambda w: w.T, lambda w: w[:, :3]], ids=["transposed", "a slice"])
def test_weights_in_any_order_of_memory_learn_alike(of) -> None:
    weights, config = torch.arange(24.0).reshape(4, 6), CONFIGS["adam"]
    found = []
    for whole in (of(weights.clone()), of(weights.clone()).contiguous()):
        parameter, state = torch.nn.Parameter(whole), {}
        for step in range(4):
            optimizer = factory("optim", config, LANGUAGE)(config, [parameter])
            if state:  # as a checkpoint holds it
                moments = {name: each.contiguous() for name, each in state["state"][0].items()}
                optimizer.load_state_dict({**state, "state": {0: moments}})
            parameter.grad = torch.arange(float(whole.numel())).reshape(whole.shape) - 5 * step
            optimizer.clipped_step(LR)
            state = optimizer.state_dict()
        found.append(parameter.detach())
    torch.testing.assert_close(*found)
