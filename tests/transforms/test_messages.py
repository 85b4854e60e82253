"""What the transforms refuse, each in words that name it: tables of what is called with what."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torchrl.data.llm import History
from torchrl.modules import GRUModule, IndependentNormal, LSTMModule
from torchrl.modules.llm.policies import ChatHistory

from klrl.envs.llm.transforms.kl import reward as llm
from klrl.kl import (
    FrozenPolicy,
    KLComputation,
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLRewardTransform,
    RayRetrieveKL,
    ReferenceModelLogProbTransform,
    RetrieveKL,
    RetrieveLogProb,
    RewardAdjustmentTransform,
)
from klrl.losses import ClipPPOLoss, KLPENPPOLoss
from tests.transforms.llm_toys import network, pair, wrapper
from tests.transforms.test_llm_computation import REF, dense, log_probs, nested
from tests.transforms.test_llm_documented import Engine
from tests.transforms.test_llm_reward import batch
from tests.transforms.test_llm_truth import padded, token_rows
from tests.transforms.toys import actor

#: (what the error says, what is called, its arguments; a dict at the end holds keywords).
Row = tuple[Any, ...]
ALL, AB = {"assistant_only": False}, ["a", "b"]


class Buffered(nn.Module):
    """A buffer that asks for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
        self.register_buffer("shift", torch.zeros(3, requires_grad=True))

    def forward(self, seen):
        return self.net(seen + self.shift)


def control() -> list[Row]:
    policy = actor()
    data = policy(TensorDict({"observation": torch.zeros(2, 3)}, [2])).detach()
    data["next"] = TensorDict({"reward": torch.ones(2, 1)}, [2])
    head = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["action"], distribution_class=IndependentNormal
    )
    without_log_prob = ProbabilisticTensorDictSequential(actor()[0], head)
    buffered, without_parameters = (
        ProbabilisticTensorDictSequential(
            TensorDictModule(module, ["observation"], ["loc", "scale"]), actor()[-1]
        )
        for module in (Buffered(), lambda x: (x, x.exp()))
    )
    exact = KLDivergenceTransform(policy, estimator="exact")
    return [
        ("in_keys=.*exactly one", KLRewardTransform, policy, {"in_keys": AB}),
        ("in_keys=.*tuple of strings", KLRewardTransform, policy, {"in_keys": [1]}),
        ("out_keys=.*exactly one", KLRewardTransform, policy, {"out_keys": AB}),
        ("out_keys=.*tuple of strings", KLRewardTransform, policy, {"out_keys": [("a", 1)]}),
        ("Linear: needs get_dist", KLRewardTransform, nn.Linear(3, 1)),
        ("no parameters to copy", KLRewardTransform, without_parameters),
        ("return_log_prob=True", KLRewardTransform, without_log_prob),
        ("shift.*requires gradients", KLRewardTransform, buffered),
        ("no 'next'", KLRewardTransform(policy), data.exclude("next")),
        ("score.*in_keys", KLRewardTransform(policy, in_keys="score"), data),
        ("get_dist", ReferenceModelLogProbTransform, nn.Linear(1, 1)),
        ("needs the reference", KLDivergenceTransform, {"estimator": "exact"}),
        ("k5", KLDivergenceTransform, {"estimator": "k5"}),
        ("ReferenceModelLogProbTransform before", KLDivergenceTransform(), data),
        ("estimator=exact compares distributions", exact, data.exclude("loc")),
        ("KLDivergenceTransform before", RewardAdjustmentTransform(), data),
        ("in_keys", RewardAdjustmentTransform(in_keys="score"), data),
        ("in_keys", RewardAdjustmentTransform, {"in_keys": AB}),
        ("log_prob", RetrieveLogProb, nn.Linear(1, 1)),
        ("no 'next'", RetrieveLogProb(policy), data.exclude("next")),
        *(
            (f"{name} is for LLM wrappers", RetrieveLogProb, policy, {name: "x"})
            for name in ("tokenizer", "tokenizer_kwargs", "temperature", "history_key")
        ),
    ]


