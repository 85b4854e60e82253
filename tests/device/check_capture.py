"""CUDA graphs: what is captured, on which device, and what is done where that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import klrl
from klrl.base.cuda_graph import capture
from klrl.control.policy.acting import make_acting
from klrl.doctor.problems import KINDS, Problem
from klrl.train.loop import Training
from tests.conftest import QUICK
from tests.control.test_compiled import CASES
from tests.control.updates import made
from tests.device import standin
from tests.device.rows import assert_same

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
COPYING = "env.id=tests.control.toys:klrl-test/Copying-v0"
#: Every loss, divergence, estimator, family and way to draw of test_compiled.py, several in each.
BRANCHES = {
    "main job": (),
    "clip": CASES["clip"],
    "tanh, forward": (*CASES["tanh"], *CASES["forward"][:3]),
    "js, sampled": (*CASES["js"], *CASES["sampled"][:2]),
    "sampled, separate": (*CASES["sampled_discrete"], *CASES["separate"]),
    "multi_discrete, k2": ("env=gym", COPYING, "+env.kwargs.action=multi_discrete", *CASES["k2"]),
    "multi_binary, held, split": (
        *("env=gym", COPYING, "+env.kwargs.action=multi_binary", *CASES["split"]),
        *("loss=klpen_held", "loss.max_alpha=2"),
    ),
}
SMALL = ("learner.epochs=2", "learner.minibatches=4")


def updated(settings, device: str, mode: str, *words: str) -> tuple[Training, Tensor]:
    """A run after one update, and its parameters."""
    training, batch = made(settings, *words, f"device={device}", f"learner.compile={mode}", *SMALL)
    steps = training.parts.learner.steps
    steps.say = lambda line: setattr(training, "line", line)
    torch.manual_seed(1)
    standin.clear()
    training.parts.learner.update(batch, 0.0, 0.3)
    return training, steps.optimizer.flat


@pytest.mark.parametrize(
    ("branch", "device"), [(name, f"cuda:{(i + 1) % 2}") for i, name in enumerate(BRANCHES)]
)
def test_every_branch_of_the_update_is_captured(branch: str, device: str, settings) -> None:
    eager, expected = updated(settings, device, "false", *BRANCHES[branch])
    captured, found = updated(settings, device, "jit", *BRANCHES[branch])
    assert captured.line == "update: torch.compile, captured as a CUDA graph"
    assert captured.parts.learner.steps.mode == "jit"
    assert eager.parts.learner.steps.mode == "false"
    assert standin.counts()["replay"] == 8
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_graph_is_captured_on_the_device_of_its_tensors() -> None:
    """Whatever the current device is, which stays; as does the stream."""
    x = torch.ones(3, device=SECOND)
    streams = [torch.cuda.current_stream(each) for each in (FIRST, SECOND)]
    graph, y = capture(lambda: x * 2, SECOND)
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [10, 10, 10]
    assert torch.cuda.current_device() == 0
    assert [torch.cuda.current_stream(each) for each in (FIRST, SECOND)] == streams


def test_an_empty_graph_is_refused() -> None:
    x = torch.ones(3, device=FIRST)
    with pytest.raises(UserWarning, match="The CUDA Graph is empty"):
        capture(lambda: x * 2, SECOND)


def test_a_capture_that_fails_leaves_the_stream_and_says_why() -> None:
    x = torch.ones(3, device=SECOND)
    before = torch.cuda.current_stream(SECOND)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        capture(lambda: x * x.sum().item(), SECOND)
    assert torch.cuda.current_stream(SECOND) is before
    assert torch.cuda.current_device() == 0
    graph, y = capture(lambda: x + 1, SECOND)
    graph.replay()
    assert y.tolist() == [2, 2, 2]


OWN = """
import torch
class Net(torch.nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.layer = torch.nn.Linear(inputs, outputs)
    def forward(self, x):
        return self.layer(x) * (1.0 if x.abs().max().item() < 1e6 else 0.0)
"""


def test_a_network_that_cannot_be_captured_acts_without(monkeypatch, capsys) -> None:
    """An ``.item()`` in its forward: a line says so, once; the rows are the CPU's."""
    Path("own.py").write_text(OWN)
    monkeypatch.syspath_prepend(".")
    words = (*QUICK, "actor=custom", "actor.target=own:Net", "eval.every=1", "eval.episodes=1")
    words = tuple(word for word in words if word != "eval.every=0")
    cpu, cuda = (klrl.run(*words, f"device={device}").rows for device in ("cpu", "cuda:1"))
    said = capsys.readouterr().err
    assert said.count("acts without a CUDA graph") == 1, said
    assert "operation not permitted when stream is capturing" in said
    assert_same(cuda, cpu)


def test_generators_of_devices_are_kept() -> None:
    """Where problems of the doctor are drawn."""
    before = torch.cuda.get_rng_state_all()
    Problem(KINDS[0], seed=3)
    for state, kept in zip(torch.cuda.get_rng_state_all(), before, strict=True):
        assert torch.equal(state, kept)


def test_evaluations_capture_once(settings) -> None:
    """However many there are; the graph reads the parameters as they are then."""
    training = Training(settings("env=catch", "device=cuda:1"))
    agent = training.parts.agent
    observation = torch.rand(2, agent.policy_net.inputs).numpy()
    standin.clear()
    for shift in range(3):
        with torch.no_grad():
            agent.policy_net.head.bias.add_(torch.arange(3, device=SECOND) * shift * 10.0)
        sampled = make_acting(agent, SECOND).sample(0, observation)
        with torch.no_grad():
            (logits,) = agent.policy_net(torch.from_numpy(observation).to(SECOND))
        assert sampled.tolist() == logits.argmax(-1).tolist()
    assert standin.counts()["capture"] == 1
