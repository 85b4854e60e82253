"""TorchRL's printed examples run with klrl's classes, word for word.

Read from TorchRL's own docstrings; the tokenizer of the hub is a small local one, so that a count
of tokens may differ. KLRewardTransform for control, which TorchRL removed, and KLPENPPOLoss's note
are written here as they were printed.
"""

import doctest
import inspect
import re

import pytest
import torch
import torchrl.envs.llm.transforms.kl as torchrl_kl
import torchrl.objectives
from tensordict import TensorDict
from torchrl.envs import TransformedEnv
from transformers import AutoTokenizer

import klrl.envs.llm.transforms.kl
import klrl.envs.transforms
import klrl.objectives
from tests.transforms.llm_toys import conversation, pair, tokenizer
from tests.transforms.test_transforms import documented_actor

#: Classes whose docstring has an example that defines all that it uses.
PRINTED = ("RetrieveLogProb", "RetrieveKL", "KLComputation")


def example_of(name: str) -> str:
    """The lines of a class's example in TorchRL's docstring, with klrl in the place of TorchRL."""
    page = inspect.getdoc(getattr(torchrl_kl, name)) or ""
    lines = page.partition("Examples:")[2].partition("\n.. ")[0].partition("\nNote:")[0]
    text = lines.replace("torchrl.envs.llm.transforms.kl", "klrl.envs.llm.transforms.kl")
    return re.sub(r"(torch\.Size\(\[2, )\d+(\]\))", r"\1...\2", text)  # of another tokenizer


@pytest.mark.parametrize("name", PRINTED)
def test_a_printed_example_runs(name: str, monkeypatch) -> None:
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: tokenizer())
    known = {name: getattr(klrl.envs.llm.transforms.kl, name)}
    test = doctest.DocTestParser().get_doctest(example_of(name), known, name, None, 0)
    assert len(test.examples) > 5
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


def test_every_exported_class_is_found_where_torchrl_has_it() -> None:
    for name in ("KLComputation", "KLRewardTransform", "RetrieveKL", "RetrieveLogProb"):
        assert getattr(klrl.envs.llm.transforms, name) is getattr(klrl.envs.llm.transforms.kl, name)
    for name in ("KLPENPPOLoss", "ClipPPOLoss"):
        ours = getattr(klrl.objectives, name)
        assert issubclass(ours, getattr(torchrl.objectives, name))


def test_klrewardtransform_of_control_as_printed() -> None:
    base_env, actor = documented_actor()
    transform = klrl.envs.transforms.KLRewardTransform(actor, out_keys="reward_kl")
    env = TransformedEnv(base_env, transform)
    with torch.no_grad():
        TensorDict(dict(actor.named_parameters()), []).apply_(lambda x: x.data.copy_(x.data + 1))
        td = env.rollout(3, actor)
        dist = transform.reference.get_dist(td.select("observation"))
    assert (td.get(("next", "reward")) != td.get(("next", "reward_kl"))).all()
    kl = td["next", "reward"] - td["next", "reward_kl"]
    by_hand = td["action_log_prob"] - dist.log_prob(td["action"])
    torch.testing.assert_close(kl.squeeze(-1), by_hand, atol=1e-4, rtol=1e-4)
    assert float(env.reset()["reward_kl"].abs().sum()) == 0.0
    before = td.exclude("action")
    assert set(transform(before.copy()).keys(True)) == set(before.keys(True))  # no action: as it is


@pytest.mark.parametrize("key", ["lp", ("lp", "response"), ("lp",)])
def test_a_key_that_torchrl_does_not_expect_is_warned_of(key) -> None:
    gen, _ = pair()
    with pytest.warns(UserWarning, match="'full'"):
        transform = klrl.envs.llm.transforms.RetrieveLogProb(gen, log_probs_full_key=key)
    out = transform(conversation())["next"]
    assert out[key].any()
    assert out["lp_mask"].any()
