"""Losses as the field writes them: right ones pass under their name, wrong ones are named."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from klrl.doctor.loss import LossReport, examine_loss, report_text
from klrl.doctor.problems import KINDS, Problem
from tests.doctor.reports import MANY, ONE, THREE, codes, everywhere, longer

#: A loss is judged in 1 to 2 s.
pytestmark = pytest.mark.integration

FIELD = Path(__file__).with_name("field.py")


def examine(name: str, options: str = "", seeds: int = 3) -> LossReport:
    """Options are those of the command line, without their dashes."""
    words = options.split()
    given: dict[str, object] = dict(zip(words[::2], words[1::2], strict=True))
    given["stale"] = int(given.get("stale", 0))  # type: ignore[call-overload]
    return examine_loss(f"{FIELD}:{name}", seeds=seeds, **given)  # type: ignore[arg-type]


#: loss, options, a phrase of the objective
RIGHT = [
    ("forward_distillation", "divergence forward", "the forward KL(ref||pi) of each step alone"),
    ("forward_of_sequences", "divergence forward scope sequence", "KL(ref||pi) of whole episodes"),
    (
        "forward_everywhere",
        "divergence forward scope sequence placement split",
        "KL(ref||pi) of each step, with its effect on later states",
    ),
    ("js_of_steps", "divergence js", "Jensen-Shannon divergence between pi and ref, of each step"),
    ("tv_of_steps", "divergence tv", "total variation between pi and ref, of each step alone"),
    ("tv_of_sequences", "divergence tv scope sequence", "variation between pi and ref, of whole"),
    ("whitened_shaped", "", "the reverse KL(pi||ref) of whole episodes"),
    ("over_coef", "", "the reverse KL(pi||ref) of whole episodes"),
    ("squared_gap", "", "the reverse KL(pi||ref) of whole episodes"),
    ("Penalty", "scope token", "J = - 0.5 x the reverse KL(pi||ref) of each step alone"),
    ("penalty", "scope token", "J = - 1 x the reverse KL(pi||ref) of each step alone"),
    ("per_longest", "scope token", "the reverse KL(pi||ref) of each step alone"),
    ("importance", "stale 3 divergence none", "E[return],"),
    ("sequence_k2", "stale 3", "E[return] - 0.5 x the reverse KL(pi||ref) of whole episodes"),
    ("prefix_k1", "stale 3", "the reverse KL(pi||ref) of whole episodes"),
    ("prefix_exact", "stale 3", "the reverse KL(pi||ref) of whole episodes"),
    ("prefix_k2", "stale 3 scope token", "each step alone, in pi's own states"),
    ("token_k3", "stale 3 scope token", "the reverse KL(pi||ref) of each step alone"),
    ("surrogate", "stale 3 divergence none scope token", "E[A_old of pi's actions in the sampled"),
    ("old_kl", "stale 3 divergence forward scope sequence", "the forward KL(old||pi) of whole"),
    ("old_tv", "stale 3 divergence tv", "total variation between pi and old, of each step alone"),
    ("trpo", "stale 3 divergence forward", "states] - 0.5 x the forward KL(old||pi) of each step"),
]


@pytest.mark.parametrize(("name", "options", "objective"), RIGHT)
def test_right_losses_pass_under_their_own_name(name: str, options: str, objective: str) -> None:
    report = examine(name, options)
    assert codes(report) == {}
    assert objective in report_text(report)
    for kind in report.kinds:
        assert kind.cosine.min > 1 - 1e-12
        assert kind.error.max < 1e-6


#: loss, options, its faults, a phrase of the verdict
WRONG = [
    ("js_of_steps", "", everywhere("is_js_token"), "add --divergence js --scope token"),
    (
        "forward_of_sequences",
        "",
        {ONE: ["forward_kl"], **longer("is_forward_sequence")},
        "add --divergence forward --scope sequence",
    ),
    ("own_step", "divergence forward", everywhere("is_reverse_token"), "KL(pi||ref) of each step"),
    ("forward_of_sequences", "divergence forward", longer("is_forward_sequence"), "of whole"),
    ("whitened_shaped", "divergence forward", everywhere("mixture"), "+ 1.00 x the KL of later"),
    ("token_k3", "stale 3", longer("own_step", "kl_weight_token"), "each token's own ratio"),
    ("k2_no_weight", "stale 3", everywhere("kl_weight_none"), "the KL has no importance weight"),
    ("k3_no_weight", "stale 3", everywhere("forward_kl", "kl_weight_none"), "KL(ref||pi)"),
    (
        "forward_no_weight",
        "stale 3 divergence forward",
        everywhere("kl_weight_none"),
        "the KL has no importance weight",
    ),
    ("truncated_k2", "stale 3", everywhere("kl_truncated"), "the KL has truncated weights"),
    ("detached_k1", "stale 3", everywhere("no_kl"), "k1 in a loss"),
    ("k1_of_old", "stale 3", everywhere("stale_kl"), "pi_old's"),
    ("differentiable_k2", "stale 3", everywhere("k2_value"), "E[k2]"),
    ("swapped_k3", "stale 3", everywhere("k3_swapped"), "exchanged"),
    (
        "grpo_k3_reward",
        "stale 3",
        {ONE: ["k3_in_reward"], **longer("k3_in_reward", "kl_weight_token")},
        "charge k1 there",
    ),
    ("grpo_k3_reward", "", everywhere("k3_in_reward"), "charge k1 there"),
    ("near_old", "stale 3", everywhere("to_old"), "near pi_old"),
    (
        "reinforce",
        "stale 3 divergence none",
        everywhere("return_weight_none"),
        "return has no importance",
    ),
    (
        "surrogate",
        "stale 3 divergence none",
        longer("return_weight_token"),
        "without those of the tokens before",
    ),
    ("inverse", "stale 3 divergence none", everywhere("return_weight_inverse"), "upside down"),
    (
        "gspo",
        "stale 3 divergence none",
        {
            THREE: ["return_weight_geometric"],
            MANY: ["return_length", "return_weight_geometric"],
        },
        "geometric mean",
    ),
    (
        "cispo",
        "stale 3 divergence none",
        {ONE: ["return_truncated"], **longer("return_weight_token", "return_truncated")},
        "truncated weights",
    ),
    (
        "ppo",
        "stale 3 divergence none",
        {ONE: ["return_clipped"], **longer("return_weight_token", "return_clipped")},
        "no gradient beyond the bound",
    ),
    ("ppo", "stale 3 divergence none scope token", everywhere("return_clipped"), "clipped"),
    ("dppo_mask", "stale 3 divergence none scope token", everywhere("return_clipped"), "masked"),
    ("detached_ratio", "stale 3 divergence none", everywhere("no_return"), "detached log_probs"),
    *(
        (
            "sampled_by_ref",
            stale,
            everywhere("return_weight_reference", "kl_weight_reference"),
            "as if ref had sampled",
        )
        for stale in ("", "stale 3")
    ),
    ("u_log_u", "divergence forward", everywhere("u_log_u"), "detach u"),
    ("undetached", "", everywhere("undetached"), "detach it"),
    ("ppo_max", "stale 3 divergence none scope token", everywhere("return_clip_max"), "the min"),
    ("old_sign", "stale 3 divergence forward", everywhere("sign"), "flip its sign"),
    (
        "old_k2",
        "stale 3 divergence forward",
        everywhere("is_reverse_token", "kl_weight_none"),
        "KL(pi||old) of each step",
    ),
    (
        "old_reverse",
        "stale 3 divergence forward",
        everywhere("is_reverse_token"),
        "not of the forward KL(old||pi)",
    ),
    ("old_k3", "stale 3", everywhere("is_forward_token"), "add --divergence forward"),
    ("per_response", "divergence none", {MANY: ["return_length"]}, "divided by its own length"),
    ("k3_per_longest", "", everywhere("forward_kl"), "as k3 in a loss has it"),
    ("square_of_coef", "", everywhere("scale"), "coef acts as 2 times its value at coef=1"),
    ("capped_coef", "", everywhere("other_coef"), "J's at coef=0.5, but not at coef=1"),
    ("two_weights", "", everywhere("scale"), "beta, taken as coef, acts as 0.5 times its value at"),
    ("own_and_forward", "", everywhere("no_return", "unknown"), "none that the doctor knows"),
    ("convex", "", everywhere("scale"), "coef acts as 2 times its value: "),
]


def wrong() -> Iterator[object]:
    """The cases of :data:`WRONG`; slow are those whose faults have come before."""
    seen: set[str] = set()
    for case in WRONG:
        faults = set().union(*case[2].values())
        yield pytest.param(*case, marks=() if faults - seen else pytest.mark.slow)
        seen |= faults


@pytest.mark.parametrize(("name", "options", "expected", "words"), [*wrong()])
def test_wrong_losses_are_named(name: str, options: str, expected: dict, words: str) -> None:
    report = examine(name, options)
    assert not report.ok
    assert codes(report) == expected
    assert words in report_text(report)


@pytest.mark.parametrize("kind", [0, 2])
def test_variance_is_that_of_the_mean_of_so_many_episodes(kind: int) -> None:
    """Var(mean of N) = (E|g|^2 - |E g|^2) / N, g the gradient of one episode."""
    seeds, noise, size = 60, 0.0, 0.0
    for seed in range(seeds):
        problem = Problem(KINDS[kind], seed)
        numbers = problem.numbers(problem.everything, 0.0)
        p = numbers.logits.detach().exp()
        score = torch.nn.functional.one_hot(numbers.actions, p.shape[-1]) - p
        weighted = score * (numbers.advantages * numbers.mask)[..., None]
        at = torch.nn.functional.one_hot(numbers.states, problem.kind.states).double()
        each = torch.einsum("nta,nts->nas", weighted, at).flatten(1)
        noise += float(each.var(0, unbiased=False).sum()) / len(each)
        size += float(each.mean(0).square().sum())
    found = examine("policy_gradient", "divergence none", seeds).kinds[kind].variance
    assert found == pytest.approx(noise / size, rel=0.2)


def test_the_examples_of_the_page() -> None:
    examples = f"{FIELD.parents[2]}/docs/examples/losses.py"
    for name, given in (
        ("whitened", {}),
        ("distillation", {"divergence": "forward"}),
        ("trust_region", {"divergence": "forward", "stale": 3}),
    ):
        assert examine_loss(f"{examples}:{name}", seeds=4, **given).ok, name  # type: ignore[arg-type]
    clip = examine_loss(f"{examples}:clipped", divergence="none", stale=3, seeds=6)
    assert codes(clip) == {
        ONE: ["return_clipped"],
        **longer("return_weight_token", "return_clipped"),
    }


def test_the_weights_of_a_loss_module_are_named() -> None:
    """By the gradient at the logits that its actor gave, ragged frames too."""
    report = examine_loss("klrl.losses:ClipPPOLoss", divergence="none", stale=3, seeds=3)
    assert codes(report) == {
        ONE: ["return_clipped"],
        **longer("return_weight_token", "return_clipped"),
    }


@pytest.mark.parametrize("name", ["whitened_shaped", "squared_gap", "times_coef"])
def test_a_factor_that_depends_on_coef(name: str) -> None:
    report = examine(name)
    assert report_text(report).endswith("problem, up to a factor that depends on coef")
    assert all(kind.varies for kind in report.kinds)


def test_no_factor_without_coef() -> None:
    assert not any(kind.varies for kind in examine("policy_gradient", "divergence none").kinds)
