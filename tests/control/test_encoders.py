"""Encoders of entries against torch's own layers."""

from pathlib import Path

import pytest
import torch

import klrl
from klrl.config import CNNActorConfig
from klrl.control.env.copies import VectorGymEnv
from klrl.control.env.observation import ObservationPart
from klrl.control.policy.actor import make_agent
from klrl.control.policy.encoders import Embedding, Images, Mixed, nature
from klrl.control.run.load import trained_agent
from tests.conftest import QUICK
from tests.control.toys import Counted
from tests.runs.commands import exits, rows_of


def test_an_embedding_is_a_linear_layer_over_one_hot_numbers() -> None:
    embedding = Embedding((3, 4), 5)
    numbers = torch.tensor([[2, 0], [0, 3]])
    one_hot = torch.cat([torch.eye(3)[numbers[:, 0]], torch.eye(4)[numbers[:, 1]]], -1)
    torch.testing.assert_close(embedding(numbers), one_hot @ embedding.rows.weight)


@pytest.mark.parametrize("shape", [(36, 40), (36, 40, 2), (2, 36, 40), (3, 36, 40, 2)], ids=str)
def test_an_image_is_read_as_its_channels(shape) -> None:
    """Height, width, channels as Gymnasium has them; stacked frames first, or channels first."""
    entry = ObservationPart("x", ("x",), "image", shape)
    channels = {2: 1, 3: 2, 4: 6}[len(shape)]
    assert entry.pixels == (channels, 36, 40)
    torch.manual_seed(0)
    cnn = nature(channels)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
    by_hand = {
        2: lambda x: x[None],
        3: lambda x: x if shape[0] == 2 else x.permute(2, 0, 1),
        4: lambda x: torch.cat([frame.permute(2, 0, 1) for frame in x]),
    }[len(shape)](pixels.float() / 255)
    features = Images(entry, cnn, 255.0)(pixels.reshape(1, 1, -1))
    torch.testing.assert_close(features[0, 0], cnn(by_hand[None])[0])


def test_a_board_is_divided_by_its_own_largest_value() -> None:
    """Or by ``actor.scale``, if that is given."""
    env = VectorGymEnv("X", 1, make=lambda: Counted(7, board=True))
    (entry,) = env.layout.entries
    assert (entry.pixels, entry.high) == ((7, 5, 5), 1)
    board = torch.zeros(1, 5, 5, 7)
    board[..., 3] = 1
    for scale, by in ((None, 1), (2.0, 2), (255.0, 255)):
        config = CNNActorConfig(
            [8], "relu", True, init_std=1.0, arch="impala", scale=scale, name="cnn"
        )
        agent = make_agent(config, env, normalize=True, separate=False)
        images = agent.policy_net.trunk[0].encoders["0"]
        found = images(board.byte().reshape(1, -1))
        torch.testing.assert_close(found, images.cnn(board.permute(0, 3, 1, 2) / by))


def test_natures_sizes() -> None:
    """Mnih et al. (2015): 84 x 84 x 4 gives 64 x 7 x 7; 1,684,128 weights with the layer of 512."""
    cnn = nature(4)
    assert cnn(torch.zeros(2, 4, 84, 84)).shape == (2, 3136)
    assert sum(p.numel() for p in cnn.parameters()) + 3136 * 512 + 512 == 1_684_128


