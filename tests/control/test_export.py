"""``klrl export`` of control runs: onnxruntime plays Gymnasium as klrl plays it."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import klrl
from klrl.control.env.copies import make_copies
from klrl.train.evaluate import evaluate_run
from klrl.train.scores import Starts
from tests.conftest import QUICK, marked
from tests.runs.commands import manifest_of, said

pytestmark = pytest.mark.integration
onnxruntime = pytest.importorskip("onnxruntime", reason="needs klrl[onnx]")

PAGE = Path(__file__).parents[2] / "docs" / "runs.md"
#: A policy that has moved far from its start: with its first weights all actions are alike.
SMALL = (
    *("frames=256", "env.num_envs=2", "collector.steps=64", "learner.minibatches=2"),
    *("learner.epochs=2", "optim.lr=0.05", "optim.lr_floor=0", "kl=none", "learner.compile=false"),
    *("eval.every=0", "logger=none"),
)
TOYS = "tests.control.toys:klrl-test"


def flat(observation, info) -> dict[str, np.ndarray]:
    return {"observation": np.float32(observation).reshape(1, -1)}


def pixels(observation, info) -> dict[str, np.ndarray]:
    return {"observation": observation[None]}


def one_hot(observation, info) -> dict[str, np.ndarray]:
    return {"observation": np.eye(7, dtype=np.float32)[[observation]]}


def masked(observation, info) -> dict[str, np.ndarray]:
    seen = {"observation.observation": observation["observation"][None]}
    return {**seen, "action_mask": observation["action_mask"][None]}


def in_info(observation, info) -> dict[str, np.ndarray]:
    return {"observation": observation[None], "action_mask": info["action_mask"][None]}


def keyed(observation, info) -> dict[str, np.ndarray]:
    inner, bright = observation["inner"], observation["bright"]
    return {
        "observation.inner.turned": np.float32(inner["turned"])[None],
        "observation.inner.number": np.int64([inner["number"]]),
        "observation.bright": (bright if bright.dtype == np.uint8 else np.float32(bright))[None],
    }


NETWORKS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)


class Numpy(Net):
    def forward(self, x):
        return self.linear(x) + float(x.detach().numpy()[..., :0].sum())


class Branching(Net):
    def forward(self, x):
        y = self.linear(x)
        return 2 * y if float(y.detach().sum()) > 1e9 else y


class Keys(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.keys = sorted(inputs)
        self.linear = nn.Linear(sum(inputs.values()), outputs)

    def forward(self, x):
        return self.linear(torch.cat([x[key] for key in self.keys], -1))


class OfTwo(Net):
    def forward(self, x):
        return self.linear(x) + torch.zeros(len(x)).sum()
"""

#: Kind -> its words, what a robot gives the file for an observation, and the outputs.
KINDS = {
    "normal": (("env=pendulum", "optim.lr=0.5"), flat, "loc scale"),
    "tanh_normal": (("env=pendulum", "actor=tanh_normal"), flat, "loc scale"),
    "hopper": (("env=hopper",), flat, "loc scale"),
    "cartpole": (("env=cartpole",), flat, "logits"),
    "catch": (("env=catch",), pixels, "logits"),
    "several_masked": ((f"env.id={TOYS}/Masked-v0", "env.kwargs.where=several"), masked, "logits"),
    "dict": ((f"env.id={TOYS}/Keyed-v0", "actor=cnn", "actor.arch=impala"), keyed, "logits"),
    "mask_in_info": (
        (f"env.id={TOYS}/Masked-v0", "env.kwargs.where=info", "env.action_mask=info"),
        in_info,
        "logits",
    ),
    "starts_at_5": ((f"env.id={TOYS}/Copying-v0", "env.kwargs.action=from_five"), flat, "logits"),
    "starts": ((f"env.id={TOYS}/Copying-v0", "env.kwargs.action=multi_discrete"), flat, "logits"),
    "bits": ((f"env.id={TOYS}/Copying-v0", "env.kwargs.action=bits"), flat, "logits"),
    "number": ((f"env.id={TOYS}/Copying-v0", "env.kwargs.action=number"), flat, "loc scale"),
    "one_hot": ((f"env.id={TOYS}/Counted-v0", "env.kwargs.many=7"), one_hot, "logits"),
    "own_dict": (
        (
            f"env.id={TOYS}/Keyed-v0",
            "actor=custom",
            "actor.target=networks:Keys",
            "env.kwargs.image=false",
        ),
        keyed,
        "logits",
    ),
    "mixed": (("env=catch", "learner.dtype=mixed"), pixels, "logits"),
}


