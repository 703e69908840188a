"""Linear layers: torch's own, and the one of transformers' GPT-2, whose weight lies the other way round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitplan.quant.grids import on_grid
from bitplan.quant.kernels import Kernel, LinearKernel, Operands
from bitplan.quant.layers import Adopted, LayerType, original
from bitplan.quant.recompute import call_without_saving


class LinearLayer(Adopted):
    """x (…, in) → (…, out)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply F.linear to what was quantized."""
        layer: Any = self
        quantized = layer.input_quantizer(x)
        bias = on_grid(layer.bias, layer.input_quantizer, layer.weight_quantizer)
        out: Tensor = call_without_saving(F.linear, quantized, layer.weight_quantizer(layer.weight), bias)
        return out


@final
class Linear(LayerType):
    """nn.Linear, weight (out, in)."""

    modules = (nn.Linear,)
    quantized = LinearLayer
    rounds_bias = True
    kind = "linear"

    def integer(self, module: nn.Module, operands: Operands) -> Kernel | str:
        """Its codes as they are."""
        return LinearKernel.of(operands)

    def example(self) -> tuple[nn.Module, Tensor]:
        """Two tokens of six features."""
        return nn.Linear(6, 5), torch.randn(2, 3, 6)


class TransformersConv1DLayer(Adopted):
    """x (…, in) → (…, out)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply addmm to what was quantized."""
        layer: Any = self
        quantized = layer.input_quantizer(x)
        weight = layer.weight_quantizer(layer.weight)
        bias: Any = on_grid(layer.bias, layer.input_quantizer, layer.weight_quantizer)
        flat: Tensor = call_without_saving(torch.addmm, bias, quantized.reshape(-1, quantized.shape[-1]), weight)
        return flat.view(*x.shape[:-1], weight.shape[1])


@final
class TransformersConv1D(LayerType):
    """transformers' Conv1D, a linear layer whose weight is (in, out)."""

    quantized = TransformersConv1DLayer
    layout = "in_out"
    rounds_bias = True
    kind = "(in, out) matrix"

    def recognizes(self, module: nn.Module) -> bool:
        """Recognize it by name and layout, so that transformers need not be imported."""
        names = {base.__name__ for base in original(module).__mro__}
        if "Conv1D" not in names:
            return False
        weight, width = getattr(module, "weight", None), getattr(module, "nf", None)
        return isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == width

    def integer(self, module: nn.Module, operands: Operands) -> Kernel | str:
        """Its codes as (out, in)."""
        return LinearKernel.of(replace(operands, codes=operands.codes.t().contiguous()))

    def example(self) -> tuple[nn.Module, Tensor]:
        """One that is built as transformers builds it."""
        return Conv1D(5, 6), torch.randn(2, 3, 6)


class Conv1D(nn.Module):
    """The parts of transformers' Conv1D, for the contract tests."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """x (…, in) → (…, out)."""
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)
