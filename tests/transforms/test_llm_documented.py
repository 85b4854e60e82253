"""One case per documented argument and error of TorchRL's LLM-side KL classes.

Numbers are checked in test_llm_truth, _computation, _reward, _env and _ray; here every argument is
shown to be read, and every documented misuse to be refused.
"""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory

from klrl.kl import KLComputation, RayRetrieveKL, RetrieveKL, RetrieveLogProb
from klrl.transforms.llm import KLRewardTransform
from tests.transforms.llm_toys import TEMPLATE, chats, network, rendered, tokenizer, wrapper
from tests.transforms.test_llm_reward import batch
from tests.transforms.test_llm_truth import padded, token_rows


def conversation(key: str = "history") -> TensorDict:
    history = ChatHistory(full=History.from_chats(chats(1)))
    following = TensorDict({"reward": torch.ones(2, 1, 1)}, [2])
    return TensorDict({key: history, "next": following}, [2])


def pair(mode: str = "history", **kwargs):
    return (
        wrapper(network(), mode, log_probs_key="gen_log_probs", **kwargs),
        wrapper(network(seed=1), mode, log_probs_key="ref_log_probs", **kwargs),
    )


# RetrieveLogProb


def test_the_default_key_is_the_models() -> None:
    gen, _ = pair()
    assert RetrieveLogProb(gen).key == ("gen_log_probs", "full")
    named = RetrieveLogProb(gen, log_probs_full_key=("a", "b", "full"))(conversation())
    assert named["next", "a", "b", "full"].any()
    assert named["next", "a", "b_mask"].any()
    assert "gen_log_probs" not in named["next"].keys()


@pytest.mark.parametrize("key", ["log_probs", ("log_probs", "response"), ("full",)])
def test_a_key_that_does_not_end_in_full_is_refused(key) -> None:
    gen, ref = pair()
    with pytest.raises(ValueError, match="ends in 'full'"):
        RetrieveLogProb(gen, log_probs_full_key=key)
    with pytest.raises(ValueError, match="ends in 'full'"):
        RetrieveKL(gen, ref, gen_log_probs_full_key=key)
    with pytest.raises(ValueError, match="ends in 'full'"):
        RetrieveKL(ref_model=ref, ref_log_probs_full_key=key)


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_assistant_only_needs_a_history(mode: str) -> None:
    gen, ref = pair(mode)
    with pytest.raises(ValueError, match=f"{mode}.*assistant_only=False"):
        RetrieveLogProb(gen)
    with pytest.raises(ValueError, match=f"{mode}.*assistant_only=False"):
        RetrieveKL(gen, ref)


def test_assistant_only_off_keeps_every_token_of_a_conversation() -> None:
    gen, _ = pair()
    row = RetrieveLogProb(gen, assistant_only=False)(conversation())[
        "next", "gen_log_probs", "full"
    ]
    ids, assistant = rendered(chats(1)[1])
    assert int((row[1] != 0).sum()) == len(ids) - 1 > int(assistant.sum())


def test_tokenizer_kwargs_reach_the_chat_template() -> None:
    gen, _ = pair()
    longer = TEMPLATE.replace("<|im_start|>{{", "one two three <|im_start|>{{")
    plain, other = (
        RetrieveLogProb(gen, tokenizer_kwargs=kwargs)(conversation())["next", "gen_log_probs_mask"]
        for kwargs in (None, {"chat_template": longer, "padding": True})
    )
    assert other.shape[1] > plain.shape[1]
    assert other.sum() == plain.sum()
    for name in ("tokenize", "return_dict", "return_assistant_tokens_mask"):
        with pytest.raises(ValueError, match=name):
            RetrieveLogProb(gen, tokenizer_kwargs={name: False})
    with pytest.raises(ValueError, match="tokenizer_kwargs.*tokens"):
        RetrieveLogProb(pair("tokens")[0], assistant_only=False, tokenizer_kwargs={})


def test_the_tokenizer_replaces_the_models() -> None:
    gen, _ = pair()
    longer = tokenizer(template=TEMPLATE.replace("<|im_start|>{{", "one two <|im_start|>{{"))
    plain, other = (
        RetrieveLogProb(gen, tokenizer=toy)(conversation())["next", "gen_log_probs_mask"]
        for toy in (None, longer)
    )
    assert other.shape[1] > plain.shape[1]


