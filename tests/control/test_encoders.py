"""Encoders of entries against torch's own layers."""

import pytest
import torch

from klrl.control.encoders import Embedding, Images, nature
from klrl.control.observation import ObservationPart


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
