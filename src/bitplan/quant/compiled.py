"""The quantizer compiled by torch, one kernel per direction: what `fused` means on devices other than CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bitplan.core.errors import InputError
from bitplan.core.private_cache import private_cache_folder
from bitplan.quant import lsq

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def quantize(v: Tensor, s: Tensor, low: int, high: int) -> Tensor:
    """round(clip(v/s, −Qn, Qp))·s."""
    made: Tensor = _compiled(lsq.quantized)(v, s, *_bounds(v, low, high))
    return made


def gradients(grad: Tensor, v: Tensor, s: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Gradients for v and for the step."""
    both: tuple[Tensor, Tensor] = _compiled(lsq.gradients_differentiable)(grad, v, s, *_bounds(v, low, high))
    return both


def keep_cache_private() -> None:
    """Have torch keep what it compiles where only this user can write; it runs what it finds there.

    By default that is /tmp/torchinductor_USER, which somebody else may have made before.
    """
    try:
        os.environ[_CACHE] = str(private_cache_folder("torchinductor", _CACHE))
    except OSError as error:
        raise InputError(f"no folder for code that torch compiles ({error}): let {_CACHE} name one of yours") from None


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    keep_cache_private()
    return torch.compile(function, dynamic=True)


@cache
def _bound(value: int, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def _bounds(v: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """The ends of the range as tensors: as numbers they would be compiled anew for each precision."""
    return _bound(low, v.device), _bound(high, v.device)
