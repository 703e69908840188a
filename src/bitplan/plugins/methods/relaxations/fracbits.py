"""FracBits and BitPruning: a fractional precision for each group, between two neighbouring choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from bitplan.core.errors import InputError
from bitplan.core.method_facts import About
from bitplan.plugins.methods.relaxations.base import Mix, Relaxation, check_positive
from bitplan.selection.budget_constraint import BudgetConstraint

Penalty = Literal["target", "linear"]
_HALVINGS = 50


@dataclass(frozen=True)
class FracBits(Relaxation):
    """Every group has a number λ between two choices, and is mixed of both: Q = (1 − f)·Q_⌊λ⌋ + f·Q_(⌊λ⌋+1).

    Yang and Jin 2020, "FracBits: Mixed Precision Quantization via Fractional Bit-Widths"; after the authors' code and
    a summary. f = λ − ⌊λ⌋, and ⌊λ⌋ + 1 instead of ⌈λ⌉, so that λ learns from the task at whole λ too. λ counts
    *choices*, from 0 at the lowest: for neighbouring bits that is bits but for where it begins, and over 2, 4 and 8
    bits every step between choices is as fast as the others. Choices ascend in weights and inputs together, so one λ
    says both. With `penalty="target"` the loss has κ·|cost/budget − 1| added, κ = `weight`, where the cost lies on a
    straight line between those of two choices and, of several budgets, the one counts that is met worst; λ begins where
    the budget is just met. value(c) = 2λc − c²: of two plans the nearer one is worth more.

    `penalty="linear"` is BitPruning's (Nikolić et al. 2020, "BitPruning: Learning Bitlengths for Aggressive and
    Accurate Quantization"; recalled, not read): γ·cost/budget, γ = `weight`, from the highest choice down and without
    a target. There γ decides how far; here it is not bisected, since every γ is a training: λ gives the order, and the
    budget is met by `select` instead of by rounding up.

    Otherwise than there: costs are divided by the budget, so that κ has no unit; λ has no weight decay; steps of
    quantizers are learned for each choice (LSQ unless the network has another quantizer), where FracBits has DoReFa and
    PACT; it begins at the budget and not half a bit above; what is rounded is decided by `select`.
    """

    about: ClassVar[About] = About(True, True, True, "3·T·epochs, per budget", "Yang and Jin 2020")

    penalty: Penalty = "target"
    weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("fracbits", weight=self.weight)
        if self.penalty not in get_args(Penalty):
            raise InputError(f"fracbits: penalty is target or linear, not {self.penalty!r}")

    def start(self, aim: BudgetConstraint, seed: int) -> Tensor:
        """λ, (G, 1): the same for all."""
        low, high = 0.0, float(len(aim.choices) - 1)
        for _ in range(_HALVINGS if self.penalty == "target" else 0):
            middle = (low + high) / 2
            meets = bool((aim.expected(between(_alike(aim, middle), aim)) <= 1).all())
            low, high = (middle, high) if meets else (low, middle)
        return _alike(aim, low if self.penalty == "target" else high)

    def shares(self, theta: Tensor, aim: BudgetConstraint, progress: float) -> Tensor:
        """1 − f and f, of two neighbours."""
        return between(theta, aim)

    def computed(self, theta: Tensor, aim: BudgetConstraint) -> Tensor:
        """The two neighbours, also where one of them has nothing."""
        place, lower = torch.arange(len(aim.choices), device=theta.device), _lower(theta, len(aim.choices))
        return (place == lower) | (place == lower + 1)

    def objective(self, loss: Tensor, mix: Mix, aim: BudgetConstraint) -> Tensor:
        """Loss and penalty."""
        worst = mix.cost.max()
        return loss + self.weight * ((worst - 1).abs() if self.penalty == "target" else worst)

    def values(self, theta: Tensor, aim: BudgetConstraint) -> Tensor:
        """2λc − c²."""
        place = torch.arange(len(aim.choices), dtype=torch.float64)
        return 2 * theta.double() * place - place**2

    def confine_(self, theta: Tensor, aim: BudgetConstraint) -> None:
        """Between the lowest and the highest choice."""
        theta.clamp_(0, len(aim.choices) - 1)


def between(theta: Tensor, aim: BudgetConstraint) -> Tensor:
    """λ, (G, 1) → shares of the choices, (G, C)."""
    choices = len(aim.choices)
    if choices == 1:
        return torch.ones_like(theta)
    lower = _lower(theta, choices)
    place = torch.arange(choices, device=theta.device)
    above = theta - lower  # (G, 1)
    return torch.where(place == lower, 1 - above, torch.where(place == lower + 1, above, 0.0))


def _lower(theta: Tensor, choices: int) -> Tensor:
    """The choice below λ; below the highest, the one before it."""
    return theta.detach().floor().clamp(0, max(choices - 2, 0)).long()


def _alike(aim: BudgetConstraint, level: float) -> Tensor:
    return torch.full((len(aim.groups), 1), level)