def test_detach() -> None:
    gen, ref = pair()
    for detach in (True, False):
        out = RetrieveKL(gen, ref, detach=detach)(conversation())["next"]
        assert out["kl_penalty"].requires_grad is not detach


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


def test_padding_side() -> None:
    gen, _ = pair()
    ids = [rendered(chat)[0] for chat in chats(1)]
    short = min(range(2), key=lambda index: len(ids[index]))
    left, right = (
        RetrieveLogProb(gen, padding_side=side, assistant_only=False)(conversation())[
            "next", "gen_log_probs", "full"
        ][short]
        for side in ("left", "right")
    )
    size = len(ids[short])
    torch.testing.assert_close(left[-size:], right[:size])
    assert not left[:-size].any()
    assert not right[size:].any()
    with pytest.raises(ValueError, match="padding_side=middle"):
        RetrieveLogProb(gen, padding_side="middle")


def test_models_that_generate_or_return_no_log_probs_are_refused() -> None:
    gen, ref = pair()
    sampler = wrapper(network(), generate=True, log_probs_key="gen_log_probs")
    silent = wrapper(network(), generate=True, return_log_probs=False)
    silent.generate = False
    for model, words in ((sampler, "generate=True"), (silent, "return_log_probs=False")):
        with pytest.raises(ValueError, match=f"model.{words}"):
            RetrieveLogProb(model)
        with pytest.raises(ValueError, match=f"gen_model.{words}"):
            RetrieveKL(model, ref)
        with pytest.raises(ValueError, match=f"ref_model.{words}"):
            RetrieveKL(gen, model)
        with pytest.raises(ValueError, match=f"ref_model.{words}"):
            KLRewardTransform(model)


def test_a_control_actor_refuses_what_it_does_not_read() -> None:
    from tests.transforms.test_llm_env import actor

    for name in ("tokenizer", "tokenizer_kwargs", "temperature", "history_key"):
        with pytest.raises(ValueError, match=f"{name} is for LLM wrappers"):
            RetrieveLogProb(actor(), **{name: "x"})


def test_a_missing_input_and_a_second_batch_dimension_are_named() -> None:
    gen, _ = pair()
    with pytest.raises(KeyError, match="no history at"):
        RetrieveLogProb(gen)(TensorDict({"next": TensorDict({}, [2])}, [2]))
    with pytest.raises(KeyError, match="no token ids"):
        RetrieveLogProb(pair("tokens")[0], assistant_only=False)(TensorDict({"next": {}}, [2]))
    with pytest.raises(RuntimeError, match="reshape"):
        RetrieveLogProb(gen)(TensorDict({"next": TensorDict({}, [2, 3])}, [2, 3]))
    data = padded(token_rows(), "both", 0)
    data["masks", "all_attention_mask"] = data["masks", "all_attention_mask"][:, :-1]
    with pytest.raises(ValueError, match="all_attention_mask.*has lengths"):
        RetrieveLogProb(pair("tokens")[0], assistant_only=False)(data)


def test_a_conversation_without_assistant_is_refused() -> None:
    chat = [[{"role": "user", "content": "hello"}]]
    data = TensorDict({"history": ChatHistory(full=History.from_chats(chat))}, [1])
    with pytest.raises(ValueError, match="no assistant token"):
        RetrieveLogProb(pair()[0])(data)


def test_more_tokens_than_positions_are_refused() -> None:
    gen, _ = pair("tokens")
    with pytest.raises(ValueError, match="300 tokens.*max_position_embeddings=256"):
        RetrieveLogProb(gen, assistant_only=False)(
            TensorDict({"tokens": {"full": torch.ones(1, 300, dtype=torch.long)}}, [1])
        )


def test_the_documented_retrieve_log_prob_example() -> None:
    """Repaired: tokenizer and model are made here; the documentation fetches them from a hub."""
    ref = wrapper(network())
    transform = RetrieveLogProb(ref, assistant_only=True, tokenizer=tokenizer())
    data = TensorDict(history=ChatHistory(full=History.from_chats(chats(1))), batch_size=(2,))
    longest = max(len(rendered(chat)[0]) for chat in chats(1))
    assert transform(data).get((ref.log_probs_key, "full")).shape == (2, longest)


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
    with pytest.raises(ValueError, match="temperature=2"):
        RetrieveLogProb(Engine(), assistant_only=False, temperature=2.0)(data)


