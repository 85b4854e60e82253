"""Encode an observation's entries, one encoder per entry, and concatenate the outputs.

An image passes through a CNN, an index through an embedding. A vector passes through one linear
layer and an activation, or, if it is the only entry, goes to the trunk unchanged. An action mask is
not encoded; :class:`klrl.control.policy.networks.PolicyNet` applies it to the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from klrl.control.env.observation import Layout, ObservationPart
from klrl.control.policy.networks import ACTIVATIONS, orthogonal
from klrl.runs.machine import cpu_has_bfloat16

#: Makes a CNN for a number of channels; the CNN maps [B, channels, height, width] to [B, F].
MakeCNN = Callable[[int], nn.Module]


class Encoders(nn.Module):
    """Network from packed observations (transports) [..., D] to features [..., F].

    With several entries, every encoder has ``width`` outputs. ``cnn`` is a name in :data:`CNNS`.
    """

    def __init__(
        self, layout: Layout, width: int, activation: str, cnn: str | None, scale: float | None
    ) -> None:
        super().__init__()
        self.layout, self.in_features = layout, layout.size
        read = [entry for entry in layout.entries if entry.kind != "mask"]
        several = len(read) > 1
        self.encoders = nn.ModuleDict()
        self.out_features = 0
        for place, entry in enumerate(read):
            # Encoders are named by position: keys may contain dots, but module names may not.
            encoder, features = _encoder(entry, width if several else None, activation, cnn, scale)
            self.encoders[str(place)] = encoder
            self.out_features += features

    def forward(self, observation: Tensor) -> Tensor:
        """Encode transports; the caller has normalised their vector entries."""
        parts = [observation[..., place] for _, place in self.layout.places()]
        read = zip(self.encoders.values(), parts, strict=False)  # the mask is last and left out
        return torch.cat([encoder(part) for encoder, part in read], -1)

    def extra_repr(self) -> str:
        """Add the entries to the ``repr``, which is part of a compiled package's key."""
        return self.layout.line


class Mixed(nn.Sequential):
    """A trunk that computes in bfloat16; its weights and outputs are float32.

    On a CPU without bfloat16 instructions it computes in float32.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self._on_cpu = cpu_has_bfloat16()

    def forward(self, observation: Tensor) -> Tensor:
        """Compute float32 features of every observation."""
        kind = observation.device.type
        with torch.autocast(kind, torch.bfloat16, kind != "cpu" or self._on_cpu):
            return super().forward(observation).float()


def _encoder(
    entry: ObservationPart,
    width: int | None,
    activation: str,
    cnn: str | None,
    scale: float | None,
) -> tuple[nn.Module, int]:
    """Make an entry's encoder; also return its output width. ``width`` is None for a sole entry."""
    if entry.kind == "vector":
        if width is None:
            return _Numbers(), entry.size
        linear = orthogonal(nn.Linear(entry.size, width), math.sqrt(2))
        return nn.Sequential(_Numbers(), linear, ACTIVATIONS[activation]()), width
    if entry.kind == "index":
        width = _EMBEDDING if width is None else width
        return Embedding(entry.counts, width), width
    assert cnn is not None
    stack = CNNS[cnn](entry.pixels[0])
    images = Images(entry, stack, entry.high if scale is None else scale)
    if width is None:
        return images, images.out_features
    linear = orthogonal(nn.Linear(images.out_features, width), math.sqrt(2))
    return nn.Sequential(images, linear, ACTIVATIONS[activation]()), width


#: Width of the embedding if an index is the only entry.
_EMBEDDING = 64


class _Numbers(nn.Module):
    """Convert bytes and integers [..., D] to float32; floats are unchanged."""

    def forward(self, numbers: Tensor) -> Tensor:
        return numbers if numbers.is_floating_point() else numbers.float()


