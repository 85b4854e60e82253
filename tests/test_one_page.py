"""The scripts of docs/one_page.md, plain torch in float64, give the numbers of klrl's runs.

A script takes from klrl what it cannot know: the initial weights, the sampled actions or responses,
the seeds of the episodes, and the order of the frames or prompts. It computes all else itself.
"""

import ast
import importlib.util
import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

import klrl
from klrl.base.seeds import derived_seed
from klrl.config.compose import job_config
from klrl.language.data.batch import ATTENTION, SCORE, response_mask
from klrl.runs.metrics import Row
from klrl.train.callbacks import Loop
from tests.language.conftest import model as model  # a fixture

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "one_page.md").read_text("utf-8")
QUIET = ("eval.every=0", "logger=none")
#: For each script, the first line that the page shows, and the first one that it no longer shows.
SHOWN = {"ppo": ("class Policy", "def train"), "grpo": ("def next_tokens", None)}


def path_of(name: str) -> Path:
    return DOCS / "examples" / f"{name}.py"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path_of(name))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(settings: Any) -> list[str]:
    """A script's settings on klrl's command line."""
    return [f"{name.replace('_', '.', 1)}={value}" for name, value in asdict(settings).items()]


class Watch(klrl.Callback):
    """Keeps the rows, batches and orders of a run, its betas, and the weights around iterations."""

    def __init__(self, patch: pytest.MonkeyPatch, nets: Callable[[Any], list[nn.Module]]) -> None:
        self.nets = nets
        self.rows: list[Row] = []
        self.batches: list[TensorDictBase] = []
        self.orders: list[Tensor] = []
        permute = torch.randperm

        def kept(n: int) -> Tensor:
            self.orders.append(permute(n))
            return self.orders[-1]

        patch.setattr(torch, "randperm", kept)

    def _look(self, training: Loop) -> None:
        weights = [[p.detach().clone() for p in net.parameters()] for net in self.nets(training)]
        self.weights.append(weights)
        self.betas.append(training.parts.learner.beta_rule.beta)

    def started(self, training: Loop) -> None:
        self.weights: list[list[list[Tensor]]] = []
        self.betas: list[float] = []
        self.orders.clear()
        self._look(training)

    def iterated(self, training: Loop, row: Row, batch: TensorDictBase) -> None:
        self._look(training)
        self.rows.append(row)
        self.batches.append(batch.clone())


def assert_equal(nets: Iterable[nn.Module], weights: list[list[Tensor]]) -> None:
    for net, expected in zip(nets, weights, strict=True):
        for mine, klrls in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(mine, klrls.double(), atol=1e-6, rtol=1e-6)


def assert_same_rows(mine: list[dict[str, float]], klrls: list[Row]) -> None:
    """The rows agree to 1e-6; a metric that klrl does not record is 0."""
    for row, expected in zip(mine, klrls, strict=True):
        same = {key: expected.get(key, 0.0) for key in row}
        assert row == pytest.approx(same, rel=1e-6, abs=1e-6)


def assert_shown(name: str, mine: dict[str, float], klrls: Row) -> None:
    """The page's table has these numbers: a line has the metric, klrl's number and the script's."""
    table = re.findall(r"^\| `([\w/]+)` \| (\S+) \| (\S+) \|", section(name), re.MULTILINE)
    shown = {key: [float(number) for number in numbers] for key, *numbers in table}
    expected = {key: [klrls[key], mine[key]] for key in mine if key in klrls}
    # Not closer: the last digits of a float32 run differ between machines.
    assert shown == {key: pytest.approx(each, rel=1e-3) for key, each in expected.items()}


def section(name: str) -> str:
    return next(part for part in PAGE.split("\n## ") if f"examples/{name}.py" in part)


# ------------------------------------------------------------------------------------------- PPO


class Episodes:
    """klrl's episodes of Pendulum, 50 steps long: each begins with its own seed."""

    def __init__(self, c: Any) -> None:
        self.envs = [
            gymnasium.wrappers.ClipAction(gymnasium.make(c.env_id, max_episode_steps=50))
            for _ in range(c.env_num_envs)
        ]
        self.begun = [0] * len(self.envs)

    def reset(self, i: int) -> np.ndarray:
        seed = derived_seed(derived_seed(0, "train") + i, "episode", self.begun[i])
        self.begun[i] += 1
        return self.envs[i].reset(seed=seed)[0]


def ordered(net: nn.Module) -> nn.Module:
    """klrl's network with its parameters in the script's order."""
    head = [net.log_std] if hasattr(net, "log_std") else []
    return nn.ParameterList([*head, *net.trunk.parameters(), *net.head.parameters()])


