"""The beta of KLPENPPOLoss: in forward and update, and in TorchRL's trainer."""

import pytest
import torch

from klrl.losses import BetaHook, KLPENPPOLoss
from tests.agents import agent_of, gym, make_env
from tests.losses.test_functional import _double, data, total_of  # noqa: F401 (a fixture)

QUIET = pytest.mark.filterwarnings("ignore:.*entropy.*:UserWarning")


def test_no_forward_moves_beta_and_one_update_does() -> None:
    agent, batch = data("Pendulum-v1", "normal")
    loss = KLPENPPOLoss(agent.actor, agent.critic, beta=2)
    for mode in (True, False):
        loss.train(mode)
        for _ in range(20):
            loss(batch.copy())
    assert float(loss.beta) == 2.0
    assert (loss.increment, loss.decrement) == (2.0, 0.5)
    assert [loss.update_beta(kl) for kl in (0.016, 0.014, 0.006)] == [4.0, 4.0, 2.0]
    for _ in range(100):
        loss.update_beta(0.0)
    assert float(loss.beta) == pytest.approx(1e-4)
    restored = KLPENPPOLoss(agent.actor, agent.critic)
    restored.load_state_dict(loss.state_dict())
    assert float(restored.beta) == pytest.approx(1e-4)


def test_forward_updates_are_for_training_with_gradient_only() -> None:
    agent, batch = data("Pendulum-v1", "normal")
    loss = KLPENPPOLoss(agent.actor, agent.critic, beta_update="forward")
    with torch.no_grad():
        loss(batch.copy())
    loss.eval()(batch.copy())
    assert float(loss.beta) == 1.0
    loss.train()(batch.copy())
    assert float(loss.beta) == 2.0


@QUIET
def test_a_forward_update_moves_beta_after_the_loss_and_its_gradient() -> None:
    """Both are those of ``iteration`` at the beta before the update; the buffer stays the same."""
    agent, batch = data("Pendulum-v1", "normal")
    found, settings = [], {"beta": 3.0, "dtarg": 1e-4, "functional": False}
    for beta_update in ("iteration", "forward"):
        loss = KLPENPPOLoss(agent.actor, agent.critic, beta_update=beta_update, **settings)
        loss.zero_grad()
        held = loss.beta
        out = loss(batch.copy())
        total_of(out).backward()
        grads = [p.grad.clone() for p in loss.parameters()]
        found.append([out["loss_objective"].detach(), *grads])
        assert held is loss.beta
    assert float(loss.beta) == 6.0
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


# TorchRL's Trainer(optimizer=...) warns of its own future.
@pytest.mark.filterwarnings("ignore:The 'optimizer' hook stage will be replaced:FutureWarning")
def test_the_hook_moves_beta_once_per_iteration_of_torchrls_trainer() -> None:
    from torchrl.collectors import Collector
    from torchrl.objectives.value import GAE
    from torchrl.trainers import Trainer

    torch.set_default_dtype(torch.float32)
    agent = agent_of(make_env(gym("Pendulum-v1"), seed=0), "normal", normalize=False)
    loss = KLPENPPOLoss(agent.actor, agent.critic, functional=False)
    collector = Collector(
        make_env(gym("Pendulum-v1"), seed=0),
        agent.actor,
        frames_per_batch=64,
        total_frames=192,
        auto_register_policy_transforms=False,
    )
    trainer = Trainer(
        collector=collector,
        total_frames=192,
        frame_skip=1,
        optim_steps_per_batch=3,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), 1e-9),
        progress_bar=False,
    )
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=agent.critic)
    trainer.register_op("batch_process", gae)
    hook = BetaHook(loss)
    hook.register(trainer)
    trainer.train()
    assert hook.kl == pytest.approx(0.0, abs=1e-6)
    assert float(loss.beta) == 0.5**3, "three iterations of three steps each"
