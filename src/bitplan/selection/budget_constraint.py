"""The aim: what a method that chooses within a budget must meet. The same for searches and for relaxations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bitplan.core.budget import BudgetLike
from bitplan.core.precision import Precision
from bitplan.core.records import Costs, Gains, Graph
from bitplan.selection.base import pose
from bitplan.selection.exact import exact
from bitplan.selection.problem import Integers, Problem, to_integers

Picks = tuple[int, ...]
"""For each group, the place of its choice among the choices."""
Repair = Literal["exact", "last"]


@dataclass(frozen=True, eq=False)
class BudgetConstraint:
    """Groups in execution order, choices ascending, what they cost, (K, G, C), and what that must not exceed, (K).

    `budgets` is what was asked for, in words.
    """

    groups: tuple[str, ...]
    choices: tuple[Precision, ...]
    costs: Integers
    capacities: Integers
    budgets: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, graph: Graph, choices: tuple[Precision, ...], costs: Costs | Iterable[Costs],
        budget: BudgetLike | Sequence[BudgetLike],
    ) -> BudgetConstraint:  # fmt: skip
        """What a budget, or several at once, leaves of costs that are priced; one that cannot be met is refused."""
        rows = {group.name: (0.0,) * len(choices) for group in graph.selectable}
        posed = pose(graph, Gains(method="aim", choices=choices, rows=rows, graph=graph.id), costs, budget)
        problem, written = posed.problem, tuple(str(one) for one in posed.budgets)
        return cls(problem.groups, problem.choices, problem.costs, problem.capacities, written)

    @property
    def top(self) -> Picks:
        """Every group at the highest choice."""
        return (len(self.choices) - 1,) * len(self.groups)

    @property
    def plans(self) -> int:
        """How many there are, within the budget or not."""
        return int(len(self.choices) ** len(self.groups))

    def cost(self, picks: Sequence[int]) -> tuple[int, ...]:
        """What picks cost, by each budget's measure."""
        chosen = self.costs[:, np.arange(len(self.groups)), list(picks)]
        return tuple(int(total) for total in chosen.sum(axis=1))

    def fits(self, picks: Sequence[int]) -> bool:
        """Whether no budget is exceeded."""
        return all(cost <= capacity for cost, capacity in zip(self.cost(picks), self.capacities, strict=True))

    @property
    def shares(self) -> NDArray[np.float64]:
        """Costs as shares of what is allowed, (K, G, C): they have no unit, and 1 in all just meets a budget."""
        return self.costs / np.maximum(self.capacities, 1)[:, None, None]

    def expected(self, chances: Any) -> Any:
        """What choices with these chances, (G, C), cost on average, (K); 1 just meets a budget.

        An array gives an array; a tensor gives a tensor, through which gradients flow.
        """
        shares = chances.new_tensor(self.shares) if hasattr(chances, "new_tensor") else self.shares
        return (shares * chances).sum((1, 2))

    def best(self, gains: NDArray[np.float64]) -> Picks:
        """The selection with the greatest total of gains, (G, C), within the budgets."""
        scaled = to_integers([tuple(row) for row in gains.tolist()])
        return exact(Problem(self.groups, self.choices, scaled.values, self.costs, self.capacities)).picks

    def rows(self, picks: Picks) -> dict[str, tuple[float, ...]]:
        """Gains, (G, C), by which this plan and no other is the best: 1 at its choices, −1 beside its lowest ones."""
        return {
            name: tuple(
                1.0 if choice == pick > 0 else 0.0 if pick > 0 or choice == 0 else -1.0
                for choice in range(len(self.choices))
            )
            for name, pick in zip(self.groups, picks, strict=True)
        }

    def lowered_groups(self, picks: Picks) -> dict[str, Precision]:
        """The groups of a plan that are below the highest choice, and what they are at."""
        top = len(self.choices) - 1
        return {name: self.choices[pick] for name, pick in zip(self.groups, picks, strict=True) if pick < top}

    def repair(self, picks: Sequence[int], by: Repair = "exact") -> Picks:
        """Picks within the budgets: these where they are.

        Else "exact" gives those that are fewest choices away in all (of equals the cheapest), and "last" takes one
        choice less from the last group backwards, again and again, as HAQ does.
        """
        given = tuple(int(pick) for pick in picks)
        if self.fits(given):
            return given
        if by == "last":
            return self.lowered(given, range(len(given) - 1, -1, -1))
        return self._nearest(given)

    def lowered(self, picks: Sequence[int], order: Sequence[int]) -> Picks:
        """One choice less for the groups in this order, again and again, until all fits."""
        now, spent = list(picks), np.array(self.cost(picks))
        while (spent > self.capacities).any():
            if not any(now):  # not even the lowest choices: they are not the cheapest, by a measured table
                return self._nearest(picks)
            for group in order:
                if now[group] and (spent > self.capacities).any():
                    now[group] -= 1
                    spent = spent + self.costs[:, group, now[group]] - self.costs[:, group, now[group] + 1]
        return tuple(now)

    def raised(self, picks: Sequence[int], order: Sequence[int]) -> Picks:
        """One choice more for the groups in this order, again and again, as far as all fits: nothing is left unused."""
        now, spent = list(picks), np.array(self.cost(picks))
        moved = True
        while moved:
            moved = False
            for group in order:
                if now[group] == len(self.choices) - 1:
                    continue
                more = spent + self.costs[:, group, now[group] + 1] - self.costs[:, group, now[group]]
                if (more <= self.capacities).all():
                    now[group], spent, moved = now[group] + 1, more, True
        return tuple(now)

    def _nearest(self, picks: Sequence[int]) -> Picks:
        away = np.abs(np.arange(len(self.choices))[None, :] - np.array(picks)[:, None])  # (G, C)
        return exact(Problem(self.groups, self.choices, -away.astype(np.int64), self.costs, self.capacities)).picks
