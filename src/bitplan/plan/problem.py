"""The problem every selector solves: one choice per group, the greatest value within the capacities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitplan.core.precision import Precision

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Problem:
    """One choice per group: the greatest total value within every capacity, in whole numbers.

    values (G, C) · costs (K, G, C) · capacities (K): G groups in execution order, C choices ascending, K budgets.
    A value of 1 stands for a gain of `unit`; rounding to whole values can have cost a selection `rounding`.
    """

    groups: tuple[str, ...]
    choices: tuple[Precision, ...]
    values: Integers
    costs: Integers
    capacities: Integers
    unit: float = 1.0
    rounding: float = 0.0

    @property
    def percents(self) -> Integers:
        """One percent of what all groups cost at the highest choice, rounded up, by each budget's measure (K)."""
        whole: Integers = self.costs[:, :, -1].sum(axis=1)
        return -(-whole // 100)

    def within(self, capacities: Integers) -> Problem:
        """The same problem under other capacities."""
        return dataclasses.replace(self, capacities=capacities)


@dataclass(frozen=True)
class Selection:
    """The chosen index for every group; no other selection has a value greater by more than `gap` (None: unknown).

    `more` is what one more percent of each budget would add, if the selector knows: exactly where it lists all
    selections, otherwise by the prices of its bound.
    """

    picks: tuple[int, ...]
    gap: int | None
    more: tuple[float, ...] | None = None


Selector = Callable[[Problem], Selection]
