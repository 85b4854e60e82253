"""``kl.apply=step``: TorchRL's ChatEnv and KL transforms give the fast path's numbers.

Log-probs, KL and reward of three iterations are compared with the fast path's, with plain
transformers one row at a time, and with each other's modes.
"""

import json
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict, set_list_to_stack
from torch import Tensor
from torchrl.collectors.llm import LLMCollector
from torchrl.data.llm import History
from torchrl.envs import InitTracker
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer
from torchrl.modules.llm import TransformersWrapper

from klrl.envs.llm.transforms.kl.reward import KLRewardTransform
from klrl.kl import KLComputation, RetrieveKL, RetrieveLogProb
from klrl.language.data.batch import (
    LOG_PROBS,
    REF_LOG_PROBS,
    REWARD,
    SCORE,
    response_mask,
    response_part,
)
from klrl.language.model.pretrained import adapter_off
from klrl.language.run.chat import ChatPolicy, Score
from klrl.language.run.kl import CHARGED
from klrl.language.run.rollout import GOLD, PARTS
from klrl.runs.folder import RunFolder
from klrl.train.loop import Training
from tests.language.conftest import LENGTHS
from tests.language.toys import network, of_tokens, prompts, truth
from tests.runs.commands import manifest_of
from tests.transforms.llm_toys import alone, tokenizer, wrapper

pytestmark = pytest.mark.integration

MODES = ("legacy", "retrieve")
BOUND = 1e-5
COEF = 0.3
WORDS = (f"kl.coef={COEF}", "actor.dtype=float64", "frames=48")


def three_iterations(config) -> list[dict[str, Tensor]]:
    """What a run charges, as :meth:`klrl.train.loop.Training.train` takes its steps."""
    training = Training(config)
    parts, found = training.parts, []
    rollout = parts.rollout(0)
    for iteration in range(3):
        batch = rollout.collect()
        temperature = config.collector.temperature
        mask = response_mask(batch)
        plain = of_tokens(truth(parts.policy.model, batch, temperature), batch)
        if parts.reference.own:
            ref = of_tokens(truth(parts.reference.module, batch, temperature), batch)
        else:
            with adapter_off(parts.policy.model):
                ref = of_tokens(truth(parts.policy.model, batch, temperature), batch)
        measured = parts.charge_kl(batch)
        found.append(
            {
                "tokens": batch["tokens", "full"],
                "mask": mask,
                "log_probs": response_part(batch, LOG_PROBS),
                "ref_log_probs": response_part(batch, REF_LOG_PROBS),
                "kl": batch[CHARGED].squeeze(-1),
                "reward": batch[REWARD].squeeze(-1),
                "score": batch[SCORE].flatten(),
                "truncated": batch["next", "truncated"],
                "plain": plain,
                "plain_ref": ref,
                "measured": torch.stack([measured[k] for k in sorted(measured)]),
                "coef": torch.tensor(parts.kl.coef),
            }
        )
        parts.estimate_advantage(batch)
        training.learn(batch)
        training.counters.iteration = iteration + 1
        training.update_penalty(batch, measured)
    rollout.close()
    return found


def by_hand(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """KL and reward of every token from plain log-probs: r = log pi - log pi_ref, one score."""
    kl = (found["plain"] - found["plain_ref"]).masked_fill(~found["mask"], 0.0)
    reward = -found["coef"] * kl
    for row, (score, real) in enumerate(zip(found["score"], found["mask"], strict=True)):
        reward[row, int(real.sum()) - 1] += score
    return {
        "log_probs": found["plain"],
        "ref_log_probs": found["plain_ref"],
        "kl": kl,
        "reward": reward,
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        close = {"atol": BOUND, "rtol": 0.0}
        torch.testing.assert_close(found[name].double(), value.double(), **close, msg=name)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["collector.temperature=0.7", "advantage=gae", "reference=ema", "reference.decay=0.5"],
        ["actor.lora.r=2", "reference=adapter_off", "controller=adaptive", "optim.lr=0.1"],
    ],
    ids=["plain", "ema", "adapters"],
)
def test_the_published_path_gives_the_fast_ones_numbers(job, words) -> None:
    runs = {
        (mode, apply): three_iterations(job(f"kl={mode}", f"kl.apply={apply}", *WORDS, *words))
        for mode in MODES
        for apply in ("rollout", "step")
    }
    fast = runs["retrieve", "rollout"]
    assert fast[2]["kl"].abs().max() > 100 * BOUND, "a KL that is there"
    assert fast[0]["score"].std() > 0
    for found in runs.values():
        for one in found:
            assert_same(one, by_hand(one))
        assert_same_iterations(found, fast)


