"""A weight cut into groups of inputs, each with a step of its own, and the steps that fit them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bitplan.core.codes import code_range
from bitplan.quant.layers import Channels
from bitplan.quant.lsq import FLOOR

_TRIED = 24  # steps that are tried for a group
_NARROWEST, _WIDEST = 0.35, 1.2  # their ends, as shares of the step by which the largest value is the last level
_LARGEST_HALF = 65504.0
_AT_ONCE = 1 << 16  # values that are fitted together, so that they stay in the cache


FIRST_AXIS = Channels((0,))
"""Rows are numbered by a weight's first axis, as those of linear layers and convolutions are."""


@dataclass(frozen=True)
class Grouping:
    """How a weight is cut: a row for each output channel, and in a row groups of `size` inputs, the last one shorter.

    A convolution's row has its input channels times its kernel, in the order in which they lie.
    """

    size: int
    channels: Channels = FIRST_AXIS

    def rows(self, weight: Tensor) -> Tensor:
        """weight → (rows, inputs)."""
        order, sizes = self._order(weight)
        count = math.prod(sizes[axis] for axis in self.channels.axes)
        return weight.reshape(sizes).permute(order).reshape(count, -1)

    def whole(self, rows: Tensor, like: Tensor) -> Tensor:
        """(rows, inputs) → the shape of a weight."""
        order, sizes = self._order(like)
        back = sorted(range(len(order)), key=order.__getitem__)
        return rows.reshape([sizes[axis] for axis in order]).permute(back).reshape(like.shape)

    def cut(self, weight: Tensor) -> Tensor:
        """weight → (rows, groups, inputs of a group); what the last one lacks is 0."""
        return self.cut_rows(self.rows(weight))

    def cut_rows(self, rows: Tensor) -> Tensor:
        """(rows, inputs) → the same."""
        width = self.width(rows.shape[1])
        return F.pad(rows, (0, -rows.shape[1] % width)).unflatten(1, (-1, width))

    def joined(self, cut: Tensor, like: Tensor) -> Tensor:
        """(rows, groups, inputs of a group) → the shape of a weight."""
        return self.whole(cut.flatten(1)[:, : like.numel() // max(1, cut.shape[0])], like)

    def spread(self, each: Tensor, like: Tensor) -> Tensor:
        """What each group has, (rows, groups), for every value of a weight."""
        width = self.width(like.numel() // max(1, each.shape[0]))
        return self.joined(each[..., None].expand(*each.shape, width), like)

    def width(self, inputs: int) -> int:
        """How many inputs a group has, of so many in a row."""
        return max(1, min(self.size, inputs))

    def _order(self, weight: Tensor) -> tuple[list[int], list[int]]:
        """The axes of a weight with those first that number rows, and its sizes."""
        parts, axes = self.channels.groups, self.channels.axes
        sizes = list(weight.shape) if parts == 1 else [parts, weight.shape[0] // parts, *weight.shape[1:]]
        return [*axes, *(axis for axis in range(len(sizes)) if axis not in axes)], sizes


class Levels(NamedTuple):
    """Steps of groups, and the code that stands for zero in each: (rows, groups) both; None: it is 0 in all."""

    step: Tensor
    zero: Tensor | None

    def bounds(self, bits: int) -> tuple[Tensor | int, Tensor | int]:
        """The lowest and highest multiple of the step that a code stands for; (rows, groups, 1) where they differ."""
        low, high = code_range(bits)
        return (low, high) if self.zero is None else (low - self.zero[..., None], high - self.zero[..., None])

    def multiples(self, cut: Tensor, bits: int) -> Tensor:
        """The multiples of its step that are nearest to each value (rows, groups, inputs), among its levels."""
        low, high = self.bounds(bits)
        return (cut / self.step[..., None]).clamp_(low, high).round_()  # type: ignore[arg-type]

    def nearest(self, cut: Tensor, bits: int) -> Tensor:
        """The levels themselves."""
        return self.multiples(cut, bits) * self.step[..., None]


@torch.no_grad()
def fit(cut: Tensor, bits: int, *, zeros: bool, digits: int = 0) -> Levels:
    """The levels of each group (rows, groups, inputs) with the least sum of squared errors, of some that are tried.

    Of values that are all zero the step is that of weights of size 1/√inputs. `digits` are those of steps (`short`).
    """
    wide = cut.detach().float()
    parts = [_fitted(part, bits, zeros, digits) for part in _pieces(wide)]
    step = torch.cat([part.step for part in parts])
    zero = torch.cat([part.zero for part in parts if part.zero is not None]) if zeros else None
    return Levels(step, zero)


def short(step: Tensor, digits: int) -> Tensor:
    """Positive steps of so many binary digits that count, which float16 holds; as they are where `digits` is 0."""
    if not digits:
        return step
    mantissa, exponent = torch.frexp(step)
    kept = torch.ldexp((mantissa * 2.0**digits).round(), exponent - digits)
    return ((kept * 2.0**24).round() / 2.0**24).clamp(2.0**-24, _LARGEST_HALF)


def _fitted(cut: Tensor, bits: int, zeros: bool, digits: int) -> Levels:
    best, error = (
        _levels(cut, bits, 1.0, zeros=zeros, digits=digits),
        torch.full(cut.shape[:2], math.inf, device=cut.device),
    )
    _, high = code_range(bits)
    to_the_largest = 1.0 if zeros else (high + 0.5) / high
    for share in (to_the_largest, *torch.linspace(_WIDEST, _NARROWEST, _TRIED).tolist()):
        tried = _levels(cut, bits, share, zeros=zeros, digits=digits)
        squares = (tried.nearest(cut, bits) - cut).square_().sum(-1)
        better = squares < error
        error = torch.where(better, squares, error)
        zero = None if tried.zero is None or best.zero is None else torch.where(better, tried.zero, best.zero)
        best = Levels(torch.where(better, tried.step, best.step), zero)
    return best


def _levels(cut: Tensor, bits: int, share: float, *, zeros: bool, digits: int) -> Levels:
    """Levels that end at a share of the largest values."""
    low, high = code_range(bits)
    if zeros:
        lowest, highest = cut.amin(-1).clamp_max_(0) * share, cut.amax(-1).clamp_min_(0) * share
        step = short(_usable((highest - lowest) / (high - low), cut), digits)
        return Levels(step, (low - lowest / step).round_().clamp_(low, high))
    return Levels(short(_usable(cut.abs().amax(-1) * (share / (high + 0.5)), cut), digits), None)


def _usable(step: Tensor, cut: Tensor) -> Tensor:
    return torch.where(step > FLOOR, step, 1 / math.sqrt(max(1, cut.shape[1] * cut.shape[2])))


def _pieces(cut: Tensor) -> Iterator[Tensor]:
    rows = max(1, _AT_ONCE // max(1, cut.shape[1] * cut.shape[2]))
    yield from cut.split(rows) if len(cut) else (cut,)
