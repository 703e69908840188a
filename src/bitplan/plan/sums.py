"""The best value for every total cost, where all costs are few whole multiples of one unit.

Equal layers, or shapes that repeat, have only thousands of totals however many layers there are. A table of all of them
then takes two operations on arrays for each choice, and nothing is sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitplan.plan.problem import Integers, Problem

_TOTALS = 8_192  # that a table may have; more are quicker as a list of those that matter
_CHEAPER = 4  # times an entry of a table is cheaper than a state of a list
_ENTRIES = 10_000_000  # of all groups: 80 MB
_SMALL = 2**29  # values that add up to less fit into 32 bits, twice


@dataclass(frozen=True)
class Sums:
    """rows[g] (T): what the groups from g on are worth at most, for every total of units (G, C); values (G, C).

    A unit is the greatest common divisor of what choices cost beyond their group's lowest cost; T = the total + 1. Of
    the whole network, only totals (S) that are worth more than every smaller one matter.
    """

    units: Integers
    values: Integers
    rows: list[NDArray[np.signedinteger]]
    totals: NDArray[np.intp]

    def picks(self, state: int) -> tuple[int, ...]:
        """The choices that reach one of the totals; of several the highest in the earliest group where they differ."""
        left, picks = int(self.totals[state]), []
        choices = range(self.units.shape[1] - 1, -1, -1)
        tables = zip(self.units.tolist(), self.values.tolist(), self.rows[:-1], self.rows[1:], strict=True)
        for units, values, row, rest in tables:
            worth = int(row[left])
            others = ((pick, left - units[pick]) for pick in choices)
            pick, left = next((c, to) for c, to in others if 0 <= to < len(rest) and rest[to] + values[c] == worth)
            picks.append(pick)
        return tuple(picks)


def list_sums(problem: Problem, most: int, width: int) -> tuple[Integers, Integers, Sums] | None:
    """Costs and values of the selections that cost up to `most` and that no other beats; None with too many totals."""
    costs = problem.costs[0]
    lowest = costs.min(axis=1)
    more = costs - lowest[:, None]
    unit = max(int(np.gcd.reduce(more.ravel())), 1)
    units = more // unit
    total = min((most - int(lowest.sum())) // unit, int(units.max(axis=1).sum()))
    if not 0 <= total < min(_CHEAPER * width, _TOTALS) or (total + 1) * len(units) > _ENTRIES:
        return None
    rows = _rows(units, problem.values, total)
    best = np.maximum.accumulate(rows[0])
    totals = np.flatnonzero(np.append(True, best[1:] > best[:-1]))  # the total 0 is that of the lowest choices
    return (
        int(lowest.sum()) + totals * unit,
        rows[0][totals].astype(np.int64),
        Sums(units, problem.values, rows, totals),
    )


def _rows(units: Integers, values: Integers, total: int) -> list[NDArray[np.signedinteger]]:
    """Add groups from the last to the first; totals that no selection has are worth less than any."""
    is_small = int(np.abs(values).max(axis=1).sum()) < _SMALL
    row: NDArray[np.signedinteger] = np.zeros(1, dtype=np.int32 if is_small else np.int64)
    rows = [row]
    nothing = -2 * _SMALL if is_small else -(2**62)
    for offsets, worths in zip(units[::-1].tolist(), values[::-1].tolist(), strict=True):
        grown = np.full(min(len(row) + max(offsets), total + 1), nothing, dtype=row.dtype)
        for offset, worth in zip(offsets, worths, strict=True):
            reached = grown[offset : offset + len(row)]
            np.maximum(reached, row[: len(reached)] + worth, out=reached)
        row = grown
        rows.append(row)
    return rows[::-1]