@pytest.mark.integration
def test_ppo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two iterations; beta is halved, then doubled."""
    ppo = script("ppo")
    c = ppo.Settings(frames=2048, learner_epochs=12, learner_minibatches=8)
    watch = Watch(
        monkeypatch,
        lambda run: [ordered(run.parts.agent.policy_net), ordered(run.parts.agent.value_net)],
    )
    job = ("env=pendulum", "env.kwargs.max_episode_steps=50", "learner.compile=false")
    klrl.run(*job, *QUIET, *words(c), folder="run", callbacks=[watch])

    nets = policy, value = ppo.Policy(3, 1), ppo.mlp(3, 1, gain=1.0)
    for net, weights in zip(nets, watch.weights[0], strict=True):
        for mine, klrls in zip(net.parameters(), weights, strict=True):
            mine.data.copy_(klrls)
    reference, beta, rows = deepcopy(policy), c.loss_beta, []
    adam = torch.optim.Adam([*policy.parameters(), *value.parameters()], eps=c.optim_eps)
    episodes, orders = Episodes(c), iter(watch.orders)
    s = [episodes.reset(i) for i in range(c.env_num_envs)]
    for k, batch in enumerate(watch.batches):
        act = lambda t, _, actions=batch["action"]: actions[:, t]  # noqa: E731
        rollout = ppo.collect(episodes.envs, s, act, c.collector_steps, episodes.reset)
        assert torch.equal(rollout[3], batch["next", "observation"].double())
        assert rollout[5].any()
        row, beta = ppo.iterate(
            c, policy, value, reference, adam, rollout, beta, k / 2, lambda _: next(orders)
        )
        rows.append(row)
        assert_equal(nets, watch.weights[k + 1])
        assert beta == watch.betas[k + 1]
    assert watch.betas == [1.0, 0.5, 1.0]
    assert next(orders, None) is None
    assert_same_rows(rows, watch.rows)
    assert_shown("ppo", rows[1], watch.rows[1])


def test_ppo_trains(capsys: pytest.CaptureFixture) -> None:
    """From the reference on, at a falling learning rate."""
    ppo = script("ppo")
    ppo.train(ppo.Settings(frames=256, collector_steps=16, learner_epochs=2))
    rows = [
        ast.literal_eval(line.split(" ", 1)[1]) for line in capsys.readouterr().out.splitlines()
    ]
    assert [row["kl/ref/exact"] > 0 for row in rows] == [False, True]
    assert [row["learner/lr"] for row in rows] == [0.001, pytest.approx(0.00055, abs=1e-4)]


# ------------------------------------------------------------------------------------------ GRPO


@pytest.mark.integration
@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_grpo(placement: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    grpo = script("grpo")
    c = grpo.Settings(kl_placement=placement, optim_lr=1e-2)
    if placement == "loss":
        c.kl_estimator = "k3"
    watch = Watch(monkeypatch, lambda run: [run.parts.policy.model])
    job = ("experiment=sort_digits", "loss=grpo", "advantage=grpo", f"actor.model={model}")
    size = ("frames=128", "collector.prompts=8", "env.reward=proxy", "optim.lr_floor=0.01")
    klrl.run(*job, *size, *QUIET, *words(c), folder="run", callbacks=[watch])

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    reference, rows = deepcopy(net), []
    # klrl shuffles each of n adjacent parts of the prompts, one prompt for each minibatch.
    n, count = 8 // c.learner_minibatches, c.learner_minibatches
    parts = torch.stack(watch.orders).reshape(-1, n, count) + count * torch.arange(n)[:, None]
    orders = iter(parts.transpose(1, 2).flatten(1))
    adam = torch.optim.Adam(net.parameters(), c.optim_lr, eps=c.optim_eps)
    for k, batch in enumerate(watch.batches):
        rollout = batch["tokens", "full"], batch[ATTENTION], response_mask(batch)
        score = batch[SCORE].flatten().double()
        assert score.std() > 0
        rows.append(
            grpo.iterate(c, net, reference, adam, (*rollout, score), lambda _: next(orders))
        )
        assert_equal([net], watch.weights[k + 1])
    assert next(orders, None) is None
    assert_same_rows(rows, watch.rows)
    if placement == "reward":
        assert_shown("grpo", rows[1], watch.rows[1])


# ------------------------------------------------------------------------------------------ page


@pytest.mark.parametrize("name", SHOWN)
def test_a_script_is_a_page_without_klrl(name: str) -> None:
    text = path_of(name).read_text("utf-8")
    assert text.count("\n") <= 150
    imports = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Import | ast.ImportFrom)]
    assert "klrl" not in " ".join(map(ast.unparse, imports))


@pytest.mark.parametrize("name", SHOWN)
def test_the_page_shows_the_script(name: str) -> None:
    """In order and without a gap, between the page's sentences."""
    first, behind = SHOWN[name]
    text = path_of(name).read_text("utf-8")
    text = text[text.index(first) : None if behind is None else text.index(behind)]
    code = re.findall(r"^    (?!klrl )(.+)", section(name), re.MULTILINE)
    assert code == [line for line in text.splitlines() if line]


@pytest.mark.parametrize("name", SHOWN)
def test_the_settings_of_a_script_are_those_of_its_command(name: str) -> None:
    """The first command of its section."""
    command = re.search(r"^    klrl (.+)", section(name), re.MULTILINE).group(1).split()
    job, expected = job_config(command), asdict(script(name).Settings())
    for setting, value in expected.items():
        group, _, field = setting.partition("_")
        found = getattr(job, group)
        assert (getattr(found, field) if field else found) == value, setting
