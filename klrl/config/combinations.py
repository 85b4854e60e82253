"""Which checks of settings against each other a job passes; the checks are in ``rules/``.

A check takes a typed job and raises a ConfigError that names setting, value and remedy. To add one:
a function in the file of ``rules/`` that is named for its setting, and its name below. A setting
that a job never reads is a line in ``rules/unread.py``. No torch in here; ``klrl.runs.machine`` and
each domain's ``preflight`` check what depends on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from klrl.config import CONTROL, LANGUAGE
from klrl.config.rules import actor, controller, kl, logger, loss, rollout

Check = Callable[[Any], None]
_BOTH: Sequence[Check] = (
    loss.check_reduction,
    loss.check_lr,
    actor.check_init,
    loss.check_beta,
    kl.check_charged,
    kl.check_step_divergence,
    controller.check_target,
    kl.check_reward_weight,
    controller.check_start,
    controller.check_unit,
    logger.check_also,
)
#: domain -> its checks; the first that fails is reported
CHECKS: Mapping[str, Sequence[Check]] = {
    CONTROL: (
        loss.check_minibatches_of_frames,
        loss.check_mask_truncated,
        loss.check_learner_of_frames,
        rollout.check_workers,
        rollout.check_window,
        kl.check_ray_step,
        actor.check_hidden,
        actor.check_own,
        *_BOTH,
    ),
    LANGUAGE: (
        rollout.check_reward,
        rollout.check_reward_weights,
        rollout.check_data,
        actor.check_model,
        rollout.check_digits,
        rollout.check_group_size,
        loss.check_minibatches_of_prompts,
        kl.check_shaped,
        kl.check_adapter_off,
        actor.check_lora,
        kl.check_language_step,
        loss.check_compile,
        loss.check_learner_dtype,
        loss.check_micro_batch,
        *_BOTH,
    ),
}
