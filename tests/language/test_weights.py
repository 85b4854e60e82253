"""A checkpoint that leans on a base model is refused beside another one."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import klrl
from benchmarks.sort_digits_base import build
from klrl.config import LoraConfig
from klrl.language.model.pretrained import add_lora
from klrl.language.run.load import BaseDigest
from tests.language.conftest import QUICK, QUICK_MODEL
from tests.runs.commands import exits, manifest_of, said
from tests.transforms.llm_toys import network

pytestmark = pytest.mark.integration

FILE, RESUME = Path("model/model.safetensors"), ("resume=run", "frames=48")
LINE = (
    "actor.model=model no longer has the weights that the run started from; "
    "restore its original files"
)


def start(*words: str) -> None:
    Path("model").mkdir()
    build(QUICK_MODEL, Path("model").absolute())
    assert exits(*QUICK, "actor.model=model", "hydra.run.dir=run", *words) == 0


def nudge(by: float) -> None:
    """Move one weight of the base model."""
    tensors = load_file(FILE)
    next(iter(tensors.values())).view(-1)[0] += by
    save_file(tensors, FILE, metadata={"format": "pt"})


@pytest.mark.parametrize("words", [["actor.lora.r=2", "reference=adapter_off"], []])
def test_a_run_goes_on_beside_its_own_base_model_alone(capsys, words: list[str]) -> None:
    start(*words)
    before = Path("run/metrics.jsonl").read_bytes()
    kept = FILE.read_bytes()
    nudge(by=0.5)
    code, _, err = said(capsys, *RESUME)
    assert (code, len(err.splitlines())) == (2, 1)
    assert LINE in err
    assert (Path("run/metrics.jsonl").read_bytes(), manifest_of(Path("run"))["status"]) == (
        before,
        "finished",
    )
    FILE.write_bytes(kept)
    assert said(capsys, *RESUME)[::2] == (0, "")


@pytest.mark.parametrize("words", [["reference=ema"], ["kl=none"]])
def test_a_checkpoint_that_holds_everything_needs_no_base(capsys, words: list[str]) -> None:
    start(*words)
    nudge(by=0.5)
    assert said(capsys, *RESUME)[::2] == (0, "")
    klrl.load_policy("run")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_digest_is_that_of_the_base_and_not_of_its_adapters(dtype: torch.dtype) -> None:
    model = add_lora(network().to(dtype), LoraConfig(r=2, alpha=16.0, target_modules="all-linear"))
    found = BaseDigest(model, "model")
    sha = hashlib.sha256()
    for name, p in model.named_parameters():
        if "lora" not in name:
            sha.update(f"{name} {p.dtype} {tuple(p.shape)}".encode())
            sha.update(bytes(p.detach().contiguous().view(torch.uint8).flatten().tolist()))
    assert bytes(found.digest.tolist()) == sha.digest()
    assert list(found.state_dict()) == [f"base_sha256.{dtype}".replace("torch.", "")]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora" in name:
                p.add_(1.0)
    assert torch.equal(BaseDigest(model, "model").digest, found.digest)
