"""The language transforms inside TorchRL's ChatEnv and LLMCollector, and with control actors."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack, set_list_to_stack
from torch.utils.data import DataLoader
from torchrl.collectors import Collector
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Unbounded
from torchrl.data.llm import History
from torchrl.envs import Compose, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.chat import DatasetChatEnv
from torchrl.modules.llm import TransformersWrapper

from klrl.envs.llm.transforms.kl.reward import KLRewardTransform
from klrl.kl import RetrieveKL
from tests.transforms.llm_toys import alone, network, rendered, tokenizer, wrapper
from tests.transforms.test_control_family import case

#: TorchRL 0.14.1's own: a deprecated argument of torch, announcements for 0.15.
pytestmark = [
    pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning"),
    pytest.mark.filterwarnings("ignore:The env passed to .*Collector is missing:FutureWarning"),
]
COEF = 0.5
QUERIES = ["hello", "sort the digits three one two"]


@pytest.fixture(autouse=True)
def _lists_are_stacks():
    with set_list_to_stack(True):
        yield


class Score(Transform):
    """One scalar per conversation, 10 and 20."""

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("reward", torch.tensor([10.0, 20.0]).view(2, 1, 1))

    def transform_reward_spec(self, reward_spec):
        reward_spec["reward"] = Unbounded(shape=(2, 1, 1))
        return reward_spec


class Script:
    """A policy that says fixed sentences, another one each turn."""

    def __init__(self) -> None:
        self.turn = 0

    def __call__(self, tensordict):
        prompt = tensordict["history"].prompt
        words = [f"I am fine{', thank you' * self.turn}.", "one two three" + " four" * self.turn]
        said = lazy_stack([History.from_chats([[m]])[0] for m in map(_assistant, words)])
        tensordict["history"].full = prompt.extend(said, inplace=False, dim=-1)
        self.turn += 1
        return tensordict


def _assistant(content: str) -> dict:
    return {"role": "assistant", "content": content}


def messages(history) -> list[dict]:
    return [
        {"role": role, "content": content}
        for role, content in zip(history.role, history.content, strict=True)
    ]


def reset(env):
    """From a stack of TensorDicts: a rollout cannot stack ragged steps onto another root."""
    return env.reset(TensorDict({"query": QUERIES}, [2]).to_lazystack(0))


def pair(**kwargs):
    model, reference = network(), network(seed=1)
    return (
        model,
        reference,
        wrapper(model, log_probs_key="gen", **kwargs),
        wrapper(reference, log_probs_key="ref", **kwargs),
    )


@pytest.mark.parametrize("pad_output", [True, False])
@pytest.mark.parametrize("turns", [1, 3])
def test_every_token_of_a_conversation_is_charged_once(turns: int, pad_output: bool) -> None:
    model, reference, gen, ref = pair(pad_output=pad_output)
    kl = RetrieveKL(gen, ref, coeff=COEF, raw_reward_key="reward_raw")
    env = TransformedEnv(ChatEnv(batch_size=(2,), tokenizer=tokenizer()), Compose(Score(), kl))
    steps = env.rollout(
        turns, Script(), auto_reset=False, tensordict=reset(env), break_when_any_done=False
    )
    assert steps.shape == (2, turns)
    for sample in range(2):
        charged = 0
        for turn in range(turns):
            step = steps[sample, turn]
            chat = messages(step["history"].full)
            ids, assistant = rendered(chat)
            new = assistant & (assistant.cumsum(0) > charged)
            charged = int(assistant.sum())
            r = (alone(model, ids) - alone(reference, ids)).masked_fill(~new, 0.0)
            after = step["next"]
            torch.testing.assert_close(after["kl_penalty"][-len(ids) :], r, atol=2e-5, rtol=0)
            shaped = -COEF * r
            shaped[new.nonzero()[-1]] += 10.0 * (sample + 1)
            reward = after["reward"][-len(ids) :].squeeze(-1)
            torch.testing.assert_close(reward, shaped, atol=2e-5, rtol=0)
            assert int(after["log_probs_mask"].sum()) == int(new.sum()) > 0
            assert float(after["reward_raw"]) == 10.0 * (sample + 1)


def test_specs_name_what_is_written_under_the_transforms_own_keys() -> None:
    _, _, gen, ref = pair()
    kl = RetrieveKL(gen, ref, kl_key="kl", gen_log_probs_full_key=("lp", "full"))
    env = TransformedEnv(ChatEnv(batch_size=(2,), tokenizer=tokenizer()), kl)
    spec = env.full_observation_spec
    written = {("lp", "full"), "lp_mask", ("ref_log_probs", "full"), "ref_log_probs_mask", "kl"}
    assert written <= set(spec.keys(include_nested=True))
    assert "kl_penalty" not in spec.keys()
    assert spec["lp", "full"].shape == (2, -1)
    assert env.full_reward_spec["reward"].shape == (2, -1, 1)
    start = reset(env)
    assert not start["kl"].any()
    after = env.step(Script()(start))["next"]
    assert written <= set(after.keys(include_nested=True))


def sampler(model, **kwargs) -> TransformersWrapper:
    return wrapper(
        model,
        generate=True,
        generate_kwargs={"max_new_tokens": 5, "do_sample": True, "temperature": 0.7},
        **kwargs,
    )


def dataset_env(transform) -> TransformedEnv:
    loader = DataLoader(
        QUERIES * 20, batch_size=2, collate_fn=lambda rows: TensorDict({"query": rows}, [len(rows)])
    )
    env = DatasetChatEnv.from_dataloader(
        dataloader=loader, tokenizer=tokenizer(), input_mode="history", batch_size=(2,)
    )
    return env.append_transform(transform)


@pytest.mark.parametrize("pad_output", [True, False])
def test_from_collector_scores_with_the_collectors_live_policy(pad_output: bool) -> None:
    model, reference = network(), network(seed=1)
    policy = sampler(model, pad_output=pad_output)
    before = dict(policy.tokenizer_kwargs)
    ref = wrapper(reference, log_probs_key="ref", pad_output=pad_output)
    env = dataset_env(RetrieveKL(ref_model=ref))
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=2, total_dialog_turns=4)
    for batch in collector:
        for sample in batch[:, 0].unbind(0):
            ids, assistant = rendered(messages(sample["history"].full))
            earlier = int(rendered(messages(sample["history"].prompt))[1].sum())
            new = assistant & (assistant.cumsum(0) > earlier)
            r = alone(model, ids, 0.7) - alone(reference, ids, 0.7)
            r = r.masked_fill(~new, 0.0)
            found = sample["next", "kl_penalty"][-len(ids) :]
            torch.testing.assert_close(found, r, atol=3e-5, rtol=0)
        with torch.no_grad():  # what an optimiser does between two batches
            for parameter in model.parameters():
                parameter.mul_(0.9)
    assert policy.tokenizer_kwargs == before
    collector.shutdown()


def test_from_collector_says_what_is_missing() -> None:
    _, _, _, ref = pair()
    alone_ = RetrieveKL(ref_model=ref)
    script = Script()
    with pytest.raises(ValueError, match="the transform has no environment"):
        alone_(TensorDict({"history": None, "next": TensorDict({}, [2])}, [2]))
    env = TransformedEnv(ChatEnv(batch_size=(2,), tokenizer=tokenizer()), RetrieveKL(ref_model=ref))
    with pytest.raises(ValueError, match="no collector runs"):
        env.step(script(reset(env)))


@pytest.mark.parametrize("pad_output", [True, False])
@pytest.mark.parametrize("turns", [1, 3])
def test_the_llm_reward_transform_in_a_chat(turns: int, pad_output: bool) -> None:
    model, reference = network(), network(seed=1)
    ref = wrapper(reference, "tokens", pad_output=pad_output)
    env = TransformedEnv(
        ChatEnv(batch_size=(2,), tokenizer=tokenizer()), KLRewardTransform(ref, coef=COEF)
    )
    with pytest.warns(UserWarning, match="first response token"):
        steps = env.rollout(
            turns,
            sampler(model, pad_output=pad_output),
            auto_reset=False,
            tensordict=reset(env),
            break_when_any_done=False,
        )
    for sample in range(2):
        for turn in range(turns):
            step = steps[sample, turn]
            full, given = step["tokens"].full, step["tokens"].prompt
            real = full != tokenizer().pad_token_id
            kl = step["next", "kl_penalty"].squeeze(-1)
            kl = kl[real] if pad_output else kl
            ids = full[real]
            start = int((given != tokenizer().pad_token_id).sum())
            r = alone(model, ids) - alone(reference, ids)
            r[: start + 1] = 0.0
            torch.testing.assert_close(kl, r, atol=3e-5, rtol=0)
            reward = step["next", "reward"].squeeze(-1)
            reward = reward[real] if pad_output else reward
            torch.testing.assert_close(reward, -COEF * kl, atol=1e-6, rtol=0)


@pytest.mark.parametrize("source", ["given", "from_collector"])
def test_control_actors_have_the_same_transform(source: str) -> None:
    base, policy, reference, _ = case("pendulum")
    gen = policy if source == "given" else source
    env = TransformedEnv(base, RetrieveKL(gen, reference, raw_reward_key="raw", coeff=COEF))
    collector = Collector(env, policy, frames_per_batch=20, total_frames=20)
    batch = next(iter(collector))
    with torch.no_grad():
        truth = reference.get_dist(batch.select("observation")).log_prob(batch["action"])
    kl = batch["action_log_prob"] - truth
    after = batch["next"]
    torch.testing.assert_close(after["kl_penalty"].squeeze(-1), kl, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after["reward"], after["raw"] - COEF * after["kl_penalty"])
    assert kl.abs().mean() > 0.01
    collector.shutdown()
