"""TRL: ``GRPOTrainer._compute_loss`` (trl/trainer/grpo_trainer.py), no advantages: its KL alone.

It is called on a stub of the trainer. Each loss_type divides by another count; all are put on the
scale of a sum over a response's tokens.
"""

from collections import defaultdict
from types import SimpleNamespace as Stub

import torch
from trl.trainer.grpo_trainer import GRPOTrainer

SYSTEM = "TRL 1.16.0"


def _loss(corrected=True, level="token", loss_type="dapo"):
    def loss(log_probs, old_log_probs, ref_log_probs, mask, coef):
        trainer = Stub(
            _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, 0 * log_probs, None),
            args=Stub(use_bias_correction_kl=corrected, delta=None, steps_per_generation=1),
            accelerator=Stub(num_processes=1, reduce=lambda x, **_: x, gather=lambda x: x),
            beta=coef, importance_sampling_level=level, loss_type=loss_type,
            epsilon_low=0.2, epsilon_high=0.2, max_completion_length=mask.shape[1],
            aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
            use_vllm=False, _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1,
            model=Stub(training=True), _metrics={"train": defaultdict(list)},
        )  # fmt: skip
        tokens = mask.sum()
        nothing = torch.zeros(len(mask), 1, dtype=torch.long)
        inputs = {
            "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": mask.long(),
            "completion_mask": mask.to(log_probs.dtype), "advantages": torch.zeros(len(mask)),
            "old_per_token_logps": old_log_probs, "ref_per_token_logps": ref_log_probs,
            "num_items_in_batch": tokens,
        }  # fmt: skip
        sums = {"luspo": 1, "dr_grpo": mask.shape[1]}
        return GRPOTrainer._compute_loss(trainer, None, inputs) * sums.get(
            loss_type, tokens / len(mask)
        )

    return loss


ROWS = {
    "GRPO, beta (use_bias_correction_kl=True)": _loss(),
    "GRPO, use_bias_correction_kl=False": _loss(corrected=False),
    "GRPO, importance_sampling_level=sequence": _loss(level="sequence"),
    "GRPO, loss_type=grpo": _loss(loss_type="grpo"),
    "GRPO, loss_type=dr_grpo": _loss(loss_type="dr_grpo"),
    "GRPO, loss_type=luspo, level=sequence": _loss(level="sequence", loss_type="luspo"),
}
