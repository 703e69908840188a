"""PSPNet (Zhao et al. 2017): a dilated ResNet, pyramid pooling, and an auxiliary head for training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.adapters.torchvision import build
from bitplan.models.resnet import Bottleneck

CITYSCAPES_CLASSES = 19
CAMVID_CLASSES = 11
BINS = (1, 2, 3, 6)


class PyramidPooling(nn.Module):
    """The feature map beside its means over 1, 4, 9 and 36 regions."""

    def __init__(self, width: int, bins: tuple[int, ...] = BINS) -> None:
        super().__init__()
        part = width // len(bins)
        self.parts = nn.ModuleList(
            nn.Sequential(
                nn.AdaptiveAvgPool2d(size),
                nn.Conv2d(width, part, 1, bias=False),
                nn.BatchNorm2d(part),
                nn.ReLU(inplace=True),
            )
            for size in bins
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, 2C, H, W)."""
        means = [F.interpolate(part(x), x.shape[2:], mode="bilinear", align_corners=False) for part in self.parts]
        return torch.cat([x, *means], dim=1)


class PSPNet(nn.Module):
    """Semantic segmentation; in training it returns the scores and those of the auxiliary head."""

    def __init__(self, backbone: nn.Module, classes: int = CITYSCAPES_CLASSES, width: int = 2048) -> None:
        super().__init__()
        self.backbone = backbone
        self.pyramid = PyramidPooling(width)
        self.head = _head(2 * width, width // 4, classes)
        self.auxiliary = _head(width // 2, width // 8, classes)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """(B, 3, H, W) → (B, classes, H, W)."""
        size = x.shape[2:]
        body: Any = self.backbone
        x = body.maxpool(body.relu(body.bn1(body.conv1(x))))
        middle = body.layer3(body.layer2(body.layer1(x)))
        scores = _resize(self.head(self.pyramid(body.layer4(middle))), size)
        return (scores, _resize(self.auxiliary(middle), size)) if self.training else scores


class SmallBody(nn.Module):
    """Seven bottlenecks of 64 to 256 channels, output stride 8; the last two stages are dilated instead of smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, 2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = nn.Sequential(Bottleneck(32, 32, 64))
        self.layer2 = nn.Sequential(Bottleneck(64, 64, 128, stride=2), Bottleneck(128, 64, 128))
        self.layer3 = nn.Sequential(*(Bottleneck(128, 128, 128, dilation=2) for _ in range(2)))
        self.layer4 = nn.Sequential(*(Bottleneck(width, 128, 256, dilation=4) for width in (128, 256)))


def _head(width_in: int, width: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width_in, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Dropout2d(0.1),
        nn.Conv2d(width, classes, 1),
    )


def _resize(x: Tensor, size: torch.Size) -> Tensor:
    return F.interpolate(x, size, mode="bilinear", align_corners=False)


def _on(backbone: str) -> tuple[nn.Module, Tensor]:
    body = build(backbone, replace_stride_with_dilation=[False, True, True])
    del body.fc, body.avgpool
    return PSPNet(body), torch.empty(1, 3, 769, 769, device="meta")


def pspnet50() -> tuple[nn.Module, Tensor]:
    """On ResNet-50, output stride 8; 49 million parameters."""
    return _on("resnet50")


def pspnet101() -> tuple[nn.Module, Tensor]:
    """On ResNet-101, output stride 8; 68 million parameters."""
    return _on("resnet101")


def pspnet_small() -> tuple[nn.Module, Tensor]:
    """For CamVid's 11 classes at 240×180 on a CPU; 1.3 million parameters."""
    return PSPNet(SmallBody(), CAMVID_CLASSES, width=256), torch.empty(1, 3, 180, 240, device="meta")
