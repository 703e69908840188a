"""What the tensor operations that make up layers compute: operands, multiply-accumulates, kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """One multiplication of two tensors. `second` is the weight where only one can be (convolution, table).

    `by_data` says that it is one only if the data say what is multiplied: otherwise a weight is put together so.
    """

    kind: str
    first: torch.Tensor
    second: torch.Tensor
    macs: int
    in_features: int
    by_data: bool = False


def product_of(operation: Any, arguments: tuple[Any, ...], output: Any) -> list[Product]:
    """The products that an operation computes; most operations compute none."""
    reader = _READERS.get(operation.overloadpacket)
    return reader(arguments, output) if reader else []


def _convolution(arguments: tuple[Any, ...], output: torch.Tensor) -> list[Product]:
    given, weight, transposed = arguments[0], arguments[1], bool(arguments[6])
    # Each output element sums over weight[1:] inputs; transposed, each input element adds to weight[1:] outputs.
    elements, name = (given.numel(), "conv_transpose") if transposed else (output.numel(), "conv")
    macs = elements * math.prod(weight.shape[1:])
    kind = f"{name}{weight.dim() - 2}d"
    return [Product(kind, given, weight, macs, in_features=int(given.shape[1]))]


def _matmul(first: int) -> Callable[[tuple[Any, ...], torch.Tensor], list[Product]]:
    """Read a matrix product whose operands are arguments `first` and `first + 1`."""

    def read(arguments: tuple[Any, ...], _: torch.Tensor) -> list[Product]:
        left, right = arguments[first], arguments[first + 1]
        columns = right.shape[-1] if right.dim() > 1 else 1
        return [Product("linear", left, right, left.numel() * columns, int(left.shape[-1]))]

    return read


def _linear(arguments: tuple[Any, ...], _: torch.Tensor) -> list[Product]:
    given, weight = arguments[0], arguments[1]
    return [Product("linear", given, weight, given.numel() * weight.shape[0], int(weight.shape[1]))]


def _trilinear(arguments: tuple[Any, ...], output: torch.Tensor) -> list[Product]:
    """Both inputs of a bilinear layer meet its weight at once."""
    one, weight, other = arguments[:3]  # (batch, i), (out, i, j), (batch, j)
    macs = output.numel() * math.prod(weight.shape[1:])
    kind, width = "bilinear", int(weight.shape[1])
    return [Product(kind, one, weight, macs, width), Product(kind, other, weight, 0, width)]


def _convolution_by_time(arguments: tuple[Any, ...], output: torch.Tensor) -> list[Product]:
    given, weight = arguments[0], arguments[1]  # (time, batch, in), (width, in, out)
    macs = output.numel() * math.prod(weight.shape[:2])
    return [Product("conv1d", given, weight, macs, in_features=int(given.shape[2]))]


def _embedding(arguments: tuple[Any, ...], _: torch.Tensor) -> list[Product]:
    table, indices = arguments[0], arguments[1]
    return [Product("embedding", indices, table, 0, int(table.shape[0]))]


def _index(arguments: tuple[Any, ...], _: torch.Tensor) -> list[Product]:
    """Rows of a table, as `table[indices]` and `table.index_select(0, indices)` take them."""
    table, chosen = arguments[0], arguments[1] if isinstance(arguments[1], list | tuple) else [arguments[2]]
    by_row = isinstance(arguments[1], list | tuple) or arguments[1] == 0
    if table.dim() != 2 or len(chosen) != 1 or not by_row or chosen[0].dtype not in (torch.int64, torch.int32):
        return []
    return [Product("embedding", chosen[0], table, 0, int(table.shape[0]), by_data=True)]


def _attention(arguments: tuple[Any, ...], _: torch.Tensor) -> list[Product]:
    query, key, value = arguments[:3]  # (…, T, d), (…, S, d), (…, S, e)
    sources, width = key.shape[-2], query.shape[-1]
    queries = query.numel() // width
    score_macs = query.numel() * sources  # (…, T, d) · (…, d, S)
    mix_macs = queries * sources * value.shape[-1]  # (…, T, S) · (…, S, e)
    return [
        Product("linear", query, key, score_macs, in_features=int(width)),
        Product("linear", query, value, mix_macs, in_features=int(sources)),
    ]


_ADDING = ("addmm", "baddbmm", "addbmm", "addmv")  # which have forms that write into what they add to
_READERS: dict[Any, Callable[[tuple[Any, ...], Any], list[Product]]] = {
    aten.convolution: _convolution,
    aten.conv_tbc: _convolution_by_time,
    aten.linear: _linear,
    aten._trilinear: _trilinear,
    aten.mm: _matmul(0),
    aten.bmm: _matmul(0),
    aten._grouped_mm: _matmul(0),  # mixtures of experts
    aten.mv: _matmul(0),
    aten.dot: _matmul(0),
    aten.vdot: _matmul(0),
    **{getattr(aten, f"{name}{ending}"): _matmul(1) for name in _ADDING for ending in ("", "_")},
    aten._addmm_activation: _matmul(1),
    aten.embedding: _embedding,
    aten._embedding_bag: _embedding,
    aten._embedding_bag_forward_only: _embedding,
    aten.index: _index,
    aten.index_select: _index,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_efficient_attention: _attention,
    aten._scaled_dot_product_cudnn_attention: _attention,
}
