"""Embeddings: what they read are indices, so only their table is quantized."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.quant.layers import Adopted, LayerType
from bitplan.quant.quantizers import WeightQuantizer


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
    """indices → rows of a table that is quantized as a whole: what a graph holds."""

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
