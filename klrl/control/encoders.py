"""Encoders of an observation's entries: one per key, their outputs concatenated.

A single vector goes to the trunk unchanged. With several entries, a vector passes an MLP of one
layer, an image a CNN, an index an embedding whose rows are summed. Only the policy's logits read
the mask (:class:`klrl.control.networks.PolicyNet`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from klrl.control.networks import ACTIVATIONS, orthogonal
from klrl.control.observation import Layout, ObservationPart

#: Number of channels -> a CNN: pixels [B, channels, height, width] -> features [B, F].
MakeCNN = Callable[[int], nn.Module]


class Encoders(nn.Module):
    """Packed observations (transports) [..., D] -> features [..., F].

    Each of several entries gives ``width`` features; ``cnn`` is a name in :data:`CNNS`.
    """

    def __init__(
        self, layout: Layout, width: int, activation: str, cnn: str | None, scale: float
    ) -> None:
        super().__init__()
        self.layout, self.in_features = layout, layout.size
        read = [entry for entry in layout.entries if entry.kind != "mask"]
        several = len(read) > 1
        self.encoders = nn.ModuleDict()
        self.out_features = 0
        for place, entry in enumerate(read):
            # Keys of an environment may contain dots, names of modules may not.
            encoder, features = _encoder(entry, width if several else None, activation, cnn, scale)
            self.encoders[str(place)] = encoder
            self.out_features += features

    def forward(self, observation: Tensor) -> Tensor:
        """Encode transports; the caller has normalised their vector entries."""
        parts = [observation[..., place] for _, place in self.layout.places()]
        read = zip(self.encoders.values(), parts, strict=False)  # leaves out the mask, the last
        return torch.cat([encoder(part) for encoder, part in read], -1)

    def extra_repr(self) -> str:
        """The entries: part of a compiled step's key, so different ones must print differently."""
        return self.layout.line


class Mixed(nn.Sequential):
    """A trunk that computes in bfloat16; weights, inputs and outputs are float32.

    On a CPU without bfloat16 instructions it computes in float32.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self._on_cpu = cpu_has_bfloat16()

    def forward(self, observation: Tensor) -> Tensor:
        """Features of every observation, float32."""
        kind = observation.device.type
        with torch.autocast(kind, torch.bfloat16, kind != "cpu" or self._on_cpu):
            return super().forward(observation).float()


def cpu_has_bfloat16() -> bool:
    """Whether the processor multiplies in bfloat16: AVX-512, AMX or ARM's."""
    found = torch.cpu.get_capabilities()
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _encoder(
    entry: ObservationPart, width: int | None, activation: str, cnn: str | None, scale: float
) -> tuple[nn.Module, int]:
    """The encoder of an entry, and its number of outputs; ``width`` is None for a single entry."""
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
    images = Images(entry, stack, scale)
    if width is None:
        return images, images.out_features
    linear = orthogonal(nn.Linear(images.out_features, width), math.sqrt(2))
    return nn.Sequential(images, linear, ACTIVATIONS[activation]()), width


#: Width of the embedding of an observation that is a single index.
_EMBEDDING = 64


class _Numbers(nn.Module):
    """Convert bytes and integers [..., D] to float32; floats are unchanged."""

    def forward(self, numbers: Tensor) -> Tensor:
        return numbers if numbers.is_floating_point() else numbers.float()


class Embedding(nn.Module):
    """Integers [..., M], number i in 0 .. K_i - 1, as the sum of their embeddings [..., F].

    Equal to a linear layer on the one-hot numbers, but does not multiply by their zeros.
    """

    offsets: Tensor

    def __init__(self, counts: tuple[int, ...], width: int) -> None:
        super().__init__()
        starts = torch.tensor([0, *counts[:-1]]).cumsum(0)
        self.register_buffer("offsets", starts, persistent=False)
        self.rows = nn.Embedding(sum(counts), width)
        # The sum of M normal rows then has variance 1.
        nn.init.normal_(self.rows.weight, std=1 / math.sqrt(len(counts)))

    def forward(self, numbers: Tensor) -> Tensor:
        """The sum of the rows."""
        return self.rows(numbers.long() + self.offsets).sum(-2)


