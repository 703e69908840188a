"""A budget as people write it: 70%, memory=60%, 3.2bpw, or a whole number of units."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from bitplan.core.errors import BudgetError

_WRITTEN = re.compile(r"(?:([A-Za-z_][\w.\-]*)=)?(\d+(?:\.\d+)?)\s*(%|bpw)?")
HOW = "write 70%, memory=60%, 3.2bpw or a whole number of units"


@dataclass(frozen=True)
class Budget:
    """An amount of one cost; `unit` is "%" of the highest choice, "bpw" or "" for plain units."""

    amount: Fraction
    unit: str
    cost: str | None = None

    def __str__(self) -> str:
        number = f"{float(self.amount):.15g}" if self.amount.denominator > 1 else str(self.amount)
        return f"{self.cost}={number}{self.unit}" if self.cost else f"{number}{self.unit}"

    @classmethod
    def parse(cls, written: BudgetLike) -> Budget:
        """Read "70%", 0.70 (a share), 123456 (units), "memory=60%" or "3.2bpw"."""
        if isinstance(written, Budget):
            return written
        if isinstance(written, float):
            if not 0 < written <= 1:
                raise BudgetError(f"budget {written} is not a share between 0 and 1: {HOW}")
            return cls(Fraction(str(written)) * 100, "%")
        match = _WRITTEN.fullmatch(str(written).strip())
        if match is None:
            raise BudgetError(f"budget {str(written)!r} cannot be read: {HOW}")
        cost, number, unit = match[1], Fraction(match[2]), match[3] or ""
        if not unit and number.denominator != 1:
            raise BudgetError(f"budget {str(written)!r} is neither a whole number of units nor a percentage: {HOW}")
        if unit == "bpw" and cost:
            raise BudgetError(f"budget {str(written)!r}: bits per weight is a cost of its own: write {match[2]}bpw")
        return cls(number, unit, cost)

    def capacity(self, reference: int) -> int:
        """Units this budget allows; `reference` is the whole for "%", the number of weights for bpw."""
        share = {"%": Fraction(reference, 100), "bpw": Fraction(reference), "": Fraction(1)}[self.unit]
        return math.floor(self.amount * share)


BudgetLike = Budget | str | float | int
