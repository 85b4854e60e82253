"""``klrl doctor --loss``: wrong losses are found and named, right ones pass."""

import json
import time
from pathlib import Path

import pytest
import torch

from klrl.doctor.loss import LossReport, examine_loss, report_text
from klrl.doctor.problems import KINDS, Problem
from klrl.doctor.user_loss import COEF
from tests.doctor.reports import MANY, ONE, THREE, Faults, codes, everywhere, longer
from tests.doctor.test_problems import tables
from tests.runs.commands import exits

#: Problems of each kind; their gradients are sums over all episodes.
SEEDS = 5
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "losses.py"


def examine(name: str, placement: str = "loss", seeds: int = SEEDS, **settings) -> LossReport:
    return examine_loss(f"{EXAMPLES}:{name}", placement=placement, seeds=seeds, settings=settings)


#: loss -> its faults, and a phrase of the verdict.
WRONG = {
    "k1_as_loss": (everywhere("no_kl"), "the KL has no gradient in expectation"),
    "k3_as_loss": (everywhere("forward_kl"), "that of the forward KL(ref||pi)"),
    "own_step_only": (longer("own_step"), "the KL of later steps is missing"),
    "wrong_sign": (everywhere("sign"), "points away: it raises the KL"),
    "mask_ignored": ({MANY: ["mask"]}, "positions outside the mask count"),
}
RIGHT = {"k2_of_sequences": "loss", "split": "split"}