class Images(nn.Module):
    """Pixels [..., S], laid out as in the environment -> features [..., F].

    ``cnn`` takes [B, channels, height, width], divided by ``scale``.
    """

    def __init__(self, entry: ObservationPart, cnn: nn.Module, scale: float) -> None:
        super().__init__()
        self.entry, self.scale, self.cnn = entry, scale, cnn
        with torch.no_grad():
            self.out_features: int = cnn(torch.zeros(1, *entry.pixels)).shape[-1]

    def forward(self, pixels: Tensor) -> Tensor:
        """Features of every image."""
        leading = pixels.shape[:-1]
        images = images_of(self.entry, pixels, self.scale)
        # In this layout oneDNN's backward is a third faster; its forward is not.
        if torch.is_grad_enabled() and images.device.type == "cpu":
            images = images.contiguous(memory_format=torch.channels_last)
        return self.cnn(images).reshape(*leading, -1)

    def extra_repr(self) -> str:
        """The scale: part of a compiled step's key, so different ones must print differently."""
        return f"scale={self.scale:g}"


def images_of(entry: ObservationPart, pixels: Tensor, scale: float) -> Tensor:
    """Rearrange the environment's pixels [..., S] to images [B, channels, height, width]."""
    images = pixels.float().reshape(-1, *entry.shape) / scale
    if entry.channels_last:
        images = images.movedim(-1, -3).contiguous()
    return images.reshape(-1, *entry.pixels)


def nature(channels: int) -> nn.Module:
    """The CNN of Mnih et al. (2015), methods; images must have at least 36 x 36 pixels."""
    return nn.Sequential(
        _conv(channels, 32, 8, 4), nn.ReLU(),
        _conv(32, 64, 4, 2), nn.ReLU(),
        _conv(64, 64, 3, 1), nn.ReLU(),
        nn.Flatten(),
    )  # fmt: skip


def impala(channels: int) -> nn.Module:
    """The CNN of Espeholt et al. (2018), figure 3, right: three blocks of 16, 32, 32 channels."""
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
        """The same shape."""
        return x + self.inner(x)


def _conv(inputs: int, outputs: int, kernel: int, stride: int, padding: int = 0) -> nn.Conv2d:
    """A convolution, orthogonal with gain sqrt(2) like the linear layers."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding)
    nn.init.orthogonal_(layer.weight, math.sqrt(2))
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


# -------------------------------------------------------------------------- the user's networks

#: Shape of an input of the user's network, without B.
Size = int | tuple[int, int, int]
#: Input of the user's network: the tensor of a single entry, or key -> tensor.
Given = Tensor | Mapping[str, Tensor]

#: The largest value of a byte; the user's networks get pixels from 0 to 1.
_BRIGHTEST = 255.0


class Unpacked(nn.Module):
    """Transports [..., D] -> outputs [..., F] of the user's network, which reads the entries."""

    def __init__(self, layout: Layout, network: nn.Module) -> None:
        super().__init__()
        self.layout, self.network = layout, network

    def forward(self, transports: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The network's outputs for every transport."""
        leading = transports.shape[:-1]
        out = self.network(given(self.layout, transports.reshape(-1, transports.shape[-1])))
        if isinstance(out, tuple):
            return tuple(each.reshape(*leading, -1) for each in out)
        return out.reshape(*leading, -1)

    def extra_repr(self) -> str:
        """The entries: part of a compiled step's key, so different ones must print differently."""
        return self.layout.line


def given(layout: Layout, transports: Tensor) -> Given:
    """Split transports [B, D], whose vectors are normalised, into inputs of the user's network.

    Images [B, channels, height, width] from 0 to 1, vectors [B, S], numbers one-hot [B, K]; without
    the mask, which klrl reads.
    """
    parts = {
        entry.key: _given(entry, transports[:, place])
        for entry, place in layout.places()
        if entry.kind != "mask"
    }
    return parts if len(parts) > 1 else next(iter(parts.values()))


def _given(entry: ObservationPart, part: Tensor) -> Tensor:
    if entry.kind == "image":
        return images_of(entry, part, _BRIGHTEST)
    if entry.kind == "index":
        numbers = zip(part.long().unbind(-1), entry.counts, strict=True)
        return torch.cat([F.one_hot(number, count) for number, count in numbers], -1).float()
    return part.float()


def given_sizes(layout: Layout) -> Size | dict[str, Size]:
    """Shapes of :func:`given` without B: S or K, for images (channels, height, width)."""
    sizes: dict[str, Size] = {
        entry.key: entry.pixels if entry.kind == "image" else sum(entry.counts) or entry.size
        for entry in layout.entries
        if entry.kind != "mask"
    }
    return sizes if len(sizes) > 1 else next(iter(sizes.values()))
