"""torch's recurrent layers and cells: they hand weights to functions, which are opened (`quant/recurrence.py`)."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from bitplan.quant.layers import LayerType


@final
class Recurrent(LayerType):
    """nn.LSTM, nn.GRU, nn.RNN and their cells: weight_ih (gates · hidden, in), weight_hh, and an LSTM's projection."""

    modules = (nn.RNNBase, nn.RNNCellBase)
    weights = "weight_*"
    kind = "recurrent layer"

    def example(self) -> tuple[nn.Module, Tensor]:
        """Three steps in both directions, two layers."""
        return _BothWays(), torch.randn(2, 3, 6)


class _BothWays(nn.Module):
    """An LSTM whose answer is one tensor, for the contract tests."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, features) → (B, T, 2 · hidden)."""
        hidden: Tensor = self.lstm(x)[0]
        return hidden
