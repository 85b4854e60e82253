"""One case per documented argument and error of TorchRL's LLM-side KL classes.

Numbers are checked in test_llm_truth, _computation, _reward, _env and test_served; here every
argument is shown to be read. Misuse is refused in test_messages.
"""

import pytest
import torch

from klrl.envs.llm.transforms.kl.reward import KLRewardTransform
from klrl.kl import RetrieveKL, RetrieveLogProb
from tests.transforms.llm_toys import (
    TEMPLATE,
    chats,
    conversation,
    network,
    pair,
    rendered,
    tokenizer,
    wrapper,
)
from tests.transforms.test_llm_reward import batch
from tests.transforms.test_llm_truth import padded, token_rows


def test_the_default_key_is_the_models() -> None:
    gen, _ = pair()
    assert RetrieveLogProb(gen).log_probs_full_key == ("gen_log_probs", "full")
    named = RetrieveLogProb(gen, log_probs_full_key=("a", "b", "full"))(conversation())
    assert named["next", "a", "b", "full"].any()
    assert named["next", "a", "b_mask"].any()
    assert "gen_log_probs" not in named["next"].keys()


def test_assistant_only_off_keeps_every_token_of_a_conversation() -> None:
    gen, _ = pair()
    row = RetrieveLogProb(gen, assistant_only=False)(conversation())[
        "next", "gen_log_probs", "full"
    ]
    ids, assistant = rendered(chats(1)[1])
    assert int((row[1] != 0).sum()) == len(ids) - 1 > int(assistant.sum())


LONGER = TEMPLATE.replace("<|im_start|>{{", "one two three <|im_start|>{{")


@pytest.mark.parametrize(
    "kwargs",
    [
        {"tokenizer": tokenizer(template=LONGER)},
        {"tokenizer_kwargs": {"chat_template": LONGER, "padding": True}},
    ],
    ids=["tokenizer", "tokenizer_kwargs"],
)
def test_a_chat_template_replaces_the_models(kwargs) -> None:
    gen, _ = pair()
    plain, other = (
        RetrieveLogProb(gen, **given)(conversation())["next", "gen_log_probs_mask"]
        for given in ({}, kwargs)
    )
    assert other.shape[1] > plain.shape[1]
    assert other.sum() == plain.sum()


def test_detach() -> None:
    gen, ref = pair()
    for detach in (True, False):
        out = RetrieveKL(gen, ref, detach=detach)(conversation())["next"]
        assert out["kl_penalty"].requires_grad is not detach
        if not detach:
            out["kl_penalty"].sum().backward()
            assert all(p.grad is not None for p in gen.model.parameters())
        out = KLRewardTransform(wrapper(network(), "tokens"), detach=detach)(batch(network()))
        assert out["next", "reward"].requires_grad is not detach


def test_device_moves_the_models() -> None:
    gen, ref = pair()
    RetrieveLogProb(gen, device="meta")
    assert next(gen.model.parameters()).device.type == "meta"
    RetrieveKL(pair()[0], ref, device=torch.device("meta"))
    assert next(ref.model.parameters()).device.type == "meta"
    tokens_ref = wrapper(network(), "tokens")
    KLRewardTransform(tokens_ref, device="meta")
    assert next(tokens_ref.model.parameters()).device.type == "meta"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_models_on_a_gpu_and_data_on_the_cpu() -> None:
    local = RetrieveKL(*pair())(conversation())["next"]
    found = RetrieveKL(*pair(), device="cuda")(conversation())["next"]
    for key in ("kl_penalty", "reward"):
        assert found[key].device.type == "cpu"
        torch.testing.assert_close(found[key], local[key], atol=1e-3, rtol=0)


class Engine:
    """A wrapper around something that is no torch module, as vLLM's is."""

    in_keys = (("tokens", "full"),)
    input_mode, log_probs_key, pad_output = "tokens", "log_probs", True
    generate, return_log_probs, model, tokenizer = False, True, object(), None

    def __call__(self, tensordict):
        full = -torch.arange(tensordict["tokens", "full"].shape[1]).float()
        return tensordict.set(("log_probs", "full"), full.expand_as(tensordict["tokens", "full"]))


def test_a_wrapper_around_an_engine_scores_by_its_own_forward() -> None:
    data = padded(token_rows(), "both", 0)
    real = data["masks", "all_attention_mask"]
    found = RetrieveLogProb(Engine(), assistant_only=False)(data)["next", "log_probs", "full"]
    positions = torch.arange(real.shape[1]).expand_as(real)
    torch.testing.assert_close(found, torch.where(real, -positions.float(), 0.0))


def test_retrieve_kls_keys_and_coefficient() -> None:
    gen, ref = pair()
    transform = RetrieveKL(
        gen,
        ref,
        gen_log_probs_full_key=("a", "full"),
        ref_log_probs_full_key=("b", "full"),
        kl_key=("kl", "tokens"),
        coeff=0.0,
        estimator="k3",
    )
    out = transform(conversation())["next"]
    assert (out["kl", "tokens"] >= 0).all()
    assert float(out["reward"].sum()) == 3.0
    transform.coeff = 3.0
    assert transform.coeff == 3.0
    charged = transform(conversation())["next"]
    torch.testing.assert_close(charged["reward"].sum(), 3.0 - 3 * charged["kl", "tokens"].sum())
    kept = RetrieveKL(gen, ref, add_to_reward=False)(conversation())["next"]
    assert kept["reward"].shape == (2, 1, 1)
    assert kept["kl_penalty"].any()


def test_history_key() -> None:
    gen, ref = pair()
    elsewhere = RetrieveKL(gen, ref, history_key="chat")(conversation(key="chat"))["next"]
    torch.testing.assert_close(
        elsewhere["kl_penalty"], RetrieveKL(gen, ref)(conversation())["next", "kl_penalty"]
    )


def test_factories() -> None:
    gen, ref = pair()
    made = RetrieveKL(gen_model_factory=lambda: gen, ref_model_factory=lambda: ref)
    torch.testing.assert_close(
        made(conversation())["next", "kl_penalty"],
        RetrieveKL(gen, ref)(conversation())["next", "kl_penalty"],
    )
    assert isinstance(RetrieveKL(gen, ref, service_backend="direct"), RetrieveKL)


def test_reward_transforms_keys_and_models() -> None:
    ref = wrapper(network(), "tokens")
    assert KLRewardTransform(ref).out_keys == ["reward", "kl_penalty", "ref_log_prob"]
    assert KLRewardTransform(ref, in_keys="score").out_keys[0] == "score"
    assert KLRewardTransform(ref).in_keys == ["reward", ("tokens", "full")]
    assert KLRewardTransform(ref_model_factory=lambda: ref).ref_model.module is ref
    ref.tokenizer = None
    assert KLRewardTransform(ref).tokenizer is None
