"""TorchRL: ``GRPOLoss`` (torchrl/objectives/llm/grpo.py): coef times its KL to the reference."""

from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torchrl.modules.llm.policies.common import LLMMaskedCategorical
from torchrl.objectives.llm import GRPOLoss

SYSTEM = "TorchRL 0.14.1"


class _Actor(TensorDictModuleBase):
    """Log-probs that are already there."""

    in_keys, out_keys = ("now",), ("logits",)

    def get_dist(self, data, **_):
        return LLMMaskedCategorical(logits=data["now"], mask=data["mask"])


def _total(logits, actions, old_log_probs, advantages, mask, ref=None, **coefs):
    data = TensorDict(
        {
            "now": logits, "mask": mask, ("tokens", "full"): actions,
            ("log_probs", "full"): old_log_probs, "advantage": advantages[..., None],
        },
        [len(mask)],
    )  # fmt: skip
    if ref is not None:
        data["next", "ref_log_probs", "full"] = ref[..., None]
    loss = GRPOLoss(_Actor(), clip_epsilon=0.2, entropy_bonus=False, **coefs)
    out = loss(data)
    terms = [out.get(key) for key in ("loss_objective", "loss_kl_to_ref", "loss_kl_to_inference")]
    # The means over tokens as sums over a response's.
    return sum(term.sum() for term in terms if term is not None) * mask.sum() / len(mask)


def to_ref(logits, actions, old_log_probs, ref_log_probs, advantages, mask, coef):
    return _total(
        logits, actions, old_log_probs, advantages, mask, ref_log_probs, kl_to_ref_coeff=coef
    )


def to_inference(logits, actions, old_log_probs, advantages, mask, coef):
    return _total(logits, actions, old_log_probs, advantages, mask, kl_to_inference_coeff=coef)


ROWS = {"GRPOLoss, kl_to_ref_coeff": to_ref, "GRPOLoss, kl_to_inference_coeff": to_inference}
