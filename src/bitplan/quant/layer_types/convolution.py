"""Convolutions and transposed convolutions in one, two and three dimensions; padding, groups and stride are theirs."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitplan.quant.data_step import convolved
from bitplan.quant.grids import on_grid
from bitplan.quant.kernels import ConvolutionKernel, Kernel, Operands
from bitplan.quant.layers import Adopted, Channels, LayerType
from bitplan.quant.recompute import call_without_saving


class ConvLayer(Adopted):
    """x (B, in, …) → (B, out, …), with the base's own padding."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the base's convolution to what was quantized."""
        layer: Any = self
        weight = layer.weight_quantizer(layer.weight)
        bias = on_grid(layer.bias, layer.input_quantizer, layer.weight_quantizer)
        return convolved(layer._conv_forward, layer.input_quantizer, x, weight, bias)


@final
class Convolution(LayerType):
    """nn.Conv1d, nn.Conv2d and nn.Conv3d, weight (out, in / groups, …)."""

    modules = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    quantized = ConvLayer
    rounds_bias = True
    kind = "convolution"

    def integer(self, module: nn.Module, operands: Operands) -> Kernel | str:
        """A kernel that pads with zeros, as many on both sides; other padding is done before it."""
        layer: Any = module
        by_itself = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        return ConvolutionKernel.of(
            operands,
            stride=layer.stride,
            padding=layer.padding if by_itself else (0,) * len(layer.stride),
            dilation=layer.dilation,
            groups=layer.groups,
            pad=() if by_itself else tuple(layer._reversed_padding_repeated_twice),
            mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode,
        )

    def example(self) -> tuple[nn.Module, Tensor]:
        """One in two dimensions, with groups."""
        return nn.Conv2d(4, 6, 3, padding=1, groups=2), torch.randn(2, 4, 5, 5)


class ConvTransposeLayer(Adopted):
    """x (B, in, …) → (B, out, …)."""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Apply the transposed convolution to what was quantized."""
        layer: Any = self
        spatial = len(layer.kernel_size)
        padding = layer._output_padding(
            x, output_size, layer.stride, layer.padding, layer.kernel_size, spatial, layer.dilation
        )
        convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[spatial - 1]
        quantized = layer.input_quantizer(x)
        out: Tensor = call_without_saving(
            convolve,
            quantized,
            layer.weight_quantizer(layer.weight),
            on_grid(layer.bias, layer.input_quantizer, layer.weight_quantizer),
            layer.stride,
            layer.padding,
            padding,
            layer.groups,
            layer.dilation,
        )
        return out


@final
class TransposedConvolution(LayerType):
    """nn.ConvTranspose1d, nn.ConvTranspose2d and nn.ConvTranspose3d, weight (in, out / groups, …)."""

    modules = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    quantized = ConvTransposeLayer
    layout = "in_out"
    rounds_bias = True
    kind = "convolution"

    def channels(self, module: nn.Module) -> Channels:
        """Axis 1; with groups, of the weight as (groups, in / groups, out / groups, …) axes 0 and 2."""
        groups: Any = module.groups
        return Channels((1,)) if groups == 1 else Channels((0, 2), groups)

    def example(self) -> tuple[nn.Module, Tensor]:
        """One in two dimensions, with groups."""
        return nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), torch.randn(2, 4, 5, 5)
