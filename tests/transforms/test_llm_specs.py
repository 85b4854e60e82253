"""The LLM-side KLRewardTransform's output specs, where the out key is not the reward too."""

import pytest
import torch
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import TransformedEnv, check_env_specs

from klrl.envs.llm.transforms.kl.reward import KLRewardTransform
from tests.transforms.heads import TenSteps
from tests.transforms.llm_toys import network, wrapper

COEF = 0.5
#: TorchRL 0.14.1's own: a deprecated argument of torch, a history that it reshapes, a forced zero.
pytestmark = [
    pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning"),
    pytest.mark.filterwarnings("ignore:(Prompt|Full) history should have one more:UserWarning"),
    pytest.mark.filterwarnings("ignore:the sampler's log-prob of every first:UserWarning"),
]


class TokenEnv(TenSteps):
    """A prompt of two tokens; the action is the whole sequence of six, its log-probs -1 each."""

    def __init__(self) -> None:
        super().__init__(2)
        mask = Categorical(2, shape=(2, 6), dtype=torch.bool)
        self.observation_spec = Composite(
            tokens=Composite(prompt=Categorical(50, shape=(2, 2)), shape=(2,)),
            masks=Composite(all_attention_mask=mask, shape=(2,)),
            log_probs=Composite(full=Unbounded(shape=(2, 6)), shape=(2,)),
            score=Unbounded(shape=(2, 1)),
            shape=(2,),
        )
        full = Composite(full=Categorical(50, shape=(2, 6)), shape=(2,))
        self.action_spec = Composite(tokens=full, shape=(2,))
        self.reward_spec = Unbounded(shape=(2, 1))

    def seen(self) -> dict[str, object]:
        return {
            "tokens": {"prompt": torch.ones(2, 2, dtype=torch.long)},
            "masks": {"all_attention_mask": torch.ones(2, 6, dtype=torch.bool)},
            "log_probs": {"full": -torch.ones(2, 6)},
            "score": torch.full((2, 1), 7.0),
        }

    def rewards(self, tensordict) -> dict:
        return {"reward": torch.full((2, 1), 3.0)}


BRANCHES = {
    "reward to reward": ("reward", "reward", 3.0),
    "reward to another key": ("reward", "shaped", 3.0),
    "reward to a nested key": ("reward", ("kl", "shaped"), 3.0),
    "observation to another key": ("score", "shaped", 7.0),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_specs_hold_for_every_out_key(name: str) -> None:
    in_key, out_key, score = BRANCHES[name]
    ref = wrapper(network(), "tokens")
    transform = KLRewardTransform(ref, coef=COEF, in_keys=[in_key], out_keys=[out_key])
    env = TransformedEnv(TokenEnv(), transform)
    check_env_specs(env)
    is_reward = out_key == "reward"
    assert (out_key in env.full_observation_spec.keys(True, True)) is not is_reward
    assert env.full_reward_spec["reward"].shape == ((2, -1, 1) if is_reward else (2, 1))
    start = env.reset()
    after = env.rand_step(start)["next"]
    assert not start["kl_penalty"].any()
    if not is_reward:
        assert not start[out_key].any()
        assert after["reward"].tolist() == [[3.0], [3.0]]
    assert after[out_key].shape == (2, 6, 1)
    kl = after["kl_penalty"].sum((1, 2))
    torch.testing.assert_close(after[out_key].sum((1, 2)), score - COEF * kl)
    # Four tokens of log-prob -1 behind the prompt, against the reference's.
    torch.testing.assert_close(kl, -4 - after["ref_log_prob"].sum((1, 2)))
