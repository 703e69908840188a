"""Two networks for 8×8 digits, small enough for a demonstration and with the structure of large ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions (Xie et al. 2017); the shortcut, where the shape changes, is a 1×1 convolution.

    Then `conv1` and `shortcut` read the same tensor, so they are linked.
    """

    def __init__(self, width_in: int, middle: int, width: int, *, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            project = nn.Conv2d(width_in, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, width, H/stride, W/stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


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


def digits_resnet() -> tuple[nn.Module, Tensor]:
    """0.32 million parameters."""
    return DigitsResNet(), example()


def digits_transformer() -> tuple[nn.Module, Tensor]:
    """0.27 million parameters."""
    return DigitsTransformer(), example()


def example() -> Tensor:
    """One image."""
    return torch.empty(1, 1, 8, 8, device="meta")
