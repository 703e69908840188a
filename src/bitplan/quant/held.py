"""Who holds a gradient: one that nobody holds but the node it was given to may be written over.

Autograd itself goes by such counts, where it keeps a gradient instead of a copy of it. They differ from one version of
Python and torch to the next, so they are not written down here: they are those of gradients which are known to be free.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Holders = tuple[int, ...]


def nobody_elses(grad: Tensor) -> bool:
    """Tell of what `backward` of an autograd function was given whether it may be written to; to be asked there."""
    free = _free()
    return bool(free) and type(grad) is Tensor and _holders(grad) in free


def _holders(grad: Any) -> Holders:
    """How often a tensor, its storage and the tensor that it is a view of are held, by torch and by Python."""
    storage = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    base = grad._base
    of_base = () if base is None else (base._use_count(), sys.getrefcount(base))
    return grad._use_count(), sys.getrefcount(grad), storage, *of_base


@cache
def _free() -> frozenset[Holders]:
    """The counts of gradients that are free: a tensor of its own, and a view; none where torch does not count."""
    if not hasattr(Tensor, "_use_count") or not hasattr(torch._C, "_storage_Use_Count"):
        return frozenset()
    found: list[Holders] = []
    with _disable_current_modes(), torch.enable_grad():  # modes see operations, and may hold what these give
        for multiply in (torch.mul, F.linear):
            one = torch.ones(2, 2, device="cpu")
            multiply(one, _Counted.apply(one.clone().requires_grad_(), found)).sum().backward()
    return frozenset(found)


class _Counted(torch.autograd.Function):
    """The identity, which counts as `nobody_elses` would if it were asked."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, found: list[Holders]) -> Tensor:
        ctx.found = found
        return v.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _noted(grad, ctx.found)
        return grad, None


def _noted(grad: Tensor, found: list[Holders]) -> None:
    """Count from as far away as `nobody_elses` does: every call holds its arguments."""
    found.append(_holders(grad))