def test_the_gradient_of_images_is_that_of_the_plain_cnn() -> None:
    """Where a gradient is asked for, pixels lie in another order in memory."""
    torch.manual_seed(0)
    entry = ObservationPart("", (), "image", (36, 40, 2))
    cnn = nature(2)
    pixels = torch.randint(0, 256, (5, 36, 40, 2), dtype=torch.uint8)
    parameters = list(cnn.parameters())
    features = Images(entry, cnn, 255.0)(pixels.flatten(1))
    plain = cnn(pixels.permute(0, 3, 1, 2).contiguous() / 255)
    torch.testing.assert_close(features, plain)
    with torch.no_grad():
        torch.testing.assert_close(Images(entry, cnn, 255.0)(pixels.flatten(1)), plain)
    of = torch.randn_like(plain)
    for ours, theirs in zip(
        torch.autograd.grad(features, parameters, of),
        torch.autograd.grad(plain, parameters, of),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------------- learner.dtype=mixed

CATCH = (*QUICK, "env=catch", "learner.compile=false", "eval.final=0", "frames=128")
HAS, LACKS = {"avx512_bf16": True}, {"avx512_bf16": False, "avx2": True}


def trunk_and_images() -> tuple[torch.nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    entry = ObservationPart("", (), "image", (36, 40, 2))
    layers = (Images(entry, nature(2), 255.0), torch.nn.Linear(64, 8))
    return torch.nn.Sequential(*layers), torch.randint(0, 256, (5, 36 * 40 * 2), dtype=torch.uint8)


def gradients(trunk: torch.nn.Sequential, images: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(trunk(images).square().sum(), list(trunk.parameters())))


def test_a_mixed_trunk_multiplies_rounded_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As float32 layers do whose inputs and weights are rounded to bfloat16, each in its turn."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: HAS)
    trunk, images = trunk_and_images()
    mixed = Mixed(*trunk)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().float()

    hidden = images.float().reshape(5, 36, 40, 2).permute(0, 3, 1, 2) / 255
    for layer in (*trunk[0].cnn, trunk[1]):
        if isinstance(layer, torch.nn.Conv2d):
            given = rounded(hidden), rounded(layer.weight), rounded(layer.bias)
            hidden = torch.nn.functional.conv2d(*given, layer.stride)
        elif isinstance(layer, torch.nn.Linear):
            given = rounded(hidden), rounded(layer.weight), rounded(layer.bias)
            hidden = torch.nn.functional.linear(*given)
        else:
            hidden = layer(hidden)
    plain, found = trunk(images), mixed(images)
    assert found.dtype == torch.float32
    by_hand, apart = ((found - x).abs().max() for x in (rounded(hidden), plain))
    assert by_hand < plain.abs().max() / 256, "one rounding"
    assert apart > 0
    for ours, theirs in zip(gradients(mixed, images), gradients(trunk, images), strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - theirs).norm() / theirs.norm()) < 0.1


def test_a_processor_without_bfloat16_computes_in_float32(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: LACKS)
    trunk, images = trunk_and_images()
    assert torch.equal(Mixed(*trunk)(images), trunk(images))
    klrl.run(*CATCH, "learner.dtype=mixed", folder=Path("run"))
    line = "learner.dtype=mixed: this processor has no bfloat16 instructions"
    assert line in capsys.readouterr().out


@pytest.mark.integration
def test_a_mixed_run_resumes_to_the_bit_and_its_policy_is_mixed(monkeypatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: HAS)
    mixed = ("learner.dtype=mixed", "checkpoint.every=1")
    rows = {}
    for name, words in {"mixed": mixed, "half": (*mixed, "frames=64"), "plain": ()}.items():
        klrl.run(*CATCH, *words, folder=Path(name))
    assert exits("resume=half", "frames=128") == 0
    for name in ("mixed", "half", "plain"):
        rows[name] = [(r["loss/objective"], r["kl/old/exact"]) for r in rows_of(Path(name))]
    assert rows["mixed"] == rows["half"]
    assert rows["mixed"] != rows["plain"]
    assert rows["mixed"][-1] == pytest.approx(rows["plain"][-1], rel=0.3, abs=1e-4)
    # Sampled, scored and compared with its reference in the same arithmetic.
    assert abs(rows_of(Path("mixed"))[0]["kl/ref/exact"]) < 1e-7
    assert isinstance(trained_agent("mixed").policy_net.trunk, Mixed)
    assert not isinstance(trained_agent("plain").policy_net.trunk, Mixed)
