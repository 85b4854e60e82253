"""Toys for the language tests: a tokenizer and models made here, nothing is downloaded."""

from functools import cache

import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torchrl.data.llm import History
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import ChatHistory
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCES = [
    "sort the digits three one two",
    "one two three, and four",
    "user system assistant",
    "hello, how are you today?",
    "I am fine, thank you.",
]
FAMILIES = ("llama", "gpt2", "qwen2")


@cache
def tokenizer(pad_is_eos: bool = False, name: str = "toy", template: str = TEMPLATE):
    """Byte-level BPE with ChatML's marks; EOS ends an assistant's turn."""
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    base.train_from_iterator(SENTENCES, trainer)
    toy = PreTrainedTokenizerFast(
        tokenizer_object=base,
        pad_token="<|im_end|>" if pad_is_eos else "<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
    )
    toy.name_or_path = name
    return toy


def network(family: str = "llama", seed: int = 0):
    """A random causal LM of two layers, far enough from uniform to make KLs of some nats."""
    torch.manual_seed(seed)
    vocab = len(tokenizer())
    if family == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=vocab, n_embd=16, n_layer=2, n_head=2, n_positions=256)
        )
    else:
        classes = {
            "llama": (LlamaConfig, LlamaForCausalLM),
            "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        }
        config, kind = classes[family]
        model = kind(
            config(
                vocab_size=vocab,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=256,
            )
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model.eval()


def wrapper(model, mode: str = "history", **kwargs) -> TransformersWrapper:
    """A wrapper that scores."""
    defaults = {"tokenizer": tokenizer(), "pad_output": True, "generate": False}
    return TransformersWrapper(model, input_mode=mode, **{**defaults, **kwargs})


def alone(model, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """The truth: one sequence [T] at a time through plain transformers, without any padding."""
    with torch.no_grad():
        logits = model(ids[None], attention_mask=torch.ones_like(ids[None])).logits[0]
    table = (logits.double() / temperature).log_softmax(-1)
    scored = table[:-1].gather(-1, ids[1:, None]).squeeze(-1)
    return torch.cat([scored.new_zeros(1), scored]).float()


def chats(turns: int = 1) -> list[list[dict]]:
    """Two conversations of different lengths, with as many user-assistant pairs."""
    first = [{"role": "system", "content": "sort"}]
    second = []
    for turn in range(turns):
        first += [
            {"role": "user", "content": f"hello, how are you {'today ' * turn}?"},
            {"role": "assistant", "content": "I am fine, thank you." + " one" * turn},
        ]
        second += [
            {"role": "user", "content": "sort the digits three one two"},
            {"role": "assistant", "content": "one two three" + ", and four" * (turn + 1)},
        ]
    return [first, second]


def rendered(chat: list[dict], **kwargs) -> tuple[Tensor, Tensor]:
    """Ids and assistant mask [T] of one conversation, by transformers alone."""
    out = tokenizer().apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True, tokenize=True, **kwargs
    )
    return torch.tensor(out["input_ids"]), torch.tensor(out["assistant_masks"]).bool()


def pair(mode: str = "history", **kwargs) -> tuple[TransformersWrapper, TransformersWrapper]:
    """A policy and its reference, which are far apart."""
    return (
        wrapper(network(), mode, log_probs_key="gen_log_probs", **kwargs),
        wrapper(network(seed=1), mode, log_probs_key="ref_log_probs", **kwargs),
    )


def conversation(turns: int = 1, key: str = "history") -> TensorDict:
    """Both chats as a transition, with rewards 1 and 2."""
    history = ChatHistory(full=History.from_chats(chats(turns)))
    following = TensorDict({"reward": torch.tensor([1.0, 2.0]).view(2, 1, 1)}, [2])
    return TensorDict({key: history, "next": following}, [2])
