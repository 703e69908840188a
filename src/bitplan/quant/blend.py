"""Several precisions of a layer at once: each tensor is quantized by every choice, and the results are mixed.

Relaxations (`plugins/methods/relaxations`) are built on this, with the modules of any method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.core.precision import LEFT_ALONE_BITS, Precision
from bitplan.core.records import Plan
from bitplan.quant.convert import plan_of, quantize, quantizers_of
from bitplan.quant.lsq import MASK
from bitplan.quant.proof import take_proof_off_
from bitplan.quant.sites import Quantizers

SHARES = "bitplan_shares"
"""The name of the shares inside the first blend of a model."""


class Shares(nn.Module):
    """The share of each choice in each group, and its training; this base class learns nothing.

    The training loop calls it before a micro-batch runs (`begin_`), for its loss (`objective`), and before and after a
    step of the optimizer (`spare_`, `end_`). The optimizer leaves its parameters alone: `end_` takes a plain gradient
    step at `rate`.
    """

    rate = 0.0

    def of_group(self, group: int) -> tuple[Tensor, Sequence[bool]]:
        """A group's shares of the choices, (C), and which of these are to be computed."""
        raise NotImplementedError

    def begin_(self, step: int, total: int) -> None:
        """Prepare for a micro-batch of this step of so many."""

    def objective(self, loss: Tensor) -> Tensor:
        """Return the objective for the loss of one micro-batch."""
        return loss

    def spare_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Drop the gradients of the parameters that are not to be trained in this step."""

    @torch.no_grad()
    def end_(self, part: float = 1.0) -> None:
        """Take a plain gradient step after a step of the optimizer, at this part of the rate."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-self.rate * part)
                parameter.grad = None

    @property
    def learns(self) -> bool:
        """True if it has parameters."""
        return any(True for _ in self.parameters())


class Blend(nn.Module):
    """One grid for each of some choices, and a group's shares: a tensor → Σ share · grid(tensor), of the same shape.

    `place` is the index of the grid of each choice, since choices may have the same bits here. If one choice has the
    whole share, the result is exactly that of its grid.
    """

    follows = True
    """Whole tables are quantized, as for weights whose levels depend on all of it (`quant/layer_types.py`)."""

    shares: Shares

    def __init__(self, grids: Sequence[nn.Module], place: Sequence[int], shares: Shares, group: int) -> None:
        super().__init__()
        self.grids = nn.ModuleList(grids)
        self.place = tuple(place)
        self.group = group
        self.masked = any(getattr(grid, "masked", False) for grid in grids)
        self.__dict__["shares"] = shares  # which the first blend of a model has among its modules

    def forward(self, v: Tensor, **options: Any) -> Tensor:
        """Mix the results of the grids; masks of attention pass unchanged."""
        if not v.is_floating_point():
            return v
        if not self.masked:
            return self._mix(v, options)
        return torch.where(v < MASK, v, self._mix(v.clamp_min(MASK), options))

    def _mix(self, v: Tensor, options: dict[str, Any]) -> Tensor:
        shares, computed = self.shares.of_group(self.group)
        wanted = sorted({place for place, is_computed in zip(self.place, computed, strict=True) if is_computed})
        if len(wanted) == 1:
            return _quantize_by(self.grids[wanted[0]], v, options)
        out = None
        for number in wanted:
            own = torch.stack([share for share, place in zip(shares, self.place, strict=True) if place == number])
            made = _quantize_by(self.grids[number], v, options)
            part = made * own.sum().to(made.dtype)
            out = part if out is None else out + part
        assert out is not None, "a group has some choice"
        return out

    def extra_repr(self) -> str:
        """Return the bits of the grids."""
        return f"bits={[_bits_of(grid) for grid in self.grids]}, group={self.group}"


def shares_of(model: nn.Module) -> Shares:
    """Return the shares that a model learns, or shares that learn nothing."""
    return next((module for module in model.modules() if isinstance(module, Shares)), None) or Shares()


def blended(
    model: nn.Module, members: Sequence[Sequence[str]], choices: Sequence[Precision], shares: Shares
) -> nn.Module:
    """Return a copy of a quantized model in which each of these groups has all choices at once, mixed by `shares`.

    Grids begin as `quantize` to that choice would have them. Biases are not rounded to grids of products, which do not
    exist between two precisions.
    """
    names = [layer for group in members for layer in group]
    at_each = [_copy_at(model, dict.fromkeys(names, choice)) for choice in choices]
    lowest = at_each[0]  # whatever any choice quantizes is quantized there
    found = [quantizers_of(one) for one in at_each]
    blends: dict[int, Blend] = {}
    for number, group in enumerate(members):
        for layer in group:
            for slots in _find_slots([by_layer.get(layer) for by_layer in found]):
                if id(slots[0]) not in blends and len({_bits_of(slot) for slot in slots}) > 1:
                    blends[id(slots[0])] = _make_blend(slots, shares, number)
    _replace_quantizers_(lowest, blends)
    take_proof_off_(lowest)
    for first in list(blends.values())[:1]:  # not the root, which may run its parts one after the other
        first.add_module(SHARES, shares)
    return lowest


def _copy_at(model: nn.Module, precisions: dict[str, Precision]) -> nn.Module:
    plan = plan_of(model)
    return quantize(model, Plan(**(dict(plan) | {"precisions": plan.precisions | precisions})), integer=False)


def _find_slots(found: Sequence[Quantizers | None]) -> list[list[nn.Module]]:
    """Return the modules at every choice for each place that has a quantizer at the lowest choice."""
    known = [Quantizers(None, ()) if one is None else one for one in found]
    slots: list[list[nn.Module]] = []
    if known[0].weight is not None:
        slots.append([nn.Identity() if one.weight is None else one.weight for one in known])
    for place in range(len(known[0].inputs)):
        slots.append([one.inputs[place] if place < len(one.inputs) else nn.Identity() for one in known])
    return slots


def _make_blend(slots: Sequence[nn.Module], shares: Shares, group: int) -> Blend:
    by_bits = {_bits_of(slot): slot for slot in reversed(slots)}
    bits = sorted(by_bits)
    return Blend([by_bits[one] for one in bits], [bits.index(_bits_of(slot)) for slot in slots], shares, group)


def _bits_of(grid: nn.Module) -> int:
    return int(getattr(grid, "bits", LEFT_ALONE_BITS))


def _quantize_by(grid: nn.Module, v: Tensor, options: dict[str, Any]) -> Tensor:
    quantized: Tensor = grid(v) if isinstance(grid, nn.Identity) else grid(v, **options)
    return quantized


def _replace_quantizers_(model: nn.Module, blends: dict[int, Blend]) -> None:
    """Put blends in the place of quantizers, registered or referred to."""
    for module in list(model.modules()):
        if isinstance(module, Blend):
            continue
        places: tuple[dict[str, Any], ...] = (module._modules, vars(module))
        for held in places:
            for name, value in list(held.items()):
                if id(value) in blends:
                    held[name] = blends[id(value)]
