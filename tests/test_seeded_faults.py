"""Faults that others made, seeded into a copy of the package: the tests must fail, and end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: The ordinary tests of the KL's value, gradient and control; quick, and no runs.
ORDINARY = (
    "tests/transforms/test_transforms.py",
    "tests/control/test_networks.py",
    "tests/losses/test_placement.py",
    "tests/losses/test_modules.py",
    "tests/kl/test_properties.py",
)
#: fault -> the tests that are there for it, where the ordinary ones are not.
CAUGHT_BY = {
    "reward scaled before the penalty": ("tests/train/test_penalty_order.py",),
    "score compared after the penalty": ("tests/train/test_penalty_order.py",),
    "kl_old_new turned round": ("tests/losses/test_seams.py",),
    "loss_kl_ref averaged under sum": ("tests/losses/test_seams.py",),
    "a worker keeps the log-prob of the action before": ("tests/transforms/test_workers.py",),
    "a worker charges the log-prob of the action before": (
        "tests/transforms/test_collector_workers.py",
    ),
    "a Ray worker's log-prob one action late": ("tests/control/test_ray_rollout.py",),
    "the reference scored at temperature 1": ("tests/language/test_temperature.py",),
    "the old policy scored at temperature 1": ("tests/language/test_temperature.py",),
    "a rollout scored again at temperature 1": ("tests/language/test_temperature.py",),
    "adapters on in the reference's head": ("tests/language/test_temperature.py",),
    "KL(old||new) of what the loss sees alone": ("tests/language/test_micro_batch.py",),
    "target_kl ends at once the target": ("tests/train/test_learner.py",),
    "a line search to the target of a response": ("tests/train/test_learner.py",),
    "the normaliser moves before the update": ("tests/train/test_learner.py",),
    "the scale follows the raw reward": ("tests/control/test_reward_norm.py",),
    "a sum of rewards goes on in new episodes": ("tests/control/test_reward_norm.py",),
}
#: Seconds.
LIMIT = 200
SKIP_RUNS = ("-m", "not integration and not slow", "-k", "not torchrls_trainer")

#: fault -> (file, what it says, what it says with the fault)
FAULTS: dict[str, tuple[str, str, str]] = {
    "sign flipped": (
        "klrl/kl/charge.py",
        "return reward - coef * kl",
        "return reward + coef * kl",
    ),
    "coefficient dropped": (
        "klrl/kl/charge.py",
        "return reward - coef * kl",
        "return reward - kl",
    ),
    "live instead of frozen reference": (
        "klrl/kl/reference.py",
        "return deepcopy(actor).requires_grad_(requires_grad).eval()",
        "return actor",
    ),
    "normaliser shared": (
        "klrl/kl/reference.py",
        "return deepcopy(actor).requires_grad_(requires_grad).eval()",
        "shared = {id(m): m for m in actor.modules() if hasattr(m, 'squares')}\n"
        "    return deepcopy(actor, shared).requires_grad_(requires_grad).eval()",
    ),
    "mask ignored": (
        "klrl/kl/estimators.py",
        "    if mask is None:\n",
        "    if True:\n",
    ),
    "detach dropped": (
        "klrl/losses/functional.py",
        "ratio = ratio.detach()",
        "pass",
    ),
    "ratio dropped": (
        "klrl/losses/functional.py",
        "return ratio * function_of(estimator)(log_prob - ref_log_prob)",
        "return function_of(estimator)(log_prob - ref_log_prob)",
    ),
    "beta moved in eval": (
        "klrl/losses/modules.py",
        'self.beta_update == "forward" and self.training',
        'self.beta_update == "forward"',
    ),
    "reward scaled before the penalty": (
        "klrl/control/advantage.py",
        "reward = weighted_reward(charged, raw, config.reward_weight) * reward_scale",
        "reward = weighted_reward(raw, raw, config.reward_weight) * reward_scale + (charged - raw)",
    ),
    "score compared after the penalty": (
        "klrl/language/baselines.py",
        "    compared = weight * BASELINES[baseline](score, group_size)\n",
        "    score = shaped(score, kl_to_go[:, 0], coef)\n"
        "    compared = weight * BASELINES[baseline](score, group_size)\n"
        "    coef = 0.0\n",
    ),
    "kl_old_new turned round": (
        "klrl/losses/modules.py",
        "exact_kl(old, new)",
        "exact_kl(new, old)",
    ),
    "loss_kl_ref averaged under sum": (
        "klrl/losses/modules.py",
        "* self._reduce_loss(kl, data))",
        '* self._reduce_loss(kl, data, reduction="mean"))',
    ),
    "a worker keeps the log-prob of the action before": (
        "klrl/transforms/workers.py",
        "        return self._unset(next_tensordict)",
        "        return next_tensordict.update(tensordict.select(*self.specs()))",
    ),
    "a worker charges the log-prob of the action before": (
        "klrl/transforms/legacy.py",
        "        kl = kl_of_sampled(",
        "        import multiprocessing\n"
        "        if multiprocessing.parent_process() is not None:\n"
        '            before = self.__dict__.get("_before", log_prob)\n'
        '            self.__dict__["_before"], log_prob = log_prob, before\n'
        "        kl = kl_of_sampled(",
    ),
    "a Ray worker's log-prob one action late": (
        "klrl/control/ray_rollout.py",
        "        return to_arrays(self._rollout.collect())",
        "        batch = self._rollout.collect()\n"
        '        batch["action_log_prob"] = batch["action_log_prob"].roll(1, -1)\n'
        "        return to_arrays(batch)",
    ),
    "the reference scored at temperature 1": (
        "klrl/language/update.py",
        "self.reference.next_tokens(batch[REF_STATES], self._temperature)",
        "self.reference.next_tokens(batch[REF_STATES], 1.0)",
    ),
    "the old policy scored at temperature 1": (
        "klrl/language/update.py",
        "NextTokens(batch[STATES], self._old_head, self._temperature)",
        "NextTokens(batch[STATES], self._old_head)",
    ),
    "a rollout scored again at temperature 1": (
        "klrl/language/rescore.py",
        "head(model), temperature)",
        "head(model))",
    ),
    "adapters on in the reference's head": (
        "klrl/language/kl.py",
        "        with adapter_off(self.model):\n            return head",
        "        with nullcontext():\n            return head",
    ),
    "KL(old||new) of what the loss sees alone": (
        "klrl/language/update.py",
        "mask = response_mask(part)",
        "mask = self._learned(part)",
    ),
    "target_kl ends at once the target": (
        "klrl/train/learner.py",
        "> 1.5 * target / positions",
        "> 1.0 * target / positions",
    ),
    "a line search to the target of a response": (
        "klrl/train/learner.py",
        "self._line_search(frames, actor_before, kl_old, dtarg)",
        "self._line_search(frames, actor_before, kl_old, dtarg * positions)",
    ),
    "the normaliser moves before the update": (
        "klrl/train/loop.py",
        "learned = self.learn(batch)",
        "self.parts.move_normalizer(batch); learned = self.learn(batch)",
    ),
    "the scale follows the raw reward": (
        "klrl/control/advantage.py",
        "normalizer.update(reward, after",
        "normalizer.update(raw * reward_scale, after",
    ),
    "a sum of rewards goes on in new episodes": (
        "klrl/control/parts.py",
        "self._reward_normalizer.begin_episodes()",
        "pass",
    ),
}


def run_tests(copy: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Ends, or the fault hangs the suite: LIMIT says when."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *tests],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, "PYTHONPATH": str(copy)},
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in ("klrl", "conf", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize("fault", FAULTS)
def test_there_is_a_place_for_the_fault(fault: str) -> None:
    name, right, _ = FAULTS[fault]
    text = (ROOT / name).read_text(encoding="utf-8")
    assert right in text, f"{name} changed: seed the fault anew"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "tests", [(*SKIP_RUNS, *ORDINARY), *sorted(set(CAUGHT_BY.values()))], ids=lambda each: each[-1]
)
def test_the_control_passes(tests: tuple[str, ...], package: Path) -> None:
    done = run_tests(package, tests)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_test_fails_for(fault: str, package: Path) -> None:
    name, right, wrong = FAULTS[fault]
    path = package / name
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    done = run_tests(package, CAUGHT_BY.get(fault, (*SKIP_RUNS, *ORDINARY)))
    assert done.returncode == 1, f"{fault}: not noticed\n{done.stdout[-1500:]}"
    assert " failed" in done.stdout or "FAILED" in done.stdout
