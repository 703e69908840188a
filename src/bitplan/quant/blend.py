"""Several precisions of a layer at once: each tensor is quantized by every choice, and what comes of it is mixed.

That is all that relaxations (`relaxations/`) need of quantization. Whichever method quantizes, its own modules do.
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
"""What the first blend of a model has inside it: how much of each choice all groups have."""


class Shares(nn.Module):
    """How much of each choice each group has, and what of it is learned in a training: here nothing.

    The training loop asks it before a piece of a batch runs (`begin_`), for what is minimized (`objective`), before and
    after a step of the optimizer (`spare_`, `end_`). What it learns the optimizer leaves alone,
    whichever that is: `end_` takes a plain gradient step at `rate`.
    """

    rate = 0.0

    def of_group(self, group: int) -> tuple[Tensor, Sequence[bool]]:
        """A group's shares of the choices, (C), and which of these are to be computed."""
        raise NotImplementedError

    def begin_(self, step: int, total: int) -> None:
        """Before each piece of a batch, in this step of so many."""

    def objective(self, loss: Tensor) -> Tensor:
        """What is minimized, of the loss of a piece."""
        return loss

    def spare_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Drop the gradients of those among all parameters whose turn it is not."""

    @torch.no_grad()
    def end_(self, part: float = 1.0) -> None:
        """After a step of the optimizer: a plain step of what is learned here, at this part of the rate."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-self.rate * part)
                parameter.grad = None

    @property
    def learns(self) -> bool:
        """Whether there is anything that it learns."""
        return any(True for _ in self.parameters())


class Blend(nn.Module):
    """One grid for each of some choices, and a group's shares: a tensor → Σ share · grid(tensor), of the same shape.

    `place` says for each choice which of the grids it is, for choices may have the same bits here. Where one choice has
    all, it is exactly what its grid makes.
    """

    follows = True
    """As of a weight whose levels depend on all of it, whole tables are quantized (`layer_types/embedding.py`)."""

    shares: Shares

    def __init__(self, grids: Sequence[nn.Module], place: Sequence[int], shares: Shares, group: int) -> None:
        super().__init__()
        self.grids = nn.ModuleList(grids)
        self.place = tuple(place)
        self.group = group
        self.masked = any(getattr(grid, "masked", False) for grid in grids)
        self.__dict__["shares"] = shares  # which the first blend of a model has among its modules

    def forward(self, v: Tensor, **told: Any) -> Tensor:
        """Mix what the grids make; masks of attention pass as they are."""
        if not v.is_floating_point():
            return v
        if not self.masked:
            return self._mixed(v, told)
        return torch.where(v < MASK, v, self._mixed(v.clamp_min(MASK), told))

    def _mixed(self, v: Tensor, told: dict[str, Any]) -> Tensor:
        shares, computed = self.shares.of_group(self.group)
        wanted = sorted({place for place, is_computed in zip(self.place, computed, strict=True) if is_computed})
        if len(wanted) == 1:
            return _made(self.grids[wanted[0]], v, told)
        out = None
        for number in wanted:
            own = torch.stack([share for share, place in zip(shares, self.place, strict=True) if place == number])
            made = _made(self.grids[number], v, told)
            part = made * own.sum().to(made.dtype)
            out = part if out is None else out + part
        assert out is not None, "a group has some choice"
        return out

    def extra_repr(self) -> str:
        """Bits of the grids."""
        return f"bits={[_bits(grid) for grid in self.grids]}, group={self.group}"


def shares_of(model: nn.Module) -> Shares:
    """What a model learns of its own precisions; where that is nothing, what does nothing."""
    return next((module for module in model.modules() if isinstance(module, Shares)), None) or Shares()


def blended(
    model: nn.Module, members: Sequence[Sequence[str]], choices: Sequence[Precision], shares: Shares
) -> nn.Module:
    """A copy of a quantized model in which these groups, the layers of each, have all choices at once, by `shares`.

    Grids begin where `quantize` to that choice would have them. Biases are not rounded to grids of products, which
    there are none of between two precisions.
    """
    names = [layer for group in members for layer in group]
    at_each = [_at(model, dict.fromkeys(names, choice)) for choice in choices]
    made = at_each[0]  # the lowest: what any choice quantizes is quantized there
    found = [quantizers_of(one) for one in at_each]
    blends: dict[int, Blend] = {}
    for number, group in enumerate(members):
        for layer in group:
            for slots in _slots([by_layer.get(layer) for by_layer in found]):
                if id(slots[0]) not in blends and len({_bits(slot) for slot in slots}) > 1:
                    blends[id(slots[0])] = _blend(slots, shares, number)
    _put_(made, blends)
    take_proof_off_(made)
    for first in list(blends.values())[:1]:  # not the root, which may run its parts one after the other
        first.add_module(SHARES, shares)
    return made


def _at(model: nn.Module, precisions: dict[str, Precision]) -> nn.Module:
    plan = plan_of(model)
    return quantize(model, Plan(**(dict(plan) | {"precisions": plan.precisions | precisions})), integer=False)


def _slots(found: Sequence[Quantizers | None]) -> list[list[nn.Module]]:
    """Each place of a layer that has a quantizer at the lowest choice: what is there at every choice."""
    known = [Quantizers(None, ()) if one is None else one for one in found]
    slots: list[list[nn.Module]] = []
    if known[0].weight is not None:
        slots.append([nn.Identity() if one.weight is None else one.weight for one in known])
    for place in range(len(known[0].inputs)):
        slots.append([one.inputs[place] if place < len(one.inputs) else nn.Identity() for one in known])
    return slots


def _blend(slots: Sequence[nn.Module], shares: Shares, group: int) -> Blend:
    by_bits = {_bits(slot): slot for slot in reversed(slots)}
    bits = sorted(by_bits)
    return Blend([by_bits[one] for one in bits], [bits.index(_bits(slot)) for slot in slots], shares, group)


def _bits(grid: nn.Module) -> int:
    return int(getattr(grid, "bits", LEFT_ALONE_BITS))


def _made(grid: nn.Module, v: Tensor, told: dict[str, Any]) -> Tensor:
    made: Tensor = grid(v) if isinstance(grid, nn.Identity) else grid(v, **told)
    return made


def _put_(model: nn.Module, blends: dict[int, Blend]) -> None:
    """Put blends in the place of quantizers, wherever these are registered or referred to."""
    for module in list(model.modules()):
        if isinstance(module, Blend):
            continue
        places: tuple[dict[str, Any], ...] = (module._modules, vars(module))
        for held in places:
            for name, value in list(held.items()):
                if id(value) in blends:
                    held[name] = blends[id(value)]