def assert_same_iterations(found: list[dict[str, Tensor]], fast: list[dict[str, Tensor]]) -> None:
    for one, other in zip(found, fast, strict=True):
        assert torch.equal(one["tokens"], other["tokens"])
        assert_same(one, {k: v for k, v in other.items() if k != "tokens"})


def test_the_chosen_estimator_is_charged(job) -> None:
    words = ("kl=retrieve", "kl.estimator=k3", "kl.allow_biased=true", *WORDS)
    fast, step = (three_iterations(job(f"kl.apply={a}", *words)) for a in ("rollout", "step"))
    assert_same_iterations(step, fast)
    r = step[2]["plain_ref"] - step[2]["plain"]
    k3 = (r.exp() - 1 - r).masked_fill(~step[2]["mask"], 0.0)
    assert_same(step[2], {"kl": k3})
    assert not torch.allclose(k3, -r * step[2]["mask"], atol=100 * BOUND)


def collected(config) -> TensorDict:
    parts = Training(config).parts
    rollout = parts.rollout(0)
    rollout.collect()
    batch = rollout.collect()  # the second: prompts and samples go on
    parts.charge_kl(batch)
    rollout.close()
    return batch


@pytest.mark.parametrize("special", ["pad", "pad_is_eos"])
def test_ids_scores_and_their_parts_are_those_of_the_fast_path(job, special) -> None:
    """Texts beside conversations of one and of three turns; a BOS before a text."""
    network().save_pretrained("model")
    toy = tokenizer(pad_is_eos=special == "pad_is_eos")
    toy.save_pretrained("model")
    turns = [("user", "sort"), ("assistant", "one"), ("user", "two three")]
    rows = [
        {"prompt": "hello, how are you"},
        {"messages": [{"role": role, "content": text, "name": "x"} for role, text in turns]},
        {"messages": [{"role": "user", "content": ""}]},
    ]
    Path("data.jsonl").write_text("\n".join(map(json.dumps, rows * 4)))
    more = "def short(prompts, responses, rows):\n    return [-len(r) for r in responses]\n"
    Path("sizes.py").write_text(LENGTHS + more)
    words = (
        "experiment=text",
        "env.data=data.jsonl",
        "env.reward=[sizes:reward,sizes:short]",
        "env.reward_weights=[1,-0.5]",
        "actor.model=model",
        "actor.dtype=float64",
        "collector.temperature=0.9",
    )
    fast, step = (collected(job(f"kl.apply={apply}", *words)) for apply in ("rollout", "step"))
    assert step["next", "truncated"].any()
    for key in (("tokens", "full"), ("masks", "all_attention_mask"), ("next", "truncated"), SCORE):
        assert torch.equal(step[key], fast[key])
    assert set(step[PARTS].keys()) == set(fast[PARTS].keys()) != set()
    for name, part in step[PARTS].items():
        assert torch.equal(part, fast[PARTS][name])
    assert_same({"reward": step[REWARD]}, {"reward": fast[REWARD]})


def test_the_gold_score_comes_along(job) -> None:
    fast, step = (collected(job(f"kl.apply={apply}")) for apply in ("rollout", "step"))
    assert torch.equal(step[GOLD], fast[GOLD])


RETRIEVED = [RetrieveKL, RetrieveLogProb, RetrieveLogProb, KLComputation]


