"""Error-compensated rounding of a matrix (GPTQ, Frantar et al. 2022): what rounding an input's weights spoils in the
outputs, the weights of the inputs after it make good.

With H = XᵀX, the second moments of the inputs, and U the upper Cholesky factor of (H + λI)⁻¹, for one input after the
other (their eq. 2 and algorithm 1, recalled and not read again; tests compare it with a dense one that uses neither):

    q = the nearest level of w_j;  e = (w_j − q) / U_jj;  w_k −= e·U_jk for all k > j
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bitplan.core.errors import InputError
from bitplan.quant.blocks import Levels, fit

DAMPING = 0.01
"""λ as a share of the mean of H's diagonal."""
BLOCK = 128
"""So many inputs are done before the weights of all others are corrected at once."""


class Fixed:
    """Levels that are there before: multiples of steps (B, rows, inputs) from `low` to `high`."""

    def __init__(self, step: Tensor, low: int, high: int, width: int = BLOCK) -> None:
        self.step, self.low, self.high = step, low, high
        self.width = width

    def begin(self, start: int, weights: Tensor) -> None:
        """Nothing is fitted."""

    def nearest(self, column: int, values: Tensor) -> Tensor:
        """The levels of one input's weights (B, rows)."""
        step = self.step[..., column]
        return torch.clamp(values / step, self.low, self.high).round_() * step


class Fitted:
    """Levels of groups, fitted to what the weights are when their turn comes."""

    def __init__(self, width: int, bits: int, *, zeros: bool, digits: int = 0) -> None:
        self.width, self.bits, self.zeros, self.digits = width, bits, zeros, digits
        self.groups: list[Levels] = []  # of each (B, rows, 1)

    def begin(self, start: int, weights: Tensor) -> None:
        """Fit the group that begins here, (B, rows, width)."""
        found = fit(weights.flatten(0, 1)[:, None], self.bits, zeros=self.zeros, digits=self.digits)
        shape = weights.shape[:2]
        zero = None if found.zero is None else found.zero.view(*shape, 1).to(weights)
        self.groups.append(Levels(found.step.view(*shape, 1).to(weights), zero))
        low, high = self.groups[-1].bounds(self.bits)
        self._step = self.groups[-1].step[..., 0]
        self._low, self._high = (
            bound.view(shape) if isinstance(bound, Tensor) else torch.full(shape, float(bound)).to(weights)
            for bound in (low, high)
        )

    def nearest(self, column: int, values: Tensor) -> Tensor:
        """The levels of one input's weights (B, rows)."""
        return (values / self._step).clamp_(self._low, self._high).round_().mul_(self._step)

    @property
    def levels(self) -> Levels:
        """Those of all groups, (rows of all parts, groups)."""
        step = torch.cat([group.step for group in self.groups], -1).flatten(0, 1)
        zeros = [group.zero for group in self.groups if group.zero is not None]
        return Levels(step, torch.cat(zeros, -1).flatten(0, 1) if zeros else None)


def compensated(weight: Tensor, moments: Tensor, grid: Fixed | Fitted, *, damping: float = DAMPING) -> Tensor:
    """Weights (B, rows, inputs) on the levels of a grid, by moments (B, inputs, inputs) of their inputs."""
    left, made = weight.clone(), torch.empty_like(weight)
    factor = _factor(moments, damping).to(weight.dtype)
    inputs = weight.shape[-1]
    for start in range(0, inputs, grid.width):
        end = min(start + grid.width, inputs)
        block, errors = left[..., start:end], torch.empty_like(left[..., start:end])
        grid.begin(start, block)
        for place in range(end - start):
            values, row = block[..., place], factor[..., start + place, start:end]
            made[..., start + place] = grid.nearest(start + place, values)
            error = (values - made[..., start + place]) / row[..., place, None]
            block[..., place:] -= error[..., None] * row[:, None, place:]
            errors[..., place] = error
        left[..., end:] -= errors @ factor[..., start:end, end:]
    return made


def output_errors(weight: Tensor, made: Tensor, moments: Tensor) -> Tensor:
    """The squared error of each row's outputs, (w − ŵ)ᵀH(w − ŵ): (B, rows)."""
    lost = (weight - made).double()
    return ((lost @ moments.double()) * lost).sum(-1)


def _factor(moments: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of (H + λI)⁻¹; an input that is always 0 counts as one that depends on no other."""
    wide = moments.double()
    diagonal = wide.diagonal(dim1=-2, dim2=-1)
    if not math.isfinite(float(diagonal.sum())):
        raise InputError("the inputs have NaN or infinite values: check the data and the layers before it")
    size = diagonal.mean(-1, keepdim=True)
    added = torch.where(diagonal > 0, damping * size, torch.where(size > 0, size, 1.0))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(wide + torch.diag_embed(added)))
    return torch.linalg.cholesky(inverse, upper=True)
