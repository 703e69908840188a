"""The residual block that bitplan's own small networks are made of."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


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
