"""What the transforms refuse, each in words that name it: one table of (words, what is wrong)."""

from __future__ import annotations

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
from torchrl.modules import IndependentNormal
from torchrl.modules.llm.policies import ChatHistory

from klrl.kl import (
    KLComputation,
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
    RetrieveKL,
    RetrieveLogProb,
    RewardAdjustmentTransform,
)
from klrl.transforms import llm
from klrl.transforms.computation import matching_rows
from tests.transforms.llm_toys import network, wrapper
from tests.transforms.test_llm_computation import GEN, REF, dense, log_probs, nested
from tests.transforms.test_llm_documented import Engine, pair
from tests.transforms.test_llm_reward import batch
from tests.transforms.test_llm_truth import padded, token_rows
from tests.transforms.toys import actor

Call = Callable[[], Any]


# ------------------------------------------------------------------------------------ control


class Buffered(nn.Module):
    """A buffer that asks for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
        self.register_buffer("shift", torch.zeros(3, requires_grad=True))

    def forward(self, seen):
        return self.net(seen + self.shift)


def around(module: object) -> ProbabilisticTensorDictSequential:
    wrapped = TensorDictModule(module, ["observation"], ["loc", "scale"])
    return ProbabilisticTensorDictSequential(wrapped, actor()[-1])


def without_log_prob() -> ProbabilisticTensorDictSequential:
    sampler = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["action"], distribution_class=IndependentNormal
    )
    return ProbabilisticTensorDictSequential(actor()[0], sampler)


def seen(*left_out: str) -> TensorDict:
    """A transition of :func:`actor`, without some of its keys."""
    data = actor()(TensorDict({"observation": torch.zeros(2, 3)}, [2])).detach()
    return data.set("next", TensorDict({"reward": torch.ones(2, 1)}, [2])).exclude(*left_out)


CONTROL: list[tuple[str, Call]] = [
    ("in_keys=.*exactly one", lambda: KLRewardTransform(actor(), in_keys=["a", "b"])),
    ("out_keys=.*exactly one", lambda: KLRewardTransform(actor(), out_keys=["a", "b"])),
    ("in_keys=.*exactly one", lambda: KLRewardTransform(actor(), in_keys=[])),
    ("in_keys=.*tuple of strings", lambda: KLRewardTransform(actor(), in_keys=[1])),
    ("out_keys=.*tuple of strings", lambda: KLRewardTransform(actor(), out_keys=[("a", 1)])),
    ("Linear: needs get_dist", lambda: KLRewardTransform(nn.Linear(3, 1))),
    ("no parameters to copy", lambda: KLRewardTransform(around(lambda x: (x, x.exp())))),
    ("return_log_prob=True", lambda: KLRewardTransform(without_log_prob())),
    ("shift.*requires gradients", lambda: KLRewardTransform(around(Buffered()))),
    ("no 'next'", lambda: KLRewardTransform(actor())(seen("next"))),
    ("score.*in_keys", lambda: KLRewardTransform(actor(), in_keys="score")(seen())),
    ("get_dist", lambda: ReferenceModelLogProbTransform(nn.Linear(1, 1))),
    ("needs the reference", lambda: KLDivergenceTransform(estimator="exact")),
    ("k5", lambda: KLDivergenceTransform(estimator="k5")),
    ("ReferenceModelLogProbTransform before", lambda: KLDivergenceTransform()(seen())),
    (
        "estimator=exact compares distributions",
        lambda: KLDivergenceTransform(actor(), estimator="exact")(seen("loc")),
    ),
    ("KLDivergenceTransform before", lambda: RewardAdjustmentTransform()(seen())),
    ("in_keys", lambda: RewardAdjustmentTransform(in_keys="score")(seen())),
    ("in_keys", lambda: RewardAdjustmentTransform(in_keys=["a", "b"])),
    ("log_prob", lambda: RetrieveLogProb(nn.Linear(1, 1))),
    ("no 'next'", lambda: RetrieveLogProb(actor())(seen("next"))),
    *(
        ("on_unsampled=none.*nan, raise, skip, zero", lambda make=make: make(on_unsampled="none"))
        for make in (
            lambda **more: KLRewardTransform(actor(), **more),
            lambda **more: KLConstrainedTransform(actor(), **more),
            KLDivergenceTransform,
            RewardAdjustmentTransform,
        )
    ),
    *(
        (
            f"{name} is for LLM wrappers",
            lambda name=name: RetrieveLogProb(actor(), **{name: "x"}),
        )
        for name in ("tokenizer", "tokenizer_kwargs", "temperature", "history_key")
    ),
]

# -------------------------------------------------------------------------- log-probs of tokens


def gen(mode: str = "history"):
    return pair(mode)[0]


def ref(mode: str = "history"):
    return pair(mode)[1]


def tokens_ref(**how: object):
    return wrapper(network(), "tokens", **how)


def silent():
    model = wrapper(network(), generate=True, return_log_probs=False)
    model.generate = False
    return model


def without_assistant() -> TensorDict:
    history = History.from_chats([[{"role": "user", "content": "hello"}]])
    return TensorDict({"history": ChatHistory(full=history)}, [1])


def misfit() -> TensorDict:
    data = padded(token_rows(), "both", 0)
    data["masks", "all_attention_mask"] = data["masks", "all_attention_mask"][:, :-1]
    return data


def long() -> TensorDict:
    return TensorDict({"tokens": {"full": torch.ones(1, 300, dtype=torch.long)}}, [1])


def scoring(**how: object) -> RetrieveLogProb:
    return RetrieveLogProb(gen("tokens"), assistant_only=False, **how)


LOG_PROBS: list[tuple[str, Call]] = [
    *(
        row
        for key in ("log_probs", ("log_probs", "response"), ("full",))
        for row in (
            ("ends in 'full'", lambda k=key: RetrieveLogProb(gen(), log_probs_full_key=k)),
            ("ends in 'full'", lambda k=key: RetrieveKL(gen(), ref(), gen_log_probs_full_key=k)),
            (
                "ends in 'full'",
                lambda k=key: RetrieveKL(ref_model=ref(), ref_log_probs_full_key=k),
            ),
        )
    ),
    *(
        row
        for mode in ("text", "tokens")
        for row in (
            (f"{mode}.*assistant_only=False", lambda mode=mode: RetrieveLogProb(gen(mode))),
            (f"{mode}.*assistant_only=False", lambda mode=mode: RetrieveKL(*pair(mode))),
        )
    ),
    *(
        (name, lambda name=name: RetrieveLogProb(gen(), tokenizer_kwargs={name: False}))
        for name in ("tokenize", "return_dict", "return_assistant_tokens_mask")
    ),
    ("tokenizer_kwargs.*tokens", lambda: scoring(tokenizer_kwargs={})),
    ("padding_side=middle", lambda: RetrieveLogProb(gen(), padding_side="middle")),
    *(
        row
        for make, words in (
            (lambda: wrapper(network(), generate=True, log_probs_key="x"), "generate=True"),
            (silent, "return_log_probs=False"),
        )
        for row in (
            (f"model.{words}", lambda make=make: RetrieveLogProb(make())),
            (f"gen_model.{words}", lambda make=make: RetrieveKL(make(), ref())),
            (f"ref_model.{words}", lambda make=make: RetrieveKL(gen(), make())),
            (f"ref_model.{words}", lambda make=make: llm.KLRewardTransform(make())),
        )
    ),
    ("no history at", lambda: RetrieveLogProb(gen())(TensorDict({"next": {}}, [2]))),
    ("no token ids", lambda: scoring()(TensorDict({"next": {}}, [2]))),
    (
        "reshape",
        lambda: RetrieveLogProb(gen())(TensorDict({"next": TensorDict({}, [2, 3])}, [2, 3])),
    ),
    ("all_attention_mask.*has lengths", lambda: scoring()(misfit())),
    ("no assistant token", lambda: RetrieveLogProb(gen())(without_assistant())),
    ("300 tokens.*max_position_embeddings=256", lambda: scoring()(long())),
    (
        "temperature=2",
        lambda: RetrieveLogProb(Engine(), assistant_only=False, temperature=2.0)(
            padded(token_rows(), "both", 0)
        ),
    ),
]

# ------------------------------------------------------------------------- KL of tokens, rewards


def two(reward: torch.Tensor | None = None, **root: object) -> TensorDict:
    return dense(log_probs(3, 3), log_probs(3, 3, seed=1), reward, **root)


def mixed() -> TensorDict:
    data = two()
    data["next", REF[0]] = nested(log_probs(2, 3), log_probs(2, 3))["next", REF[0]]
    return data


def masks(**rows: list[list[int]]) -> TensorDict:
    given = {key: torch.tensor(value).bool() for key, value in rows.items()}
    return two(torch.zeros(2, 1), masks=given)


def scored_on_others() -> TensorDict:
    data = dense(log_probs(3), log_probs(3, seed=1))
    data["next", "log_probs_mask"] = torch.tensor([[True, True, False]])
    data["next", "ref_log_probs_mask"] = torch.tensor([[True, True, True]])
    return data


def sampled(*left_out: object, **change: torch.Tensor) -> TensorDict:
    data = batch(network()).exclude(*left_out)
    if "reward" in change:
        data["next", "reward"] = change["reward"]
    return data


def shorter() -> TensorDict:
    data = batch(network())
    data["log_probs", "full"] = data["log_probs", "full"][:, 1:]
    return data


def computed(data: TensorDict) -> TensorDict:
    return KLComputation()(data)


def charged(data: TensorDict) -> TensorDict:
    return llm.KLRewardTransform(tokens_ref())(data)


def of_models(**given: Any) -> RetrieveKL:
    """gen, ref: the models themselves; make_gen, make_ref: their factories."""
    models = {
        "gen": ("gen_model", gen),
        "ref": ("ref_model", ref),
        "make_gen": ("gen_model_factory", lambda: gen),
        "make_ref": ("ref_model_factory", lambda: ref),
    }
    return RetrieveKL(**{models[n][0]: models[n][1]() if v else None for n, v in given.items()})


TOKENS: list[tuple[str, Call]] = [
    ("two keys", lambda: KLComputation("a", "a")),
    ("k7", lambda: KLComputation(estimator="k7")),
    ("padding_side=up", lambda: KLComputation(padding_side="up")),
    ("gen_log_probs_key", lambda: KLComputation(gen_log_probs_key=GEN)),
    ("ref_log_probs.*RetrieveLogProb before", lambda: computed(two().exclude(("next", REF[0])))),
    (
        "gen_log_probs_full_key=lp.*'full'",
        lambda: KLComputation("lp")(
            TensorDict({"lp": torch.zeros(1, 3), REF: torch.zeros(1, 3)}, [1])
        ),
    ),
    (
        r"sample 0.*\(3,\).*ref_log_probs.*\(4,\)",
        lambda: computed(dense(log_probs(3, 3), log_probs(4, 4))),
    ),
    (
        r"sample 1.*\(3,\).*\(2,\)",
        lambda: computed(nested(log_probs(2, 3), log_probs(2, 2))),
    ),
    ("pad_output mismatch.*dense.*ragged", lambda: computed(mixed())),
    (r"reward has shape \(2, 1\), the KL \(3,\)", lambda: computed(two(torch.zeros(2, 2, 1)))),
    ("and no mask of the response", lambda: computed(two(torch.zeros(2, 1, 1)))),
    ("no response token", lambda: computed(masks(all_assistant_mask=[[1, 1, 1], [0, 0, 0]]))),
    (r"\[4, 4\].*\[3, 3\]", lambda: computed(masks(all_attention_mask=[[1] * 4] * 2))),
    ("scored on different tokens", lambda: computed(scored_on_others())),
    (
        r"log_probs.*2 samples.*ref_log_probs.*3",
        lambda: matching_rows(log_probs(1, 2), log_probs(1, 2, 3), GEN, REF),
    ),
    ("both gen_model", lambda: of_models(gen=True, make_gen=True, ref=True)),
    ("both ref_model", lambda: of_models(gen=True, ref=True, make_ref=True)),
    ("neither gen_model", lambda: of_models(gen=False, ref=True)),
    ("neither ref_model", lambda: of_models(gen=True)),
    ("neither ref_model", RetrieveKL),
    (
        r"gen_model.pad_output=True.*ref_model.pad_output=False",
        lambda: RetrieveKL(gen(), wrapper(network(), pad_output=False, log_probs_key="r")),
    ),
    ("share log_probs_key='gen_log_probs'", lambda: RetrieveKL(gen(), gen())),
    ("tokens.*assistant_only=False", lambda: RetrieveKL(gen(), tokens_ref(log_probs_key="r"))),
    (
        "both must read the same input",
        lambda: RetrieveKL(gen(), tokens_ref(log_probs_key="r"), assistant_only=False),
    ),
    ("two LLM wrappers or two control actors", lambda: RetrieveKL(gen(), actor())),
    (
        "two keys",
        lambda: RetrieveKL(*pair(), gen_log_probs_full_key=("ref_log_probs", "full")),
    ),
    *(
        (name, lambda name=name: RetrieveKL(*pair(), **{name: 1}))
        for name in ("actor_name", "num_cpus", "num_gpus", "coefs")
    ),
    ("service_backend='monarch'", lambda: RetrieveKL(*pair(), service_backend="monarch")),
    (
        "contradicts",
        lambda: RetrieveKL(*pair(), use_ray_service=True, service_backend="direct"),
    ),
    *(
        ("keys", lambda given=given: llm.KLRewardTransform(tokens_ref(), **given))
        for given in (
            {"in_keys": ["a", "b"]},
            {"out_keys": ["a", "b"]},
            {"in_keys": ["a", "b"], "out_keys": ["a", "b", "c", "d"]},
            {"in_keys": [1]},
        )
    ),
    (
        "both ref_model",
        lambda: llm.KLRewardTransform(tokens_ref(), ref_model_factory=tokens_ref),
    ),
    ("neither ref_model", lambda: llm.KLRewardTransform()),
    ("input_mode='history'", lambda: llm.KLRewardTransform(wrapper(network()))),
    # As the documentation's first line has it.
    ("positional", lambda: llm.KLRewardTransform(tokens_ref(), tokens_ref())),
    ("no tokens at", lambda: charged(sampled("tokens"))),
    ("no log-probs at", lambda: charged(sampled("log_probs"))),
    ("have lengths.*the reference's", lambda: charged(shorter())),
    (
        r"reward has shape \(2, 1\)",
        lambda: charged(sampled(reward=torch.zeros(3, 2, 1))),
    ),
    (
        "log_prob_key",
        lambda: llm.KLRewardTransform(tokens_ref(), log_prob_key="log_probs"),
    ),
    ("next", lambda: charged(sampled("next"))),
    (
        "assistant_only=False",
        lambda: llm.KLRewardTransform(tokens_ref(), assistant_only=False)(
            batch(network(), response_only=True)
        ),
    ),
]


@pytest.mark.parametrize(("words", "call"), [*CONTROL, *LOG_PROBS, *TOKENS])
def test_what_is_refused_is_named(words: str, call: Call) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, RuntimeError), match=words):
        call()
