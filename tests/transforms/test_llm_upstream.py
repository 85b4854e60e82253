"""Faults of TorchRL 0.14.1 that klrl goes around. A test that fails here says: the fault is gone.

Then the workaround named in the test can go too.
"""

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory

from klrl.kl import RetrieveLogProb
from tests.transforms.llm_toys import alone, chats, network, tokenizer, wrapper
from tests.transforms.test_llm_truth import padded, token_rows

#: Their use of an argument that torch calls deprecated; their own announcements.
pytestmark = [
    pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]


def error_of_their_forward(model, data: TensorDict, **kwargs) -> float:
    """Largest difference between the wrapper's own log-probs and the truth, over real tokens."""
    with torch.no_grad():
        out = wrapper(model, "tokens", **kwargs)(data.clone())
    found = out.get(("log_probs", "full"))
    worst = 0.0
    for row, real, pair in zip(
        found, data["masks", "all_attention_mask"], token_rows(), strict=True
    ):
        worst = max(worst, float((row[real] - alone(model, torch.cat(pair))).abs().max()))
    return worst


def test_gpt2_cannot_be_scored() -> None:
    """The mask is passed by position, where GPT-2 takes its cache.

    Workaround: klrl/envs/llm/transforms/kl/wrappers.py passes it by name.
    """
    data = padded(token_rows(), "left", 0)
    with pytest.raises(AttributeError, match="get_seq_length"):
        error_of_their_forward(network("gpt2"), data)
    assert error_of_their_forward(network("llama"), data) < 1e-4


def test_the_temperature_is_ignored_when_scoring() -> None:
    """Workaround: klrl/envs/llm/transforms/kl/wrappers.py divides the logits."""
    data = padded(token_rows(), "left", 0)
    error = error_of_their_forward(network(), data, generate_kwargs={"temperature": 0.5})
    assert error < 1e-4  # the truth at temperature 1


def test_dropout_stays_on_when_scoring() -> None:
    """Workaround: klrl/envs/llm/transforms/kl/wrappers.py scores in evaluation mode."""
    model, data = network().train(), padded(token_rows(), "right", 0)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with torch.no_grad():
        once, again = (
            wrapper(model, "tokens")(data.clone()).get(("log_probs", "full")) for _ in range(2)
        )
    assert (once - again).abs().max() > 1e-3


def test_the_samplers_first_log_prob_is_forced_to_zero_and_the_rest_is_raw() -> None:
    """Workaround: klrl/envs/llm/transforms/kl/reward.py, _without_forced_zero."""
    model = network()
    policy = wrapper(
        model, "tokens", generate=True, generate_kwargs={"max_new_tokens": 4, "do_sample": True}
    )
    prompts = torch.randint(3, 100, (2, 5))
    out = policy(TensorDict({"tokens": {"prompt": prompts}}, [2]).to_lazystack(0))
    found = torch.stack(out.get(("log_probs", "response"), as_list=True))
    truth = torch.stack([alone(model, row)[5:] for row in out.get(("tokens", "full"))])
    assert not found[:, 0].any()
    assert (truth[:, 0] < -0.1).all()
    torch.testing.assert_close(found[:, 1:], truth[:, 1:], atol=1e-4, rtol=0)


def test_the_tokenizers_name_overrides_its_template() -> None:
    """Workaround: klrl/envs/llm/transforms/kl/tokens.py, template_of."""
    from tests.transforms.llm_toys import TEMPLATE

    other = TEMPLATE.replace("<|im_start|>", "one ")
    toy = tokenizer(name="my-qwen", template=other)
    history = History.from_chats(chats(1)[:1])
    assert history.apply_chat_template(tokenizer=toy, add_generation_prompt=False)[0].startswith(
        "<|im_start|>"
    )
    data = TensorDict({"history": ChatHistory(full=history)}, [1])
    scored = RetrieveLogProb(wrapper(network(), tokenizer=toy))(data)
    ids = toy.apply_chat_template(chats(1)[0], return_dict=True)["input_ids"]
    assert scored["log_probs_mask"].shape == (1, len(ids))


def test_a_new_version_writes_into_the_policys_tokenizer_kwargs() -> None:
    """Workaround: klrl/envs/llm/transforms/kl/retrieve_kl.py hands copies over."""
    policy = wrapper(network(), generate=True)
    policy.get_new_version(generate=False, pad_output=False)
    assert policy.tokenizer_kwargs["padding"] is False