def scoring() -> list[Row]:
    """Log-probs of tokens."""
    gen, ref = pair()
    of_tokens = RetrieveLogProb(pair("tokens")[0], **ALL)
    tokens, empty = padded(token_rows(), "both", 0), TensorDict({"next": {}}, [2])
    misfit = tokens.clone()
    misfit["masks", "all_attention_mask"] = misfit["masks", "all_attention_mask"][:, :-1]
    told = ChatHistory(full=History.from_chats([[{"role": "user", "content": "hello"}]]))
    square = TensorDict({"next": TensorDict({}, [2, 3])}, [2, 3])
    long = TensorDict({"tokens": {"full": torch.ones(1, 300, dtype=torch.long)}}, [1])
    sampler = wrapper(network(), generate=True, log_probs_key="x")
    silent = wrapper(network(), generate=True, return_log_probs=False)
    silent.generate = False
    rows: list[Row] = [
        (
            "tokenizer_kwargs.*tokens",
            RetrieveLogProb,
            pair("tokens")[0],
            {**ALL, "tokenizer_kwargs": {}},
        ),
        ("padding_side=middle", RetrieveLogProb, gen, {"padding_side": "middle"}),
        ("no history at", RetrieveLogProb(gen), empty),
        ("no token ids", of_tokens, empty),
        ("reshape", RetrieveLogProb(gen), square),
        ("all_attention_mask.*has lengths", of_tokens, misfit),
        ("no assistant token", RetrieveLogProb(gen), TensorDict({"history": told}, [1])),
        ("300 tokens.*max_position_embeddings=256", of_tokens, long),
        ("temperature=2", RetrieveLogProb(Engine(), **ALL, temperature=2.0), tokens),
    ]
    for mode in ("text", "tokens"):
        said = f"{mode}.*assistant_only=False"
        rows += [(said, RetrieveLogProb, pair(mode)[0]), (said, RetrieveKL, *pair(mode))]
    for name in ("tokenize", "return_dict", "return_assistant_tokens_mask"):
        rows.append((name, RetrieveLogProb, gen, {"tokenizer_kwargs": {name: False}}))
    for model, words in ((sampler, "generate=True"), (silent, "return_log_probs=False")):
        rows += [
            (f"model.{words}", RetrieveLogProb, model),
            (f"gen_model.{words}", RetrieveKL, model, ref),
            (f"ref_model.{words}", RetrieveKL, gen, model),
            (f"ref_model.{words}", llm.KLRewardTransform, model),
        ]
    return rows


def computing() -> list[Row]:
    """The KL from log-probs of tokens that are there."""
    kl, three = KLComputation(), (log_probs(3, 3), log_probs(3, 3, seed=1))
    ragged = nested(log_probs(2, 3), log_probs(2, 3))
    mixed, others = dense(*three), dense(*three)
    mixed["next", REF[0]] = ragged["next", REF[0]]
    others["next", "log_probs_mask"] = torch.tensor([[True, True, False]] * 2)
    others["next", "ref_log_probs_mask"] = torch.ones(2, 3, dtype=torch.bool)
    silent = {"all_assistant_mask": torch.tensor([[1, 1, 1], [0, 0, 0]]).bool()}
    longer = {"all_attention_mask": torch.ones(2, 4).bool()}
    zeros = torch.zeros
    return [
        ("two keys", KLComputation, "a", "a"),
        ("k7", KLComputation, {"estimator": "k7"}),
        ("padding_side=up", KLComputation, {"padding_side": "up"}),
        ("ref_log_probs.*RetrieveLogProb before", kl, dense(*three).exclude(("next", REF[0]))),
        (r"sample 0.*\(3,\).*ref_log_probs.*\(4,\)", kl, dense(three[0], log_probs(4, 4))),
        (r"sample 1.*\(3,\).*\(2,\)", kl, nested(log_probs(2, 3), log_probs(2, 2))),
        ("pad_output mismatch.*dense.*ragged", kl, mixed),
        (r"reward has shape \(2, 1\), the KL \(3,\)", kl, dense(*three, zeros(2, 2, 1))),
        ("but no mask of the response", kl, dense(*three, zeros(2, 1, 1))),
        ("no response token", kl, dense(*three, zeros(2, 1), masks=silent)),
        (r"\[4, 4\].*\[3, 3\]", kl, dense(*three, zeros(2, 1), masks=longer)),
        ("scored on different tokens", kl, others),
    ]


