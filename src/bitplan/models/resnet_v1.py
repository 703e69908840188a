"""ResNets for ImageNet as first published (He et al. 2016, "v1"): the stride is in the first 1×1 of a bottleneck.

torchvision's have it in the 3×3 ("v1.5"), which is 6 % more to compute in ResNet-50; many published costs are v1's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bitplan.adapters.torchvision import build


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