# KLComputation


def test_the_documented_kl_computation_example() -> None:
    """Repaired: its keywords are gen_log_probs_full_key and ref_log_probs_full_key."""
    following = TensorDict(
        {
            ("gen_log_probs", "full"): torch.randn(2, 10),
            ("ref_log_probs", "full"): torch.randn(2, 10),
            "reward": torch.randn(2, 10, 1),
        },
        batch_size=(2,),
    )
    transform = KLComputation(
        gen_log_probs_full_key=("gen_log_probs", "full"),
        ref_log_probs_full_key=("ref_log_probs", "full"),
        kl_key="kl",
        add_to_reward=True,
        coef=1.0,
    )
    result = transform(TensorDict(next=following, batch_size=(2,)))
    assert result["next", "kl"].shape == (2, 10)
    with pytest.raises(TypeError, match="gen_log_probs_key"):
        KLComputation(gen_log_probs_key=("gen_log_probs", "full"))


# RetrieveKL


def test_the_documented_retrieve_kl_example() -> None:
    gen, ref = pair()
    transform = RetrieveKL(gen_model=gen, ref_model=ref, assistant_only=True, tokenizer=tokenizer())
    longest = max(len(rendered(chat)[0]) for chat in chats(1))
    assert transform(conversation())["next"].get("kl_penalty").shape == (2, longest)


def test_the_documented_arguments_stand_in_the_signature() -> None:
    parameters = inspect.signature(RetrieveKL).parameters
    positional = [name for name, each in parameters.items() if each.kind != each.KEYWORD_ONLY]
    assert positional == ["gen_model", "ref_model"]
    defaults = {name: each.default for name, each in parameters.items()}
    assert (
        defaults.items()
        >= {
            "gen_model": "from_collector",
            "assistant_only": True,
            "history_key": "history",
            "tokenizer_kwargs": None,
            "detach": True,
            "device": None,
            "tokenizer": None,
            "padding_side": "left",
            "gen_log_probs_full_key": ("log_probs", "full"),
            "ref_log_probs_full_key": ("ref_log_probs", "full"),
            "kl_key": "kl_penalty",
            "add_to_reward": True,
            "use_ray_service": False,
        }.items()
    )
    assert not {"per_token", "model", "log_probs_full_key", "kwargs"} & parameters.keys()
    in_an_actor = inspect.signature(RayRetrieveKL).parameters
    assert in_an_actor.keys() == parameters.keys() | {"num_cpus", "num_gpus", "actor_name"}


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
    assert float(out["reward"].sum()) == 2.0
    transform.coeff = 3.0
    assert transform.coeff == 3.0
    charged = transform(conversation())["next"]
    torch.testing.assert_close(charged["reward"].sum(), 2.0 - 3 * charged["kl", "tokens"].sum())
    kept = RetrieveKL(gen, ref, add_to_reward=False)(conversation())["next"]
    assert kept["reward"].shape == (2, 1, 1)
    assert kept["kl_penalty"].any()


def test_history_key() -> None:
    gen, ref = pair()
    elsewhere = RetrieveKL(gen, ref, history_key="chat")(conversation("chat"))["next"]
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
    for kwargs, words in (
        ({"gen_model_factory": lambda: gen, "gen_model": gen, "ref_model": ref}, "both gen_model"),
        ({"ref_model_factory": lambda: ref, "gen_model": gen, "ref_model": ref}, "both ref_model"),
        ({"gen_model": None, "ref_model": ref}, "neither gen_model"),
        ({"gen_model": gen}, "neither ref_model"),
        ({}, "neither ref_model"),
    ):
        with pytest.raises(ValueError, match=words):
            RetrieveKL(**kwargs)


def test_models_that_do_not_fit_each_other_are_refused() -> None:
    from tests.transforms.test_llm_env import actor

    gen, ref = pair()
    ragged = wrapper(network(), pad_output=False, log_probs_key="r")
    tokens = wrapper(network(), "tokens", log_probs_key="r")
    with pytest.raises(ValueError, match=r"gen_model.pad_output=True.*ref_model.pad_output=False"):
        RetrieveKL(gen, ragged)
    with pytest.raises(ValueError, match="share log_probs_key='gen_log_probs'"):
        RetrieveKL(gen, gen)
    with pytest.raises(ValueError, match=r"tokens.*assistant_only=False"):
        RetrieveKL(gen, tokens)
    with pytest.raises(ValueError, match="both must read the same input"):
        RetrieveKL(gen, tokens, assistant_only=False)
    with pytest.raises(ValueError, match="two LLM wrappers or two control actors"):
        RetrieveKL(gen, actor())
    with pytest.raises(ValueError, match="two keys"):
        RetrieveKL(gen, ref, gen_log_probs_full_key=("ref_log_probs", "full"))


