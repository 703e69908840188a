"""The CIFAR-10 ResNets of He et al. 2016, section 4.2, with parameter-free (option A) shortcuts.

Module names are those of the public weights by akamaster/pytorch_resnet_cifar10.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.adapters.torchvision import build


class PadShortcut(nn.Module):
    """Option A: every second pixel, new channels filled with zeros."""

    def __init__(self, added: int) -> None:
        super().__init__()
        self.added = added

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, C + added, H/2, W/2)."""
        half = self.added // 2
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, half, self.added - half))


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Identity() if stride == 1 else PadShortcut(width - width_in)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, width, H/stride, W/stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class CifarResNet(nn.Module):
    """6n + 2 layers: a convolution, three stages of n blocks (16, 32, 64 channels), a classifier."""

    def __init__(self, blocks: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, 1)
        self.layer2 = _stage(16, 32, blocks, 2)
        self.layer3 = _stage(32, 64, blocks, 2)
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 32, 32) → (B, classes)."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def _stage(width_in: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    first = Block(width_in, width, stride)
    return nn.Sequential(first, *(Block(width, width, 1) for _ in range(blocks - 1)))


def _with_example(blocks: int) -> tuple[nn.Module, Tensor]:
    return CifarResNet(blocks), torch.empty(1, 3, 32, 32, device="meta")


def resnet20() -> tuple[nn.Module, Tensor]:
    """0.27 million parameters."""
    return _with_example(3)


def resnet32() -> tuple[nn.Module, Tensor]:
    """0.46 million parameters."""
    return _with_example(5)


def resnet44() -> tuple[nn.Module, Tensor]:
    """0.66 million parameters."""
    return _with_example(7)


def resnet56() -> tuple[nn.Module, Tensor]:
    """0.85 million parameters."""
    return _with_example(9)


def resnet50_v1() -> tuple[nn.Module, Tensor]:
    """25.6 million parameters, 3.858 billion MACs at 224×224; weights of torchvision's fit, but are of v1.5."""
    return _v1("resnet50")


def resnet101_v1() -> tuple[nn.Module, Tensor]:
    """44.5 million parameters, 7.570 billion MACs at 224×224."""
    return _v1("resnet101")


def _v1(name: str) -> tuple[nn.Module, Tensor]:
    model = build(name)
    for block in model.modules():
        first, second = getattr(block, "conv1", None), getattr(block, "conv2", None)
        if isinstance(first, nn.Conv2d) and isinstance(second, nn.Conv2d) and hasattr(block, "conv3"):
            first.stride, second.stride = second.stride, first.stride
    return model, torch.empty(1, 3, 224, 224, device="meta")


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions (Xie et al. 2017); the shortcut, where the shape changes, is a 1×1 convolution.

    Then `conv1` and `shortcut` read the same tensor, so they are linked.
    """

    def __init__(
        self, width_in: int, middle: int, width: int, *, stride: int = 1, groups: int = 1, dilation: int = 1
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, dilation, dilation, groups, bias=False)
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
