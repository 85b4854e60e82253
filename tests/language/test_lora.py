"""LoRA: the update by hand, and a reference that is the same model without its adapters."""

import copy

import peft
import pytest
import torch
from torch import nn

from klrl.base.errors import ConfigError
from klrl.config import LoraConfig, ReferenceConfig
from klrl.envs.llm.transforms.kl.wrappers import token_log_probs
from klrl.kl.reference import AdapterOffReference
from klrl.language.model.causal_lm import head
from klrl.language.model.pretrained import adapter_off, add_lora
from klrl.language.model.vocabulary import response_log_probs
from klrl.language.run.kl import Reference
from tests.transforms import llm_toys as toys

IDS = torch.tensor([[5, 9, 30, 12, 77]])
RANK, ALPHA = 3, 6.0
#: (in, out) of the layers that all-linear means, in each of the two blocks of width 16.
LAYERS = {
    "llama": [(16, 16)] * 4 + [(16, 32)] * 2 + [(32, 16)],
    "qwen2": [(16, 16)] * 4 + [(16, 32)] * 2 + [(32, 16)],
    "gpt2": [(16, 48), (16, 16), (16, 64), (64, 16)],
}


def lora(**settings: object) -> LoraConfig:
    return LoraConfig(**{"r": 8, "alpha": 16.0, "target_modules": "all-linear", **settings})


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def adapted(family: str, **settings: object):
    """A model with adapters that do something, and a frozen copy from before."""
    network = toys.network(family)
    before = copy.deepcopy(network).requires_grad_(False)
    model = add_lora(network, lora(r=RANK, alpha=ALPHA, **settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3, generator=generator)
    return model.eval(), before


def storages(model: nn.Module) -> dict[int, int]:
    """Address and bytes of each block of memory that holds parameters or buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_the_update_is_alpha_over_r_times_b_a(family: str) -> None:
    model, before = adapted(family)
    weights = dict(model.named_parameters())
    merged = 0
    with torch.no_grad():
        for name, parameter in before.named_parameters():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{stem}.lora_A.default.weight" not in weights:
                continue
            a = weights[f"{stem}.lora_A.default.weight"]
            b = weights[f"{stem}.lora_B.default.weight"]
            update = ALPHA / RANK * b @ a
            parameter += update.T if family == "gpt2" else update
            merged += 1
    assert merged == 2 * len(LAYERS[family])
    assert torch.allclose(logits(model), logits(before), atol=1e-4)


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_adapter_off_scores_as_a_separate_frozen_copy(family: str) -> None:
    model, before = adapted(family)
    rows = [torch.tensor([5, 9, 30, 12, 77]), torch.tensor([8, 3, 100])]
    masks = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    on = logits(model)
    with adapter_off(model) as reference:
        scores = token_log_probs(reference, rows, masks)
    for row, score in zip(rows, scores, strict=True):
        assert torch.allclose(score, toys.alone(before, row), atol=1e-5)
    assert not torch.allclose(on, logits(before), atol=0.1)
    assert torch.equal(logits(model), on)  # the adapters are back


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_the_reference_costs_no_second_copy(family: str) -> None:
    model, before = adapted(family)
    held = storages(model)
    with adapter_off(model) as reference:
        assert reference is model
        logits(reference)
        assert storages(reference) == held
    adapters = 2 * 4 * RANK * sum(i + o for i, o in LAYERS[family])  # 2 blocks, 4 bytes
    assert sum(held.values()) == sum(storages(before).values()) + adapters


def test_the_references_head_is_without_adapters_too() -> None:
    model, before = adapted("llama", target_modules=["q_proj", "lm_head"])
    reference = Reference(
        AdapterOffReference(ReferenceConfig(name="adapter_off")), model, own=False
    )
    states, tokens = torch.randn(1, 5, 16), IDS
    scores = response_log_probs(reference.next_tokens(states, 1.0), tokens, tokens > 0)
    table = before.lm_head(states).log_softmax(-1)
    assert torch.allclose(scores, table.gather(-1, tokens[..., None])[..., 0], atol=1e-5)
    assert not torch.allclose(head(model)(states), before.lm_head(states), atol=0.1)


def test_only_adapters_learn() -> None:
    model, _ = adapted("llama")
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning == {name for name, _ in model.named_parameters() if "lora_" in name}


def test_the_reference_leaves_no_graph_and_the_mode_as_it_was() -> None:
    model, _ = adapted("llama")
    model.train()
    model.get_output_embeddings().weight.requires_grad_(True)  # as if more than adapters learned
    with adapter_off(model) as reference:
        assert not reference.training
        assert not reference(input_ids=IDS).logits.requires_grad
    assert model.training
    assert model(input_ids=IDS).logits.requires_grad


def test_adapters_come_back_after_an_error() -> None:
    model, _ = adapted("llama")
    expected = logits(model)

    def fail() -> None:
        with adapter_off(model):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(logits(model), expected)
    assert all(p.requires_grad for n, p in model.named_parameters() if "lora_" in n)


def test_named_layers_alone_get_adapters() -> None:
    model, _ = adapted("llama", target_modules=["q_proj", "v_proj"])
    layers = {n.split(".")[-4] for n, _ in model.named_parameters() if "lora_A" in n}
    assert layers == {"q_proj", "v_proj"}


def test_a_layer_that_is_not_there_is_refused() -> None:
    message = r"actor.lora.target_modules=\['nope'\]: .*all-linear"
    with pytest.raises(ConfigError, match=message) as caught:
        add_lora(toys.network(), lora(target_modules=["nope"]))
    assert "\n" not in str(caught.value)


def test_peft_still_reads_a_deprecated_property() -> None:
    """When this fails, klrl/language/model/pretrained.py has nothing to silence any more."""
    config = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        peft.get_peft_model(toys.network(), config)


def test_a_model_without_adapters_cannot_take_them_off() -> None:
    with (
        pytest.raises(ConfigError, match="reference=adapter_off: .*no adapters"),
        adapter_off(toys.network()),
    ):
        pass
