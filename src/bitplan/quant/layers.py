"""Layers that quantize their input and their weight, then do what they always did.

A layer keeps its object, its parameters and its names: `adopt_` only changes its class to a subclass of the
one it had, so `isinstance`, hooks, ties and state dictionaries hold. Bias, groups, dilation, stride and
padding modes are the base's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitplan.quant.quantizers import WeightQuantizer

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}


class Adopted(nn.Module):
    """What a module's class is changed to for quantization; the original class is its second base."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        mixin, base = type(self).__bases__
        return _revive, (mixin, base), self.__dict__


class LinearLayer(Adopted):
    """x (…, in) → (…, out)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply F.linear to what was quantized."""
        layer: Any = self
        return F.linear(layer.input_quantizer(x), layer.weight_quantizer(layer.weight), layer.bias)


class ConvLayer(Adopted):
    """x (B, in, …) → (B, out, …), with the base's own padding."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the base's convolution to what was quantized."""
        layer: Any = self
        weight = layer.weight_quantizer(layer.weight)
        out: Tensor = layer._conv_forward(layer.input_quantizer(x), weight, layer.bias)
        return out


class ConvTransposeLayer(Adopted):
    """x (B, in, …) → (B, out, …); weight (in, out / groups, …)."""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Apply the transposed convolution to what was quantized."""
        layer: Any = self
        spatial = len(layer.kernel_size)
        padding = layer._output_padding(
            x, output_size, layer.stride, layer.padding, layer.kernel_size, spatial, layer.dilation
        )
        convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[spatial - 1]
        return convolve(
            layer.input_quantizer(x),
            layer.weight_quantizer(layer.weight),
            layer.bias,
            layer.stride,
            layer.padding,
            padding,
            layer.groups,
            layer.dilation,
        )


class TransformerConv1DLayer(Adopted):
    """transformers' Conv1D, a linear layer whose weight is (in, out)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply addmm to what was quantized."""
        layer: Any = self
        quantized = layer.input_quantizer(x)
        weight = layer.weight_quantizer(layer.weight)
        flat = torch.addmm(layer.bias, quantized.reshape(-1, quantized.shape[-1]), weight)
        return flat.view(*x.shape[:-1], weight.shape[1])


class EmbeddingLayer(Adopted):
    """indices → rows; only the rows looked up are quantized, which gives the same rows and gradients."""

    def forward(self, indices: Tensor) -> Tensor:
        """Look up, then quantize."""
        layer: Any = self
        rows = F.embedding(
            indices,
            layer.weight,
            layer.padding_idx,
            layer.max_norm,
            layer.norm_type,
            layer.scale_grad_by_freq,
            layer.sparse,
        )
        quantizer = layer.weight_quantizer
        if not isinstance(quantizer, WeightQuantizer):
            return rows
        steps = quantizer.step[indices] if quantizer.step.numel() > 1 else quantizer.step
        out: Tensor = quantizer(rows, numel=layer.weight.numel(), step=steps)
        return out


def family(module: nn.Module) -> type[Adopted] | None:
    """The quantized counterpart of a module, or None where a forward of its own must run."""
    runs = original(module).forward
    if runs is nn.Linear.forward:
        return LinearLayer
    if any(runs is kind.forward for kind in _CONVOLUTIONS):
        return ConvLayer
    if any(runs is kind.forward for kind in _TRANSPOSED):
        return ConvTransposeLayer
    if runs is nn.Embedding.forward:
        return EmbeddingLayer
    return TransformerConv1DLayer if _is_transformers_conv1d(module) else None


def original(module: nn.Module) -> type[nn.Module]:
    """The class a module had before it was adopted."""
    return type(module).__bases__[1] if isinstance(module, Adopted) else type(module)


def channel_axes(module: nn.Module, weight: Tensor) -> tuple[int, ...] | None:
    """The axes of a weight that number output channels, or None where only one step for all is defined.

    A transposed convolution with groups answers for its weight as (groups, in / groups, out / groups, …). An
    embedding has one step per row.
    """
    if isinstance(module, tuple(_TRANSPOSED)):
        return (1,) if module.groups == 1 else (0, 2)
    if _is_transformers_conv1d(module):
        return (1,)
    known = (nn.Linear, nn.Embedding, nn.MultiheadAttention, *_CONVOLUTIONS)
    return (0,) if isinstance(module, known) and weight.dim() > 1 else None


def adopt_(module: nn.Module, mixin: type[Adopted]) -> None:
    """Make a module behave as `mixin` on top of the class it had."""
    module.__class__ = _merged(mixin, type(module))  # type: ignore[arg-type]


def release_(module: nn.Module) -> None:
    """Give a module back the class it had."""
    module.__class__ = original(module)


def _is_transformers_conv1d(module: nn.Module) -> bool:
    """Recognize it by name and layout, so that transformers need not be imported."""
    names = {kind.__name__ for kind in original(module).__mro__}
    weight, width = getattr(module, "weight", None), getattr(module, "nf", None)
    return "Conv1D" in names and isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == width


@cache
def _merged(mixin: type[Adopted], base: type[nn.Module]) -> type[nn.Module]:
    return type(f"Quantized{base.__name__}", (mixin, base), {"__module__": __name__, "__doc__": mixin.__doc__})


def _revive(mixin: type[Adopted], base: type[nn.Module]) -> nn.Module:
    kind = _merged(mixin, base)  # type: ignore[arg-type]
    return kind.__new__(kind)