class Embedding(nn.Module):
    """Sum [..., F] of the embeddings of M integers [..., M]; integer i is below ``counts[i]``.

    A linear layer without bias gives the same for one-hot inputs, but computes products with 0.
    """

    offsets: Tensor

    def __init__(self, counts: tuple[int, ...], width: int) -> None:
        super().__init__()
        starts = torch.tensor([0, *counts[:-1]]).cumsum(0)
        self.register_buffer("offsets", starts, persistent=False)
        self.rows = nn.Embedding(sum(counts), width)
        # With this std, the sum of M embeddings has variance 1.
        nn.init.normal_(self.rows.weight, std=1 / math.sqrt(len(counts)))

    def forward(self, numbers: Tensor) -> Tensor:
        """Look up the embeddings and sum them."""
        return self.rows(numbers.long() + self.offsets).sum(-2)


class Images(nn.Module):
    """Network from pixels [..., S], flattened from the environment's image, to features [..., F].

    ``cnn`` gets the pixels as [B, channels, height, width], divided by ``scale``.
    """

    def __init__(self, entry: ObservationPart, cnn: nn.Module, scale: float) -> None:
        super().__init__()
        self.entry, self.scale, self.cnn = entry, scale, cnn
        with torch.no_grad():
            self.out_features: int = cnn(torch.zeros(1, *entry.pixels)).shape[-1]

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute features of every image."""
        leading = pixels.shape[:-1]
        images = images_of(self.entry, pixels, self.scale)
        # With channels last, oneDNN's backward is a third faster; its forward is not.
        if torch.is_grad_enabled() and images.device.type == "cpu":
            images = images.contiguous(memory_format=torch.channels_last)
        return self.cnn(images).reshape(*leading, -1)

    def extra_repr(self) -> str:
        """Add the scale to the ``repr``, which is part of a compiled package's key."""
        return f"scale={self.scale:g}"


def images_of(entry: ObservationPart, pixels: Tensor, scale: float) -> Tensor:
    """Rearrange pixels [..., S] to images [B, channels, height, width]; divide by ``scale``."""
    images = pixels.float().reshape(-1, *entry.shape) / scale
    if entry.channels_last and entry.shape[-1] > 1:
        images = images.movedim(-1, -3).contiguous()
    return images.reshape(-1, *entry.pixels)


def nature(channels: int) -> nn.Module:
    """Make the CNN of Mnih et al. (2015, Methods); images must have at least 36 x 36 pixels."""
    return nn.Sequential(
        _conv(channels, 32, 8, 4), nn.ReLU(),
        _conv(32, 64, 4, 2), nn.ReLU(),
        _conv(64, 64, 3, 1), nn.ReLU(),
        nn.Flatten(),
    )  # fmt: skip


def impala(channels: int) -> nn.Module:
    """Make the CNN of Espeholt et al. (2018, fig. 3, right): blocks of 16, 32, 32 channels."""
    widths = (16, 32, 32)
    blocks = [
        layer
        for inputs, outputs in zip((channels, *widths), widths, strict=False)
        for layer in (
            _conv(inputs, outputs, 3, 1, 1),
            nn.MaxPool2d(3, 2, 1),
            Residual(outputs),
            Residual(outputs),
        )
    ]
    return nn.Sequential(*blocks, nn.ReLU(), nn.Flatten())


CNNS: dict[str, MakeCNN] = {"nature": nature, "impala": impala}


class Residual(nn.Module):
    """Residual block x + conv(relu(conv(relu(x))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.ReLU(), _conv(channels, channels, 3, 1, 1),
            nn.ReLU(), _conv(channels, channels, 3, 1, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block; the output has the shape of x."""
        return x + self.inner(x)


def _conv(inputs: int, outputs: int, kernel: int, stride: int, padding: int = 0) -> nn.Conv2d:
    """Make a convolution with orthogonal weights of gain sqrt(2), like the linear layers."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding)
    nn.init.orthogonal_(layer.weight, math.sqrt(2))
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