def test_arguments_that_nothing_reads_are_refused() -> None:
    gen, ref = pair()
    for name in ("actor_name", "num_cpus", "num_gpus", "coefs"):
        with pytest.raises(TypeError, match=name):
            RetrieveKL(gen, ref, **{name: 1})
    with pytest.raises(ValueError, match="service_backend='monarch'"):
        RetrieveKL(gen, ref, service_backend="monarch")
    with pytest.raises(ValueError, match="contradicts"):
        RetrieveKL(gen, ref, use_ray_service=True, service_backend="direct")
    assert isinstance(RetrieveKL(gen, ref, service_backend="direct"), RetrieveKL)


# KLRewardTransform


def test_reward_transforms_keys() -> None:
    ref = wrapper(network(), "tokens")
    assert KLRewardTransform(ref).out_keys == ["reward", "kl_penalty", "ref_log_prob"]
    assert KLRewardTransform(ref, in_keys="score").out_keys[0] == "score"
    assert KLRewardTransform(ref).in_keys == ["reward", ("tokens", "full")]
    for kwargs in (
        {"in_keys": ["a", "b"]},
        {"out_keys": ["a", "b"]},
        {"in_keys": ["a", "b"], "out_keys": ["a", "b", "c", "d"]},
        {"in_keys": [1]},
    ):
        with pytest.raises(ValueError, match="keys"):
            KLRewardTransform(ref, **kwargs)


def test_reward_transforms_models() -> None:
    ref = wrapper(network(), "tokens")
    assert KLRewardTransform(ref_model_factory=lambda: ref).ref_model.module is ref
    with pytest.raises(ValueError, match="both ref_model"):
        KLRewardTransform(ref, ref_model_factory=lambda: ref)
    with pytest.raises(ValueError, match="neither ref_model"):
        KLRewardTransform()
    with pytest.raises(ValueError, match="input_mode='history'"):
        KLRewardTransform(wrapper(network()))
    with pytest.raises(TypeError, match="positional"):
        KLRewardTransform(ref, ref)  # as the documentation's first line has it
    without = wrapper(network(), "tokens")
    without.tokenizer = None
    with pytest.raises(AttributeError, match="no tokenizer"):
        _ = KLRewardTransform(without).tokenizer


def test_reward_transforms_missing_data_and_shapes() -> None:
    transform = KLRewardTransform(wrapper(network(), "tokens"))
    without_tokens = batch(network())
    del without_tokens["tokens"]
    without_log_probs = batch(network())
    del without_log_probs["log_probs"]
    with pytest.raises(RuntimeError, match="no tokens at"):
        transform(without_tokens)
    with pytest.raises(RuntimeError, match="no log-probs at"):
        transform(without_log_probs)
    shorter = batch(network())
    shorter["log_probs", "full"] = shorter["log_probs", "full"][:, 1:]
    with pytest.raises(ValueError, match="have lengths.*the reference's"):
        transform(shorter)
    reward = batch(network())
    reward["next", "reward"] = torch.zeros(3, 2, 1)
    with pytest.raises(ValueError, match=r"reward has shape \(2, 1\)"):
        transform(reward)
    with pytest.raises(ValueError, match="log_prob_key"):
        KLRewardTransform(wrapper(network(), "tokens"), log_prob_key="log_probs")
    with pytest.raises(KeyError, match="next"):
        transform(batch(network()).exclude("next"))


def test_reward_transforms_detach() -> None:
    for detach in (True, False):
        out = KLRewardTransform(wrapper(network(), "tokens"), detach=detach)(batch(network()))
        assert out["next", "reward"].requires_grad is not detach


@pytest.mark.integration
def test_importing_the_transforms_does_not_load_transformers() -> None:
    code = "import sys, klrl.kl, klrl.transforms.llm; print('transformers.models' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
