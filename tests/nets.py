"""Small networks that several folders of tests build; pytest finds this file because a conftest stands beside it."""

import pytest
import torch
from torch import nn

from bitplan.quant.layers import Adopted, LayerType


class Net(nn.Module):
    """A network of the given parts, whose forward pass is the given function."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, *inputs, **named):
        return self._forward(self, *inputs, **named)


class Bomb:
    """What a pickle must never be read as."""

    def __reduce__(self):
        return exec, ("raise SystemExit('the bomb went off')",)


def two_convolutions(*more):
    """(B, 2, H, W) → (B, 2, H − 4, W − 4): layers 0 and 3, with a norm between them; then what is given."""
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), *more)


def classifier(channels, widths=(8, 8), classes=2, *, norm=True, dropout=0.0):
    """(B, channels, H, W) → (B, classes): convolutions 0 and 3, with a norm between them, and a head, which is 8."""
    return nn.Sequential(
        nn.Conv2d(channels, widths[0], 3, padding=1),
        nn.BatchNorm2d(widths[0]) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Conv2d(*widths, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(4 * widths[1], classes),
    )


class Gated(nn.Module):
    """A layer with a forward of its own; its weight lies (in, out)."""

    def __init__(self, inputs=6, outputs=4):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.gate = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return (x @ self.weight) * self.gate.sigmoid()


class QuantizedGated(Adopted):
    """Its counterpart."""

    def forward(self, x):
        return (self.input_quantizer(x) @ self.weight_quantizer(self.weight)) * self.gate.sigmoid()


class GatedType(LayerType):
    """A product (in, out) behind a gate; tests register it."""

    modules = (Gated,)
    quantized = QuantizedGated
    layout = "in_out"
    kind = "linear"

    def example(self):
        return Gated(), torch.randn(5, 6)


def dynamo(test):
    """The compiler uses what torch deprecates, and looks at .grad where a graph breaks."""
    for warning in (":DeprecationWarning", "The .grad attribute:UserWarning"):
        test = pytest.mark.filterwarnings(f"ignore:{warning}")(test)
    return test


class Folded(nn.Module):
    """Two weights in one module, neither of them called weight: what a recurrent layer has more of."""

    def __init__(self, width):
        super().__init__()
        self.up_weight, self.down = nn.Parameter(torch.randn(16, width)), nn.Parameter(torch.randn(width, 16))

    def forward(self, x):
        return (x @ self.up_weight.T).relu() @ self.down.T


class QuantizedFolded(Adopted):
    def forward(self, x):
        up, down = self.call_quantizers["up"], self.call_quantizers["down"]
        hidden = (up.input_quantizer(x) @ up.weight_quantizer(self.up_weight).T).relu()
        return down.input_quantizer(hidden) @ down.weight_quantizer(self.down).T


class FoldedType(LayerType):
    """Two products."""

    modules = (Folded,)
    quantized = QuantizedFolded
    weights = "[ud]*"

    def example(self) -> tuple[nn.Module, torch.Tensor]:
        return Folded(4), torch.randn(2, 4)