@pytest.mark.integration
@pytest.mark.parametrize("seeds", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_five_wrong_losses_are_found_and_two_right_ones_pass_in_a_minute(seeds: int) -> None:
    start = time.process_time()
    for name, (expected, words) in WRONG.items():
        report = examine(name, seeds=seeds)
        assert codes(report) == expected, name
        assert words in report_text(report)
        assert not report.ok
    for name, placement in RIGHT.items():
        report = examine(name, placement, seeds=seeds)
        assert report.ok
        for kind in report.kinds:
            assert kind.cosine.min > 1 - 1e-12
            assert kind.error.max < 1e-9
            assert abs(kind.sampled - 1) < 4 * kind.stderr < 1.5 / seeds**0.5
    assert time.process_time() - start < 60


@pytest.mark.parametrize(
    ("name", "placement", "expected"),
    [
        ("k1_in_reward", "loss", {}),
        ("k2_stopped", "loss", {}),
        ("SplitModule", "split", {}),
        ("SplitModule", "loss", longer("own_step")),
        ("split", "loss", longer("own_step")),
        # It insists on a coef, so the KL is charged in the reward and in the loss.
        ("split", "reward", {ONE: ["scale"], **longer("twice")}),
        ("k2_of_sequences", "split", longer("later_twice")),
        ("normalised", "loss", everywhere("scale")),
        ("per_response", "loss", {MANY: ["return_length", "length"]}),
    ],
)
@pytest.mark.integration
def test_other_examples(name: str, placement: str, expected: Faults) -> None:
    assert codes(examine(name, placement)) == expected


@pytest.mark.parametrize("name", ["k1_as_loss", "k3_as_loss", "wrong_sign", "k1_in_reward"])
def test_the_numbers_of_one_step_are_those_of_softmax_gradients(name: str) -> None:
    """Over the logits of one state: of E[R] p (R - E R), of KL p (r - KL), of KL(ref||pi) p - q."""
    cosines, errors, along = [], [], []
    for seed in range(SEEDS):
        p, q, rewards = tables(Problem(KINDS[0], seed))
        r = (p / q).log()
        gain = p * (rewards - (p * rewards).sum(-1, keepdim=True))
        kl = p * (r - (p * r).sum(-1, keepdim=True))
        charged = {"k1_as_loss": 0 * kl, "k3_as_loss": p - q, "wrong_sign": -kl}.get(name, kl)
        true, got = (gain - COEF * kl).flatten(), (gain - COEF * charged).flatten()
        cosines.append(float(true @ got / true.norm() / got.norm()))
        along.append(float(true @ got / true.square().sum()))
        errors.append(float((got - true).norm() / true.norm()))
    found = examine(name).kinds[0]
    assert (found.cosine.min, found.cosine.max) == pytest.approx((min(cosines), max(cosines)))
    assert (found.error.min, found.error.max) == pytest.approx(
        (min(errors), max(errors)), abs=1e-12
    )
    assert abs(found.sampled - sum(along) / len(along)) < 4 * found.stderr


@pytest.mark.parametrize(
    ("loss", "placement", "expected"),
    [
        ("klrl.losses:ClipPPOLoss", "split", {}),
        ("klrl.losses:KLPENPPOLoss", "split", {}),
        ("klrl.losses:ClipPPOLoss", "loss", longer("own_step")),
        ("torchrl.objectives:ClipPPOLoss", "reward", {}),
    ],
)
@pytest.mark.integration
def test_modules_of_klrl_and_torchrl(loss: str, placement: str, expected) -> None:
    report = examine_loss(loss, placement=placement, seeds=3)
    assert codes(report) == expected
    assert "counted: loss_objective" in report.described
    assert "not counted: loss_entropy" in report.described
    # A mean over three steps is no fault.
    assert (report.kinds[1].scale.min, report.kinds[1].scale.max) == pytest.approx((1 / 3, 1 / 3))


def test_settings_reach_a_module() -> None:
    loss = "klrl.losses:ClipPPOLoss"
    report = examine_loss(loss, placement="split", seeds=5, settings={"normalize_advantage": True})
    assert codes(report) == {ONE: ["scale"], **longer("mixture")}
    assert " + 1.00 x the KL of later steps; right" in report_text(report)


MINE = """
import torch

def penalty(log_probs, ref_log_probs, mask, coef):
    return coef * (((log_probs - ref_log_probs) * mask).sum(1) ** 2 / 2).mean()

def single(log_probs, ref_log_probs, mask, coef):
    return penalty(log_probs.float(), ref_log_probs.float(), mask, coef)

def constant(log_probs, ref_log_probs, mask, coef):
    return coef * ((log_probs - ref_log_probs) * mask).sum(1).mean()

def summed(log_probs, ref_log_probs, mask, coef):
    return len(mask) * penalty(log_probs, ref_log_probs, mask, coef)

def half_forward(logps, ref_logps, completion_mask, beta):
    r = logps - ref_logps
    kl = ((-r).exp() - 1 + r) / 2 + r**2 / 4
    return beta * (kl * completion_mask).sum(1).mean()

def flipped(log_probs, rewards, mask, coef, ref_log_probs):
    k1 = ((log_probs - ref_log_probs) * mask).sum(1, keepdim=True).detach()
    return ((rewards.sum(1, keepdim=True) - coef * k1) * log_probs * mask).sum(1).mean()

def own_reward(log_probs, rewards, mask, coef, ref_log_probs):
    k1 = (log_probs - ref_log_probs).detach()
    return -((rewards - coef * k1) * log_probs * mask).sum(1).mean()

def prints(log_probs, ref_log_probs, mask, coef):
    print("hello")
    mask[:] = mask
    return penalty(log_probs, ref_log_probs, mask, coef)

class Penalty(torch.nn.Module):
    def forward(self, log_probs, ref_log_probs, mask, coef):
        return penalty(log_probs, ref_log_probs, mask, coef)

instance = Penalty()

def in_place(logits, ref_logits, log_probs, ref_log_probs, mask, coef):
    value = penalty(log_probs, ref_log_probs, mask, coef)
    logits -= 1
    ref_logits.zero_()
    return value

def leave_one_out(log_probs, ref_log_probs, rewards, mask, coef):
    score, n = rewards.sum(1), len(rewards)
    advantages = score - (score.sum() - score) / (n - 1)
    gain = advantages * (log_probs * mask).sum(1)
    return penalty(log_probs, ref_log_probs, mask, coef) - gain.mean()

def later_only(log_probs, ref_log_probs, rewards, mask, coef):
    r = (log_probs - ref_log_probs).detach() * mask
    to_come = (rewards * mask - coef * r).flip(1).cumsum(1).flip(1) + coef * r
    return -(log_probs * mask * to_come).sum(1).mean()

def of_actions(logits, ref_logits, tokens, mask, coef):
    chosen = tokens[..., None]
    log_probs, ref_log_probs = (x.gather(-1, chosen)[..., 0] for x in (logits, ref_logits))
    return penalty(log_probs, ref_log_probs, mask, coef)
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("penalty", {}),
        ("single", {}),
        ("instance", {}),
        ("in_place", {}),
        ("of_actions", {}),
        ("leave_one_out", {}),
        ("constant", everywhere("no_kl")),
        ("half_forward", everywhere("mixture")),
        ("flipped", everywhere("return_sign", "sign")),
        ("own_reward", longer("own_reward", "own_step")),
        ("later_only", {ONE: ["no_kl"], **longer("later_only")}),
    ],
)
def test_losses_of_ones_own(mine: Path, name: str, expected: Faults) -> None:
    report = examine_loss(f"{mine}:{name}", seeds=4)
    assert codes(report) == expected
    if name == "constant":  # the direction of a gradient of rounding errors is not a number
        assert {(kind.cosine.min, kind.cosine.max) for kind in report.kinds} == {(0, 0)}
    if name == "half_forward":
        assert "mixture: 0.50 x each step's own KL + 0.50 x the forward KL; right" in report_text(
            report
        )


@pytest.mark.parametrize(
    "names",
    [
        "per_token_logps, old_per_token_logps, ref_per_token_logps, completion_mask, beta",  # TRL
        "log_prob, old_log_prob, ref_log_prob, response_mask, kl_loss_coef",  # verl
        "logprob, old_logprob, ref_logprob, loss_mask, kl_coef",
        "action_log_probs, old_action_log_probs, base_action_log_probs, action_mask, kl_coef",
    ],
)
def test_arguments_have_the_names_of_other_libraries(tmp_path: Path, names: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"""
def loss({names}):
    new, old, ref, mask, coef = {names}
    moved, away = (((new - x) * mask).sum(1) for x in (old, ref))
    return coef * (moved.exp() * away).mean()
""")
    assert examine_loss(f"{path}:loss", seeds=2, stale=3).ok


@pytest.mark.integration
def test_a_sum_over_the_batch_is_right(mine: Path) -> None:
    """Sampled batches are as large as the exact one, so that a sum is no bias."""
    summed = examine_loss(f"{mine}:summed", seeds=40)
    assert summed.ok
    for kind, episodes in zip(summed.kinds, (1312, 1296, 1296), strict=True):
        assert kind.scale.min == pytest.approx(episodes)
        assert abs(kind.sampled - 1) < 4 * kind.stderr < 0.35


def test_the_same_numbers_each_time_and_torchs_generator_untouched(mine: Path) -> None:
    state = torch.random.get_rng_state()
    first, second = (examine_loss(f"{mine}:penalty", seeds=3) for _ in range(2))
    assert first == second
    assert torch.equal(torch.random.get_rng_state(), state)


def test_command_and_json(mine: Path, capsys) -> None:
    assert exits("doctor", "--loss", f"{mine}:prints", "--seeds", "3", "--json") == 0
    said = capsys.readouterr()
    assert "hello" in said.err
    told = json.loads(said.out)
    assert told["ok"]
    assert [kind["name"] for kind in told["kinds"]] == [ONE, THREE, MANY]
    assert told["kinds"][0]["cosine"]["min"] == pytest.approx(1.0)
    assert exits("doctor", "--loss", f"{mine}:half_forward", "--seeds", "3", "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["ok"]
    assert told["kinds"][0]["faults"][0]["code"] == "mixture"
