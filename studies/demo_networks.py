"""Networks for 8×8 digits that were candidates for the demonstration, and are in no zoo."""

from __future__ import annotations

import itertools

from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.models.digits import CLASSES, DigitsNecks, example
from bitplan.models.digits import digits_necks as necks

__all__ = ["costly_necks", "hourglass", "mobile", "narrow_necks", "necks", "plain"]


class Inverted(nn.Module):
    """A block of MobileNetV2: 1×1 to more channels, 3×3 per channel, 1×1 to few; added to its input where it can be."""

    def __init__(self, width_in: int, middle: int, width: int, stride: int) -> None:
        super().__init__()
        self.expand = nn.Conv2d(width_in, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.depthwise = nn.Conv2d(middle, middle, 3, stride, 1, groups=middle, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.project = nn.Conv2d(middle, width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.adds = stride == 1 and width_in == width

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, width, H/stride, W/stride)."""
        y = F.relu6(self.bn1(self.expand(x)))
        y = F.relu6(self.bn2(self.depthwise(y)))
        y = self.bn3(self.project(y))
        return x + y if self.adds else y


class Mobile(nn.Module):
    """A MobileNetV2 for digits: a convolution, five inverted blocks, a 1×1 convolution, a classifier; 18 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(
            Inverted(16, 64, 16, 1),
            Inverted(16, 64, 24, 2),
            Inverted(24, 96, 24, 1),
            Inverted(24, 96, 40, 2),
            Inverted(40, 160, 40, 1),
        )
        self.conv2 = nn.Conv2d(40, 160, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(160)
        self.linear = nn.Linear(160, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, 8, 8) → (B, classes)."""
        x = self.blocks(F.relu6(self.bn1(self.conv1(x))))
        return self.linear(F.relu6(self.bn2(self.conv2(x))).mean((2, 3)))


class Plain(nn.Module):
    """Convolutions in a row, wide and narrow in turn, without shortcuts; 14 layers."""

    widths = (16, 48, 12, 48, 12, 64, 16, 64, 16, 96, 24, 96, 24)
    strides = (1, 1, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1)

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width_in = 1
        for width, stride in zip(self.widths, self.strides, strict=True):
            kernel = 3 if width > width_in else 1
            layers += [
                nn.Conv2d(width_in, width, kernel, stride, kernel // 2, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            width_in = width
        self.layers = nn.Sequential(*layers)
        self.linear = nn.Linear(width_in, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, 8, 8) → (B, classes)."""
        return self.linear(self.layers(x).mean((2, 3)))


class Hourglass(nn.Module):
    """Linear layers in a row, of which every second one leaves few numbers, from 6 to 32: 14 layers.

    The layers behind are alike in cost; what they read carries more or less that a coarse grid can lose.
    """

    def __init__(self, wide: int = 128, narrow: tuple[int, ...] = (32, 8, 24, 6, 16, 12)) -> None:
        super().__init__()
        widths = [64]
        for few in narrow:
            widths += [wide, few]
        pairs = itertools.pairwise(widths)
        layers = [part for a, b in pairs for part in (nn.Linear(a, b, bias=False), nn.BatchNorm1d(b), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], wide, bias=False), nn.BatchNorm1d(wide), nn.ReLU())
        self.linear = nn.Linear(wide, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, 8, 8) → (B, classes)."""
        return self.linear(self.layers(x.flatten(1)))


class NarrowNecks(DigitsNecks):
    """`DigitsNecks` with fewer numbers in every neck."""

    few = (20, 6, 14, 8, 10)


class CostlyNecks(DigitsNecks):
    """`DigitsNecks` with the narrowest places between the widest ones, so that what they need is not cheap."""

    wide = (96, 448, 448, 128, 384, 384)
    few = (32, 8, 32, 24, 8)


def costly_necks() -> tuple[nn.Module, Tensor]:
    """0.06 million parameters."""
    return CostlyNecks(), example()


def narrow_necks() -> tuple[nn.Module, Tensor]:
    """0.03 million parameters."""
    return NarrowNecks(), example()


def hourglass() -> tuple[nn.Module, Tensor]:
    """0.03 million parameters."""
    return Hourglass(), example()


def mobile() -> tuple[nn.Module, Tensor]:
    """0.05 million parameters."""
    return Mobile(), example()


def plain() -> tuple[nn.Module, Tensor]:
    """0.09 million parameters."""
    return Plain(), example()
