"""The LLM-side KLRewardTransform's output specs, where the out key is not the reward too."""

from __future__ import annotations

import pytest
import torch
from tensordict import set_list_to_stack
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import Compose, Transform, TransformedEnv, check_env_specs
from torchrl.envs.llm import ChatEnv

from klrl.envs.llm.transforms.kl.reward import KLRewardTransform
from tests.transforms.heads import TenSteps
from tests.transforms.llm_toys import network, tokenizer, wrapper
from tests.transforms.test_llm_env import Score, reset, sampler

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


class Told(Transform):
    """A score that is an observation."""

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("score", torch.tensor([5.0, 6.0]).view(2, 1, 1))

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset.set("score", torch.zeros(2, 1, 1))

    def transform_observation_spec(self, observation_spec):
        observation_spec["score"] = Unbounded(shape=(2, 1, 1))
        return observation_spec


@pytest.mark.parametrize("in_key", ["reward", "score"])
def test_another_out_key_in_a_chat_is_told_and_written(in_key: str) -> None:
    with set_list_to_stack(True):
        ref = wrapper(network(seed=1), "tokens")
        transform = KLRewardTransform(ref, coef=COEF, in_keys=[in_key], out_keys=["shaped"])
        base = ChatEnv(batch_size=(2,), tokenizer=tokenizer())
        env = TransformedEnv(base, Compose(Score(), Told(), transform))
        assert env.full_reward_spec["reward"].shape == (2, 1, 1)
        start = reset(env)
        after = env.step(sampler(network())(start))["next"]
        for key in ("shaped", "kl_penalty", "ref_log_prob"):
            spec = env.full_observation_spec[key]
            assert spec.shape == (2, -1, 1)
            assert spec.dtype == after[key].dtype
            assert after[key].shape == (2, after["kl_penalty"].shape[1], 1)
            assert not start[key].any()
    scores = torch.tensor([10.0, 20.0] if in_key == "reward" else [5.0, 6.0])
    assert after["reward"].flatten().tolist() == [10.0, 20.0]
    shaped = scores - COEF * after["kl_penalty"].sum((1, 2))
    torch.testing.assert_close(after["shaped"].sum((1, 2)), shaped)
