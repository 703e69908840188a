"""The quantizer compiled by torch, one kernel per direction: what `fused` means on devices other than CPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bitplan.quant import lsq


def quantize(v: Tensor, s: Tensor, low: int, high: int) -> Tensor:
    """round(clip(v/s, −Qn, Qp))·s."""
    made: Tensor = _compiled(lsq.quantized)(v, s, *_bounds(v, low, high))
    return made


def gradients(grad: Tensor, v: Tensor, s: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Gradients for v and for the step."""
    both: tuple[Tensor, Tensor] = _compiled(lsq.gradients_differentiable)(grad, v, s, *_bounds(v, low, high))
    return both


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


@cache
def _bound(value: int, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def _bounds(v: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """The ends of the range as tensors: as numbers they would be compiled anew for each precision."""
    return _bound(low, v.device), _bound(high, v.device)
