"""torch's attention: it hands its weights to functions, whose calls are quantized as they come (`quant/calls.py`)."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from bitplan.quant.layers import LayerType


@final
class TorchAttention(LayerType):
    """nn.MultiheadAttention, whose packed projection is (3 · features, features)."""

    modules = (nn.MultiheadAttention,)
    weights = "in_proj_weight"
    hands_out = ("out_proj",)
    kind = "parameter"

    def example(self) -> tuple[nn.Module, Tensor]:
        """Self-attention of three tokens, two heads."""
        return _SelfAttention(), torch.randn(2, 3, 8)


class _SelfAttention(nn.Module):
    """Attention that can be called with one tensor, for the contract tests."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, tokens, features) → the same shape."""
        attended: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return attended