@pytest.mark.parametrize(
    ("mode", "charging"), [("legacy", [KLRewardTransform]), ("retrieve", RETRIEVED)]
)
def test_the_manifest_names_the_classes_in_order(job, mode, charging) -> None:
    Training(job(f"kl={mode}", "kl.apply=step", "frames=16")).train(RunFolder(Path("run")))
    torchrls = [ChatEnv, InitTracker, DataLoadingPrimer]
    built = [LLMCollector, ChatPolicy, *torchrls, Score, *charging]
    assert manifest_of(Path("run"))["built"] == [f"{c.__module__}.{c.__name__}" for c in built]
    assert issubclass(ChatPolicy, TransformersWrapper)


def test_what_the_transforms_wrote_stands(job) -> None:
    parts = Training(job("kl.apply=step")).parts
    rollout = parts.rollout(0)
    phases = []
    rollout.phase = phases.append
    batch = rollout.collect()
    assert phases == ["reward", "scoring"]
    kept = {}
    for key in (REWARD, CHARGED, REF_LOG_PROBS):
        batch[key] += 1
        kept[key] = batch[key].clone()
    parts.charge_kl(batch)
    for key, value in kept.items():
        assert torch.equal(batch[key], value)
    rollout.close()


def test_the_environment_goes_on_with_the_whole_conversation(job) -> None:
    """As TorchRL asks of a policy: ``history.full``, prompt and answer."""
    parts = Training(job("kl.apply=step", "env.shots=1")).parts
    rollout = parts.rollout(0)
    seen = []
    answer = rollout.answer
    rollout.answer = lambda shown: seen.append(shown) or answer(shown)
    rollout.collect()
    history = seen[0]["history"]
    asked = [[turn["content"] for turn in prompt.content] for prompt in rollout._taken.prompts]
    every = rollout.config.collector.group_size
    assert [row.content for row in history.prompt[::every].unbind(0)] == asked
    assert history.full.batch_size[1] == history.prompt.batch_size[1] + 1
    assert [row.content[-1] for row in history.full.unbind(0)] == rollout.responses
    rollout.close()


def test_torchrl_extends_no_batch_of_conversations_of_different_lengths() -> None:
    """A failure here shows that the fault is gone; then ``ChatPolicy`` need not go row by row."""
    turn = {"role": "user", "content": "hello"}
    with set_list_to_stack(True):
        chats, more = History.from_chats([[turn], [turn] * 3]), History.from_chats([[turn]] * 2)
        with pytest.raises(ValueError, match="zip"):
            chats.extend(more, inplace=False, dim=-1)


@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")
def test_faults_of_the_wrapper_that_are_worked_around() -> None:
    """A failure here shows that a fault is gone; without any of them ``ChatPolicy`` can go."""
    model, (ids, _) = network(), prompts(lengths=(4, 4))
    toy = tokenizer(pad_is_eos=True)
    settings = {"max_new_tokens": 4, "do_sample": True, "temperature": 0.5}
    policy = wrapper(model, "tokens", tokenizer=toy, generate=True, generate_kwargs=settings)
    before = torch.get_rng_state()
    out = policy(TensorDict({"tokens": {"prompt": ids}}, [2]).to_lazystack(0))
    assert not torch.equal(before, torch.get_rng_state()), "it draws from torch's own generator"
    log_probs = torch.stack(out.get(("log_probs", "response"), as_list=True))
    assert not log_probs[:, 0].any(), "the first token's log-prob is forced to 0"
    raw = torch.stack([alone(model, row)[5:] for row in out.get(("tokens", "full"))])
    torch.testing.assert_close(log_probs[:, 1:], raw, msg="the others' ignore the temperature")
    bias = torch.zeros(300)
    bias[toy.eos_token_id] = 12.0
    model.lm_head.bias = torch.nn.Parameter(bias)  # the first token is an EOS
    out = policy(TensorDict({"tokens": {"prompt": ids}}, [2]).to_lazystack(0))
    response = torch.stack(out.get(("tokens", "response"), as_list=True))
    assert (response[:, 0] == toy.eos_token_id).all()
    masks = torch.stack(out.get(("masks", "all_attention_mask"), as_list=True))
    assert not masks[:, 4:].any(), "by value: the EOS is lost where pad == eos"
