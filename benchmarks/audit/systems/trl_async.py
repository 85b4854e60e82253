"""TRL: ``AsyncGRPOTrainer.compute_loss`` (trl/experimental/async_grpo/): no KL but the clip.

It is called on a stub of the trainer; old_log_probs are those of the server that sampled.
"""

from collections import defaultdict
from types import SimpleNamespace as Stub

import torch
from trl.experimental.async_grpo import AsyncGRPOTrainer

SYSTEM, DIVERGENCE = "TRL 1.16.0", "none"


def loss(log_probs, old_log_probs, advantages, mask):
    count = int(mask.sum())
    trainer = Stub(
        accelerator=Stub(num_processes=1, reduce=lambda x, **_: x, gather=lambda x: x),
        aux_loss_enabled=False, epsilon_low=0.2, epsilon_high=0.2,
        current_gradient_accumulation_steps=1, _metrics={"train": defaultdict(list)},
        _step_forward_tokens=0, _step_trained_tokens=0, _step_seq_len_weighted=0, _step_samples=0,
        _step_forward_s=0,
    )  # fmt: skip
    out = Stub(log_probs=log_probs[mask], entropy=torch.zeros(count))
    one, row = torch.ones(1), torch.zeros(1, count, dtype=torch.long)
    names = ("input_ids", "position_ids", "shift_labels", "segment_id")
    trees = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    inputs = {
        **dict.fromkeys((*names, *trees), row), "attention_mask": row + 1,
        "token_index": torch.arange(count)[None], "old_log_probs": old_log_probs[mask][None],
        "advantages": advantages.expand(mask.shape)[mask][None],
        "tree_max_seqlens": torch.ones(1, 2), "global_n_tokens": one * count,
        "global_n_forward_tokens": one * count, "mean_seq_len": one,
    }  # fmt: skip
    return AsyncGRPOTrainer.compute_loss(trainer, lambda **_: out, inputs) * count / len(mask)


ROWS = {"policy loss, async GRPO, epsilon=0.2": loss}
