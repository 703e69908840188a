"""Three networks for 8×8 digits, small enough for a demonstration and with the structure of large ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.models.resnet import Bottleneck

CLASSES = 10


class DigitsResNet(nn.Module):
    """A convolution, five bottlenecks of 64 to 160 channels, a classifier: 20 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        self.blocks = nn.Sequential(
            Bottleneck(32, 32, 64),
            Bottleneck(64, 64, 128, stride=2),
            Bottleneck(128, 128, 128, groups=4),
            Bottleneck(128, 128, 160, stride=2, groups=4),
            Bottleneck(160, 128, 160, groups=4),
        )
        self.linear = nn.Linear(160, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, 8, 8) → (B, classes)."""
        x = self.blocks(F.relu(self.bn1(self.conv1(x))))
        return self.linear(x.mean((2, 3)))


class Attention(nn.Module):
    """Self-attention with separate query, key and value layers, which are linked."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) → (B, T, width)."""
        split = (self.heads, x.shape[2] // self.heads)
        query, key, value = (f(x).unflatten(2, split).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value)  # (B, heads, T, width / heads)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """Attention, then two linear layers, each normalized before and added to its input."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) → (B, T, width)."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class DigitsTransformer(nn.Module):
    """The eight rows as tokens, two encoders of width 128, the mean over tokens, a classifier."""

    def __init__(self, width: int = 128, heads: int = 4, inner: int = 256) -> None:
        super().__init__()
        self.rows = nn.Linear(8, width)
        self.places = nn.Parameter(torch.randn(1, 8, width) * 0.5)  # as large as what is added to them
        self.encoders = nn.Sequential(*(Encoder(width, heads, inner) for _ in range(2)))
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, 8, 8) → (B, classes)."""
        tokens = self.rows(x.squeeze(1)) + self.places  # (B, 8, width)
        return self.linear(self.norm(self.encoders(tokens)).mean(1))


class DigitsNecks(nn.Module):
    """Linear layers in a row that leave many numbers and few in turn, the few without a ReLU behind them; 12 layers.

    The fewer numbers, the more a coarse grid loses of them; how wide the others are is not in their order, so that what
    a layer costs says little of what it needs.
    """

    wide = (96, 256, 384, 128, 320, 128)
    few = (32, 8, 24, 12, 16)

    def __init__(self) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        before = 64
        for many, neck in zip(self.wide[:-1], self.few, strict=True):
            parts += [nn.Linear(before, many, bias=False), nn.BatchNorm1d(many), nn.ReLU()]
            parts += [nn.Linear(many, neck, bias=False), nn.BatchNorm1d(neck)]
            before = neck
        last = self.wide[-1]
        self.layers = nn.Sequential(*parts, nn.Linear(before, last, bias=False), nn.BatchNorm1d(last), nn.ReLU())
        self.linear = nn.Linear(last, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, 8, 8) → (B, classes)."""
        return self.linear(self.layers(x.flatten(1)))


def digits_resnet() -> tuple[nn.Module, Tensor]:
    """0.32 million parameters."""
    return DigitsResNet(), example()


def digits_transformer() -> tuple[nn.Module, Tensor]:
    """0.27 million parameters."""
    return DigitsTransformer(), example()


def digits_necks() -> tuple[nn.Module, Tensor]:
    """0.05 million parameters."""
    return DigitsNecks(), example()


def example() -> Tensor:
    """One image."""
    return torch.empty(1, 1, 8, 8, device="meta")
