"""Weights whose levels follow from the weights themselves, anew whenever they are used: nothing is learned beside them.

Only the codes of such a weight do not tell its levels. A file of codes therefore brings the step that was in use, and
`step`, which is 0 otherwise, holds it until the weight is trained on.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from bitplan.quant.lsq import positive_scale
from bitplan.quant.quantizers import WeightQuantizer, unseen
from bitplan.quant.scales import ScaleSharing


class FollowingWeight(WeightQuantizer):
    """weight → levels, of the same shape; gradients pass the rounding as if it were not there."""

    follows: ClassVar[bool] = True

    def __init__(self, weight: Tensor, bits: int, shared: ScaleSharing) -> None:
        super().__init__(bits, shared.steps(weight), learned=False)
        self.shared = shared
        self._pinned = False

    @abstractmethod
    def step_of(self, seen: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Return the scale of weights that share one along `dims`; these axes have length 1 then."""

    def squeezed(self, seen: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Return the values to round: the weights, or a differentiable function of them."""
        return seen

    def coded(self, seen: Tensor, step: Tensor) -> Tensor:
        """Return the integer values of the nearest levels, as floats."""
        low, high = self.range
        return (seen / step).sub_(self.offset).clamp_(low if self.offset else -high, high).round_()

    def forward(self, weight: Tensor, *, numel: int | None = None, step: Tensor | None = None) -> Tensor:
        """Quantize a whole weight."""
        if not self.enabled:
            return weight
        if self._pinned and self.training:
            self._let_go_()
        with unseen():
            seen = self.shared.view(_wide(weight))
            shown = seen if self._pinned else self.squeezed(seen, self.shared.dims(seen))
            with torch.no_grad():
                step = self._step(seen)
                made = (self._codes(shown, step) + self.offset).mul_(step)
            return straight_through(shown, made).view(weight.shape).to(weight.dtype)

    @torch.no_grad()
    def codes(self, weight: Tensor) -> Tensor:
        """Return the integer values of a weight: int8 up to 8 bits, else int16."""
        seen = self.shared.view(_wide(weight.detach()))
        shown = seen if self._pinned else self.squeezed(seen, self.shared.dims(seen))
        rounded = self._codes(shown, self._step(seen)).reshape(weight.shape)
        return rounded.to(torch.int8 if self.bits <= 8 else torch.int16)

    @torch.no_grad()
    def in_use(self, weight: Tensor) -> Tensor:
        """Return the scales of this weight, of the shape of `step`."""
        return self.shared.shaped(self._step(self.shared.view(_wide(weight))))

    @torch.no_grad()
    def pinned(self, weight: Tensor) -> FollowingWeight:
        """Return a copy that keeps the scale of this weight until it is trained."""
        made = copy.deepcopy(self)
        made.step.copy_(self.in_use(weight))
        made._pinned = True
        return made

    def _step(self, seen: Tensor) -> Tensor:
        step = self.step if self._pinned else self.step_of(seen, self.shared.dims(seen))
        return positive_scale(step).to(self.step.dtype)

    def _codes(self, seen: Tensor, step: Tensor) -> Tensor:
        return FollowingWeight.coded(self, seen, step) if self._pinned else self.coded(seen, step)

    @torch.no_grad()
    def _let_go_(self) -> None:
        self.step.zero_()
        self._pinned = False

    def take_(self, kept: WeightQuantizer) -> None:
        """Keep the levels from a file, if there are any."""
        super().take_(kept)
        self._look_()

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        self._look_()

    def _look_(self) -> None:
        self._pinned = not self.step.is_meta and bool(self.step.detach().any())


def straight_through(values: Tensor, made: Tensor) -> Tensor:
    """Return the rounded values exactly, with the gradient of the values."""
    passed: Tensor = _Straight.apply(values, made)
    return passed


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, made: Tensor) -> Tensor:
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _wide(weight: Tensor) -> Tensor:
    return weight if weight.dtype in (torch.float32, torch.float64) else weight.float()
