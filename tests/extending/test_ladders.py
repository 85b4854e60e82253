"""Adding to klrl itself: two places each, and a line that names the one that was left out."""

import importlib
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

import klrl
from klrl.config import conf_dir
from tests.conftest import QUICK
from tests.reliability.ended import in_fork

#: What is added -> its place: the file, what stands before or after the new lines, these lines.
ESTIMATOR = (
    ("kl/estimators.py", "def _declared", "def k4(log_ratio):\n    return log_ratio**4 / 4\n\n\n"),
    ("config/placement.py", '"k1": Gradient', '"k4": Gradient.WRONG, '),
)
LOSS = (
    (
        "losses/policy.py",
        "class ClipLoss",
        "class SPOLoss(PolicyLoss):\n"
        "    def gain(self, scored, advantage, beta):\n"
        "        w = (scored.log_prob - scored.old_log_prob).exp()\n"
        "        return w * advantage - self.config.epsilon * (w - 1) ** 2\n\n\n",
    ),
    (
        "config/schemas/learning.py",
        '@registered("loss", "custom"',
        '@registered("loss", "spo", both="losses.policy:SPOLoss")\n'
        "@dataclass\n"
        "class SPOConfig(LossConfig):\n"
        '    """A quadratic penalty on the ratio."""\n\n'
        "    epsilon: Positive = 0.2  # its weight\n\n\n",
    ),
)
CONTROLLER = (
    (
        "kl/controllers.py",
        "class OwnKLController",
        "class HalvingKLController(FixedKLController):\n"
        "    def __init__(self, coef, factor):\n"
        "        super().__init__(coef)\n"
        "        self.factor = factor\n\n"
        "    def move(self, kl, n):\n"
        "        self.coef *= self.factor\n\n\n",
    ),
    (
        "config/schemas/penalty.py",
        '@registered("controller", "custom"',
        '@registered("controller", "halving", both="kl.controllers:HalvingKLController")\n'
        "@dataclass\n"
        "class HalvingControllerConfig(ControllerConfig):\n"
        '    """kl.coef is multiplied once per iteration."""\n\n'
        "    factor: Positive = 0.5  # by this\n\n\n",
    ),
)
OBJECTIVE = (
    (
        "language/run/advantage.py",
        '@baseline("mean")',
        '@baseline("median")\n'
        "def group_median(score, group_size):\n"
        "    score = score.reshape(-1, group_size)\n"
        "    return (score - score.median(1, keepdim=True).values).flatten()\n\n\n",
    ),
    (
        "config/objectives.py",
        '_objective("rloo"',
        '_objective("median", "the median", baseline="median", reduction="token")\n',
    ),
)
CONTROL = [*QUICK, "learner.compile=false"]
LANGUAGE = ["experiment=sort_digits", "frames=16", "collector.prompts=4", "collector.group_size=4"]
LADDERS = {
    "kl.estimator=k4": (ESTIMATOR, [*CONTROL, "kl.placement=loss"]),
    "loss=spo": (LOSS, [*CONTROL, "loss.epsilon=0.1"]),
    "controller=halving": (CONTROLLER, [*CONTROL, "controller.factor=0.4"]),
    "loss=median": (OBJECTIVE, [*LANGUAGE, "advantage=median", "collector.max_new_tokens=4"]),
}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("word", "left_out"),
    [  # a controller is declared and found as a loss is
        *((word, None) for word in LADDERS),
        *((word, place) for word in LADDERS if word != "controller=halving" for place in (0, 1)),
    ],
)
def test_two_places_and_the_one_that_is_left_out_is_named(word: str, left_out) -> None:
    places, words = LADDERS[word]
    shutil.copytree(Path(klrl.__file__).parent, "klrl")
    shutil.copytree(conf_dir(), "klrl/conf", dirs_exist_ok=True)
    for i, (name, at, lines) in enumerate(places):
        path = Path("klrl", name)
        text = path.read_text("utf-8")
        assert text.count(at) == 1, name
        if i != left_out:
            path.write_text(text.replace(at, lines + at), "utf-8")
    done = in_fork(partial(run_the_copy, word, *words, "logger=none", "eval.evaluations=0"), Path())
    if left_out is None:
        assert done.code == 0, done.err
        return
    (line,) = done.lines
    assert (done.code, done.out) == (2, ""), line
    assert places[left_out][0] in line
    assert not any(Path("outputs").glob("*"))


def run_the_copy(*words: str) -> None:
    """Import klrl and its choices anew, from the current folder; torch is there."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("klrl", "hydra", "omegaconf"):
            del sys.modules[name]
    sys.path.insert(0, "")
    importlib.import_module("klrl.__main__").main(words)
