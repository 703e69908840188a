"""Mixtures: every group has a chance for each choice, and the network computes what is to be expected of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from bitplan.core.errors import InputError
from bitplan.core.method_facts import About
from bitplan.plugins.methods.relaxations.base import Mix, Relaxation, check_positive
from bitplan.selection.budget_constraint import BudgetConstraint

Style = Literal["ssps", "dnas", "bpnas"]

_COLDEST = 0.1  # of ssps
_HOTTEST, _COOLING = 5.0, 0.025 * 90  # of dnas: 5·e^(−0.025·epoch) over 90 epochs
_POWER = 0.9  # of the cost in dnas
_BARRIER = 0.1  # its slope is several times that of a plain excess, long before the budget is reached
_MARGIN = 0.01  # of what there is between the cheapest mixture and the budget, that a barrier keeps free
_HALVINGS = 50


@dataclass(frozen=True)
class ChoiceMixture(Relaxation):
    """Every group has chances p = softmax(α/T) of its choices, and each tensor is Σ p·Q, convolved once.

    value(c) = log p_c − log p_0: the likeliest plan within the budget. Weights learn from one half of the training data
    and α from the other, in turn, unless `halves` is false. E is the cost to be expected, as a share of the budget.
    Three published ways, none with code of its authors, all recalled or second-hand; what is unknown is ours:

    "ssps" (Sun et al. 2021, "Effective and Fast: A Novel Sequential Single Path Search for Mixed-Precision
    Quantization"): the loss has κ·max(E − 1, 0) added, κ = `weight`; T falls from 1 to 0.1; a group is fixed for good
    when a choice has `certain` of it (the published threshold is not known).

    "dnas" (Wu et al. 2018, "Mixed Precision Quantization of ConvNets via Differentiable Neural Architecture Search"):
    α/T with Gumbel noise, T = 5·e^(−2.25·progress), which is e^(−0.025·epoch) over 90 epochs; the loss is multiplied by
    β·(log cost)^0.9, where β makes that 1 at the budget: the pressure is weak, and `select` meets the budget. Published
    is a mixture of outputs of layers, C times the cost; here it is one of tensors, as for the others.

    "bpnas" (Yu et al. 2020, "Search What You Want: Barrier Penalty NAS for Mixed Precision Quantization"): the loss has
    μ·(−log log(2 − E) + Σ_g Π_c (1 − p_gc)/G) added, μ = `weight`/10: a barrier that no mixture comes over, which has
    no unit since its B is 1, and a term that is 0 where every group has one choice. It begins within the budget, α
    leaning to the lower choices as far as it takes, and a step over the barrier is taken back the same way.
    """

    about: ClassVar[About] = About(
        True, True, True, "3·T·epochs, per budget", "Sun et al. 2021; Wu et al. 2018; Yu et al. 2020"
    )

    rate: float = 1.0
    style: Style = "ssps"
    weight: float = 1.0
    certain: float = 0.95
    halves: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("mixture", weight=self.weight)
        if self.style not in get_args(Style):
            raise InputError(f"mixture: style is one of {', '.join(get_args(Style))}, not {self.style!r}")
        if not 0.5 < self.certain <= 1:
            raise InputError(f"mixture: certain is a chance above 0.5, at most 1, not {self.certain}")

    @property
    def in_turn(self) -> bool:
        """As its option says."""
        return self.halves

    def start(self, aim: BudgetConstraint, seed: int) -> Tensor:
        """α, (G, C): all choices alike; before a barrier as far down as there is room on both sides."""
        alpha = torch.zeros(len(aim.groups), len(aim.choices))
        if self.style == "bpnas":
            lean_(alpha, aim, room=0.5)
        return alpha

    def shares(self, theta: Tensor, aim: BudgetConstraint, progress: float) -> Tensor:
        """Chances; in training, those of dnas are drawn."""
        if self.style == "dnas" and torch.is_grad_enabled():
            theta = theta + gumbel(theta)
        return torch.softmax(theta / self.temperature(progress), dim=1)

    def temperature(self, progress: float) -> float:
        """T, when so much of the training is done."""
        if self.style == "dnas":
            return _HOTTEST * math.exp(-_COOLING * progress)
        return _COLDEST**progress if self.style == "ssps" else 1.0

    def objective(self, loss: Tensor, mix: Mix, aim: BudgetConstraint) -> Tensor:
        """Loss and cost, as its style has them."""
        if self.style == "dnas":
            return loss * pressure(mix.cost, aim)
        if self.style == "bpnas":
            return loss + _BARRIER * self.weight * (barrier(mix.cost) + prob_one(mix.shares) / len(mix.shares))
        return loss + self.weight * (mix.cost.max() - 1).clamp_min(0)

    def values(self, theta: Tensor, aim: BudgetConstraint) -> Tensor:
        """log p at the end."""
        return torch.log_softmax(theta.double() / self.temperature(1.0), dim=1)

    def decided(self, shares: Tensor, progress: float) -> Tensor:
        """Groups of which a choice has enough."""
        return (shares.max(dim=1).values >= self.certain) & (self.style == "ssps")

    def confine_(self, theta: Tensor, aim: BudgetConstraint) -> None:
        """Before the barrier."""
        if self.style == "bpnas":
            lean_(theta, aim, room=_MARGIN)


def gumbel(like: Tensor) -> Tensor:
    """−log(−log u), drawn by the random numbers of the step."""
    tiny = torch.finfo(like.dtype).tiny
    uniform = torch.rand(like.shape, dtype=like.dtype).clamp_min(tiny)
    return -(-uniform.log()).clamp_min(tiny).log().to(like.device)


def barrier(cost: Tensor) -> Tensor:
    """−log log(B + 1 − E) with B = 1, over all budgets: 0.37 where nothing is spent, without bound as E comes to B."""
    return -torch.log(torch.log(2 - cost)).sum()


def prob_one(shares: Tensor) -> Tensor:
    """Σ_g Π_c (1 − p_gc): 0 exactly where each group has a choice that is certain."""
    return (1 - shares).prod(dim=1).sum()


def pressure(cost: Tensor, aim: BudgetConstraint) -> Tensor:
    """(log cost / log budget)^0.9 of the budget that is met worst, in its own unit: 1 where it is just met."""
    budgets = torch.as_tensor(aim.capacities, dtype=cost.dtype, device=cost.device).clamp_min(math.e)
    return ((cost * budgets).log() / budgets.log()).clamp_min(0).max() ** _POWER


@torch.no_grad()
def lean_(alpha: Tensor, aim: BudgetConstraint, *, room: float) -> None:
    """Lean α to the lower choices until E leaves that share of the way from the cheapest mixture to the budget."""
    place = torch.arange(alpha.shape[1], dtype=alpha.dtype, device=alpha.device)
    cheapest = float(
        aim.expected(torch.nn.functional.one_hot(alpha.new_zeros(len(alpha)).long(), len(place)).float()).max()
    )
    most = 1 - room * (1 - cheapest)
    if cheapest > 1 - 1e-6:
        raise InputError(
            "mixture: style=bpnas keeps the cost that is to be expected below the budget, and only the lowest choices "
            "are within it: raise the budget, or take style=ssps"
        )

    def exceeds(lean: float) -> bool:
        return bool((aim.expected(torch.softmax(alpha - lean * place, dim=1)) > most).any())

    low, high = 0.0, 1.0
    if not exceeds(low):
        return
    while exceeds(high):
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle) else (low, middle)
    alpha -= high * place
