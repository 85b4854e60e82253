"""Low-rank adapters through ``peft``, and the policy without them.

W x becomes W x + (alpha / r) B A x, and B starts at 0, so that the policy starts at its reference
(Hu et al. 2021, "LoRA", arXiv:2106.09685, section 4.1).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from klrl.base.errors import ConfigError, first_line
from klrl.config import LoraConfig
from klrl.kl.reference import evaluating


def add_lora(network: Any, settings: LoraConfig) -> Any:
    """Freeze a model and put trainable adapters beside its layers.

    Args:
        network: a causal LM; changed in place.
        settings: ``actor.lora.*`` with r >= 1. Dropout is not applied: it would act in the update
            but not while sampling, so that the ratio of the first epoch would not be 1.

    Returns:
        A ``PeftModel`` around the network.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            "actor.lora: the package peft is not installed; pip install 'klrl[language]'"
        ) from error
    targets = settings.target_modules
    config = peft.LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        # GPT-2's Conv1D keeps its weight transposed.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in network.modules()),
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # peft 0.21 reads a property that transformers 5.23 deprecates.
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            # Adapters on one of two tied weights cannot be merged, which klrl export refuses.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings", UserWarning)
            return peft.get_peft_model(network, config)
    except ValueError as error:
        raise ConfigError(
            f"actor.lora.target_modules={targets}: {first_line(error)}; name layers of "
            "the model, or use all-linear"
        ) from error


@contextmanager
def adapter_off(model: Any) -> Iterator[Any]:
    """``reference=adapter_off``: the model without its adapters, for scoring.

    No weight is copied: inside, the same model computes without its adapters, without gradients
    and in evaluation mode; adapters and modes are restored afterwards, even after an error.

    Args:
        model: a ``PeftModel``, from :func:`add_lora`.
    """
    if not hasattr(model, "disable_adapter"):
        raise ConfigError(
            "reference=adapter_off: the policy has no adapters; set actor.lora.r, or choose "
            "reference=initial"
        )
    with model.disable_adapter(), evaluating(model), torch.no_grad():
        yield model