def retrieving() -> list[Row]:
    """Both models of RetrieveKL."""
    gen, ref = pair()
    ragged = wrapper(network(), pad_output=False, log_probs_key="r")
    tokens = wrapper(network(), "tokens", log_probs_key="r")
    unequal = r"gen_model.pad_output=True.*ref_model.pad_output=False"
    one, ray = {"gen_log_probs_full_key": ("ref_log_probs", "full")}, {"use_ray_service": True}
    return [
        ("both gen_model", RetrieveKL, gen, ref, {"gen_model_factory": pair}),
        ("both ref_model", RetrieveKL, gen, ref, {"ref_model_factory": pair}),
        ("neither gen_model", RetrieveKL, None, ref),
        ("neither ref_model", RetrieveKL, gen),
        (unequal, RetrieveKL, gen, ragged),
        ("share log_probs_key='gen_log_probs'", RetrieveKL, gen, gen),
        ("tokens.*assistant_only=False", RetrieveKL, gen, tokens),
        ("two LLM wrappers or two control actors", RetrieveKL, gen, actor()),
        ("two keys", RetrieveKL, gen, ref, one),
        ("both gen_model", RayRetrieveKL, gen, ref, {"gen_model_factory": pair}),
        ("neither ref_model", RayRetrieveKL, gen),
        ("from_collector.*with Ray", RayRetrieveKL, {"ref_model": ref}),
        ("no gradient", RayRetrieveKL, gen, ref, {"detach": False}),
        ("neither ref_model", llm.RayKLRewardTransform),
        ("service_backend='monarch'", RetrieveKL, gen, ref, {"service_backend": "monarch"}),
        ("contradicts", RetrieveKL, gen, ref, {**ray, "service_backend": "direct"}),
        *(
            (name, RetrieveKL, gen, ref, {name: 1})
            for name in ("actor_name", "num_cpus", "num_gpus", "coefs")
        ),
    ]


def rewarding() -> list[Row]:
    """The LLM side's KLRewardTransform."""
    make, ref, data = llm.KLRewardTransform, wrapper(network(), "tokens"), batch(network())
    charge, reward, shorter = make(ref), data.clone(), data.clone()
    reward["next", "reward"] = torch.zeros(3, 2, 1)
    shorter["log_probs", "full"] = shorter["log_probs", "full"][:, 1:]
    responses = batch(network(), response_only=True)
    return [
        ("keys", make, ref, {"in_keys": AB}),
        ("keys", make, ref, {"out_keys": AB}),
        ("keys", make, ref, {"in_keys": [1]}),
        ("both ref_model", make, ref, {"ref_model_factory": pair}),
        ("neither ref_model", make),
        ("input_mode='history'", make, wrapper(network())),
        ("positional", make, ref, ref),  # as the documentation's first line has it
        ("log_prob_key", make, ref, {"log_prob_key": "log_probs"}),
        ("no tokens at", charge, data.exclude("tokens")),
        ("no log-probs at", charge, data.exclude("log_probs")),
        ("have lengths.*the reference's", charge, shorter),
        (r"reward has shape \(2, 1\)", charge, reward),
        ("next", charge, data.exclude("next")),
        ("assistant_only=False", make(ref, **ALL), responses),
    ]


def recurrent() -> list[Row]:
    """References that would be asked with the policy's hidden state."""
    own = {"in_keys": ["observation", ("agent", "memory")]}
    own["out_keys"] = ["hidden", ("next", "agent", "memory")]
    rows: list[Row] = []
    for cell, key in (
        (LSTMModule(3, 8, in_key="observation", out_key="hidden"), "recurrent_state"),
        (GRUModule(3, 8, **own), "memory"),
    ):
        head = TensorDictModule(
            nn.Sequential(nn.Linear(8, 4), NormalParamExtractor()), ["hidden"], ["loc", "scale"]
        )
        model = ProbabilisticTensorDictSequential(cell, head, actor()[-1])
        said, as_reference = f": is recurrent .*{key}.*; give a policy", {"reference": model}
        rows += [
            (f"^actor{said}", KLRewardTransform, model),
            (f"^frozen_model{said}", ReferenceModelLogProbTransform, model),
            (f"^frozen_model{said}", ReferenceModelLogProbTransform, FrozenPolicy.copy_of(model)),
            (f"^frozen_model{said}", KLConstrainedTransform, model),
            (f"^reference{said}", KLDivergenceTransform, model, {"estimator": "exact"}),
            (f"^model{said}", RetrieveLogProb, model),
            (f"^model{said}", RetrieveKL, actor(), model),
            (f"^reference{said}", ClipPPOLoss, actor(), as_reference),
            (f"^reference{said}", KLPENPPOLoss, model, as_reference),
        ]
    return rows


TABLES = (control, scoring, computing, retrieving, rewarding, recurrent)


@pytest.mark.parametrize("table", TABLES)
def test_what_is_refused_is_named(table: Callable[[], list[Row]]) -> None:
    for words, call, *given in table():
        keywords = given.pop() if given and type(given[-1]) is dict else {}
        with pytest.raises((ValueError, TypeError, KeyError, RuntimeError), match=words):
            call(*given, **keywords)