@pytest.mark.parametrize("kind", marked("slow", KINDS, *list(KINDS)[:7], "starts", "own_dict"))
def test_gymnasium_is_played_as_klrl_plays_it(kind: str, capsys) -> None:
    """The returns are klrl's, and the numbers those of its policy for the packed observations."""
    words, inputs, outputs = KINDS[kind]
    words = words if words[0].startswith("env=") else ("env=gym", *words)
    Path("networks.py").write_text(NETWORKS)
    config = klrl.run(*SMALL, *words, folder="run").config
    code, out, error = said(capsys, "export", "run", "policy.onnx")
    assert (code, error, out.count("\n")) == (0, "", 1), error
    session = onnxruntime.InferenceSession("policy.onnx")
    assert [each.name for each in session.get_outputs()] == ["action", *outputs.split()]
    env = gymnasium.make(config.env.id, **config.env.kwargs)
    layout = make_copies(config.env, seed=0, num_envs=1).layout
    fed, found, packed = [], [], []
    # One episode, since copies of ``Copying`` share the generator of their actions.
    (observation, info), ended, total = env.reset(seed=Starts("evaluate").seeds(1)[0]), False, 0.0
    while not ended:
        fed.append(inputs(observation, info))
        packed.append(
            gymnasium.spaces.flatten(env.observation_space, observation)
            if layout is None
            else layout.pack(observation, info.get("action_mask"))
        )
        found.append(session.run(None, fed[-1]))
        action = found[-1][0][0]
        discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
        action = int(action) if discrete else np.asarray(action)
        assert env.action_space.contains(action), action
        observation, reward, terminated, truncated, info = env.step(action)
        total, ended = total + float(reward), terminated or truncated
    assert total == pytest.approx(evaluate_run("run", episodes=1).mean, rel=1e-3)
    seen = torch.from_numpy(np.stack(packed).astype(np.float32))
    policy = klrl.load_policy("run")(TensorDict({"observation": seen}, [len(seen)]))
    at_once = session.run(None, {key: np.concatenate([f[key] for f in fed]) for key in fed[0]})
    for at, name in enumerate(outputs.split(), 1):
        expected, alone = policy[name].numpy(), np.concatenate([each[at] for each in found])
        assert name == "scale" or np.ptp(expected[expected > -1e8]) > 1e-3, "it must depend on it"
        error = 0.02 if kind == "mixed" else 1e-5  # where klrl itself rounds to bfloat16
        np.testing.assert_allclose(alone, expected, rtol=error, atol=error)
        np.testing.assert_allclose(at_once[at], alone, rtol=1e-5, atol=1e-5)
    told = session.get_modelmeta().custom_metadata_map
    assert told["run"] == manifest_of(Path("run"))["id"]
    assert (told["checkpoint"], told["mode"]) == ("last, 256 frames", "deterministic")
    assert config.env.id in told["task"]
    if kind == "normal":
        assert (policy["loc"].abs() > 2).any(), "some are clipped"
    if kind == "tanh_normal":
        assert (told["distribution"], told["low"], told["high"]) == (kind, "-2.0", "2.0")
    if kind == "starts":
        assert told["start"] == "0 1 -2"


@pytest.mark.parametrize("network", ["Numpy", "Branching", "OfTwo"])
def test_a_network_that_cannot_be_followed_has_its_line_and_no_file(network, capfd) -> None:
    Path("networks.py").write_text(NETWORKS)
    klrl.run(*QUICK[:-1], "actor=custom", f"actor.target=networks:{network}", folder="run")
    capfd.readouterr()
    code, out, error = said(capfd, "export", "run", "policy.onnx")
    assert (code, out, error.count("\n")) == (2, "", 1), error
    assert error.startswith("klrl export: RUN=run: torch.export cannot follow its policy (")
    assert not Path("policy.onnx").exists()


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory) -> Path:
    return klrl.run(*QUICK, folder=tmp_path_factory.mktemp("pendulum") / "run").folder


@pytest.mark.parametrize("output", range(3))
@pytest.mark.parametrize("by", [3e-5, float("nan")])
def test_a_file_that_acts_differently_is_not_kept(output, by, pendulum, monkeypatch, capsys):
    from klrl.control.run.export import Deployed

    forward = Deployed.forward

    def wrong(self: Deployed, *entries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x + by * (i == output) for i, x in enumerate(forward(self, *entries)))

    monkeypatch.setattr(Deployed, "forward", wrong)
    code, _, error = said(capsys, "export", str(pendulum), "policy.onnx")
    assert (code, error.count("\n")) == (2, 1)
    assert "onnxruntime acts differently" in error
    assert not Path("policy.onnx").exists()


def test_without_the_extra_its_command_is_printed(pendulum, monkeypatch, capsys) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda x: None if x == "onnxscript" else find(x)
    )
    code, _, error = said(capsys, "export", str(pendulum), "policy.onnx")
    line = "FILE=policy.onnx: the package onnxscript is not installed; pip install 'klrl[onnx]'"
    assert (code, error) == (2, f"klrl export: {line}\n")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_script_of_the_page_plays_cartpole_to_500_without_torch(capsys) -> None:
    words = ("env=cartpole", "frames=30720", "kl=none", "optim.lr=1e-3", "learner.compile=false")
    klrl.run(*words, "eval.every=0", "logger=none", folder="run")
    assert said(capsys, "export", "run", "policy.onnx")[0] == 0
    block = PAGE.read_text("utf-8").partition("## ONNX files")[2]
    script = re.search(r"(?:^    import gymnasium\n)(?:    .*\n|\n)*", block, re.MULTILINE)[0]
    lines = [line[4:] for line in script.splitlines()]
    lines += ["import sys, json", "print(json.dumps('torch' in sys.modules))"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [500.0, False]
