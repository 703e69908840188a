"""bitplan's own layer types: linear layers, convolutions, embeddings, attention and recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.quant.layers import Adopted, Channels, LayerType, original_class
from bitplan.quant.lsq import find_node, step_gradient, step_slopes, sum_products
from bitplan.quant.quantizers import WeightQuantizer
from bitplan.quant.recompute import call_without_saving
from bitplan.quant.scales import round_bias

# Linear layers: torch's own, and the one of transformers' GPT-2, whose weight lies the other way round.


class LinearLayer(Adopted):
    """x (…, in) → (…, out)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply F.linear to the quantized input and weight."""
        layer: Any = self
        quantized = layer.input_quantizer(x)
        bias = round_bias(layer.bias, layer.input_quantizer, layer.weight_quantizer)
        out: Tensor = call_without_saving(F.linear, quantized, layer.weight_quantizer(layer.weight), bias)
        return out


@final
class Linear(LayerType):
    """nn.Linear, weight (out, in)."""

    modules = (nn.Linear,)
    quantized = LinearLayer
    rounds_bias = True
    kind = "linear"

    def integer(self, module: nn.Module, operands: Any) -> Any:
        """Its codes as they are."""
        return operands.linear()

    def example(self) -> tuple[nn.Module, Tensor]:
        """Two tokens of six features."""
        return nn.Linear(6, 5), torch.randn(2, 3, 6)


class TransformersConv1DLayer(Adopted):
    """x (…, in) → (…, out)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply addmm to the quantized input and weight."""
        layer: Any = self
        quantized = layer.input_quantizer(x)
        weight = layer.weight_quantizer(layer.weight)
        bias: Any = round_bias(layer.bias, layer.input_quantizer, layer.weight_quantizer)
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
        names = {base.__name__ for base in original_class(module).__mro__}
        if "Conv1D" not in names:
            return False
        weight, width = getattr(module, "weight", None), getattr(module, "nf", None)
        return isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == width

    def integer(self, module: nn.Module, operands: Any) -> Any:
        """Its codes as (out, in)."""
        return replace(operands, codes=operands.codes.t().contiguous()).linear()

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


# Convolutions and transposed convolutions in one, two and three dimensions; padding, groups and stride are
# theirs.


class ConvLayer(Adopted):
    """x (B, in, …) → (B, out, …), with the base's own padding."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the base's convolution to the quantized input and weight."""
        layer: Any = self
        weight = layer.weight_quantizer(layer.weight)
        bias = round_bias(layer.bias, layer.input_quantizer, layer.weight_quantizer)
        return convolved(layer._conv_forward, layer.input_quantizer, x, weight, bias)


@final
class Convolution(LayerType):
    """nn.Conv1d, nn.Conv2d and nn.Conv3d, weight (out, in / groups, …)."""

    modules = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    quantized = ConvLayer
    rounds_bias = True
    kind = "convolution"

    def integer(self, module: nn.Module, operands: Any) -> Any:
        """A kernel that pads with zeros, as many on both sides; other padding is done before it."""
        layer: Any = module
        by_itself = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        return operands.convolution(
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
        """Apply the transposed convolution to the quantized input and weight."""
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
            round_bias(layer.bias, layer.input_quantizer, layer.weight_quantizer),
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


# Embeddings: what they read are indices, so only their table is quantized.


class EmbeddingLayer(Adopted):
    """indices → rows; only the rows looked up are quantized where that gives the same rows and gradients."""

    def forward(self, indices: Tensor) -> Tensor:
        """Look up, then quantize."""
        layer: Any = self
        quantizer = layer.weight_quantizer
        if getattr(quantizer, "follows", False) or getattr(quantizer, "grouped", False):
            return self._from_whole(indices, quantizer)
        rows = F.embedding(
            indices,
            layer.weight,
            layer.padding_idx,
            layer.max_norm,
            layer.norm_type,
            layer.scale_grad_by_freq,
            layer.sparse,
        )
        if not isinstance(quantizer, WeightQuantizer):
            return rows
        steps = quantizer.step[indices] if quantizer.step.numel() > 1 else quantizer.step
        out: Tensor = quantizer(rows, numel=layer.weight.numel(), step=steps)
        return out

    def _from_whole(self, indices: Tensor, quantizer: nn.Module) -> Tensor:
        """Quantize, then look up: of a method that sees all of the table, or of several precisions."""
        layer: Any = self
        if layer.max_norm is not None:
            with torch.no_grad():
                torch.embedding_renorm_(layer.weight.detach(), indices.contiguous(), layer.max_norm, layer.norm_type)
        return F.embedding(indices, quantizer(layer.weight), layer.padding_idx)


class WholeTable(Adopted):
    """indices → rows of a table that is quantized as a whole: the form that a graph holds."""

    def forward(self, indices: Tensor) -> Tensor:
        """Quantize, then look up."""
        layer: Any = self
        return F.embedding(indices, layer.weight_quantizer(layer.weight))


@final
class Embedding(LayerType):
    """nn.Embedding, weight (words, features): with steps per channel, one for each word."""

    modules = (nn.Embedding,)
    quantized = EmbeddingLayer
    float_input = False
    kind = "embedding"

    def captured(self, module: nn.Module, path: str) -> type[Adopted]:
        """A look-up in the table of codes."""
        if module.max_norm is not None:
            raise InputError(f"{path!r} has max_norm, so it changes its weight as it runs: ONNX cannot hold that")
        return WholeTable

    def example(self) -> tuple[nn.Module, Tensor]:
        """Ten words."""
        return nn.Embedding(10, 6), torch.tensor([[1, 2, 2], [0, 5, 1]])


# torch's attention: it hands its weights to functions, whose calls are quantized as they come
# (`quant/calls.py`).


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


# torch's recurrent layers and cells: they hand weights to functions, which are opened (`quant/recurrence.py`).


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


# The step of what nothing before it learns from, such as images: its gradient without that of the images.

EVERY = 1
"""Of so many samples one is looked at; some of them, weighted for all, would estimate the gradient without bias."""


def convolved(
    convolve: Callable[..., Tensor], quantizer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Convolve a quantized batch with a quantized weight.

    If nothing before the batch learns, as before images, the scale of the batch learns by a convolution of slopes. The
    gradient of the images is not computed.
    """
    inputs = quantizer(x)
    node = None if torch.compiler.is_compiling() else find_node(inputs)
    if node is None or x.requires_grad or x.dim() != weight.dim():
        out: Tensor = call_without_saving(convolve, inputs, weight, bias)
        return out
    out = call_without_saving(convolve, inputs.detach(), weight, bias, nodes={inputs: node})
    learning: Tensor = call_without_saving(_LearnInputScale.apply, out, quantizer.step, x, weight, node, convolve)
    return learning


class _LearnInputScale(torch.autograd.Function):
    """Return the result of a convolution unchanged; the scale of its input learns from its gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, step: Tensor, x: Tensor, weight: Tensor, node: Any, convolve: Any) -> Tensor:
        ctx.mark_dirty(out)  # not a view, which could not be written to afterwards
        ctx.save_for_backward(step, x, weight)
        ctx.node, ctx.convolve = node, convolve
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        step, x, weight = ctx.saved_tensors
        part = x[::EVERY]
        slopes = step_slopes(ctx.node, part, step)
        moved = ctx.convolve(slopes.to(weight.dtype), weight, None)
        total = sum_products(grad[::EVERY].to(moved.dtype), moved) * (len(x) / max(1, len(part)))
        return grad, step_gradient(total, step, ctx.node.scale), None, None, None, None
