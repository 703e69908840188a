"""A budget as people write it: 70%, memory=60%, 3.2bpw, 12ms, 2MB, or a whole number of units."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from fractions import Fraction

from bitplan.core.errors import BudgetError
from bitplan.core.units import UNITS, Account, Unit, measured, spellings, trimmed

_WRITTEN = re.compile(r"(?:([A-Za-z_][\w.\-]*)=)?([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([^\s\d.=][^\s=]*)?")
_EXACT = Context(prec=60)
HOW = "write 70%, memory=60%, 3.2bpw, 12ms, 2MB or a whole number of units"


@dataclass(frozen=True)
class Budget:
    """An amount of one cost; what that means is its unit's business (`core/units.py`)."""

    amount: Fraction
    unit: Unit
    cost: str | None = None

    def __str__(self) -> str:
        exact = _EXACT.divide(Decimal(self.amount.numerator), Decimal(self.amount.denominator))
        number = trimmed(f"{exact:f}") if self.amount.denominator > 1 else str(self.amount)
        return f"{self.cost}={number}{self.unit.written}" if self.cost else f"{number}{self.unit.written}"

    def words(self, cost: str) -> str:
        """What is asked for, of which cost, and whether of the whole network: 12ms of latency, whole network."""
        return f"{replace(self, cost=None)} {self.unit.of(cost)}"

    @classmethod
    def parse(cls, written: BudgetLike) -> Budget:
        """Read "70%", 0.70 (a share), 123456 (units), "memory=60%", "3.2bpw" or "latency=12ms"."""
        if isinstance(written, Budget):
            return written
        if isinstance(written, float):
            if not 0 < written <= 1:
                raise BudgetError(f"budget {written} is not a share between 0 and 1: {HOW}")
            return cls(Fraction(str(written)) * 100, UNITS["%"])
        match = _WRITTEN.fullmatch(str(written).strip())
        if match is None:
            raise BudgetError(f"budget {str(written)!r} cannot be read: {HOW}")
        cost, number, spelling = match[1], Fraction(match[2]), match[3] or ""
        if spelling not in UNITS:
            raise BudgetError(
                f"budget {str(written)!r} cannot be read: {HOW}; {spelling!r} is none of the units {spellings()}"
            )
        unit = UNITS[spelling]
        if unit.whole_numbers and number.denominator != 1:
            raise BudgetError(f"budget {str(written)!r} is neither a whole number of units nor a percentage: {HOW}")
        if unit.brings_cost and cost:
            alone = f"{match[2]}{unit.written}"
            raise BudgetError(f"budget {str(written)!r}: {unit.kind} is a cost of its own: write {alone}")
        return cls(number, unit, cost)

    def capacity(self, account: Account) -> int:
        """Units of the cost that this budget leaves to the choosable layers."""
        self.check(account)
        return self.unit.capacity(self.amount, account)

    def check(self, account: Account) -> None:
        """Raise unless the cost counts what this budget is an amount of, for every layer that it is about."""
        if not self.unit.fits(account.cost, account.unit):
            raise BudgetError(
                f"budget {self} is an amount of {self.unit.kind}, and {account.cost} counts "
                f"{account.unit or 'what its table does not say'}: {what_fits(account)}"
            )
        if self.unit.aside(account) is not None and account.lacking:
            raise BudgetError(
                f"budget {self} is for the whole network, and {account.cost} has no number for "
                f"{len(account.lacking)} of its fixed layers ({', '.join(account.lacking)}): measure them and add them "
                "to the table, or ask for a share of the choosable layers, such as 70%"
            )

    @property
    def axis(self) -> tuple[str, str | None]:
        """Budgets lie on one axis if this is the same for all of them."""
        return self.unit.kind, self.cost

    def place(self, unit: Unit | None = None) -> Fraction:
        """Where it lies on its axis, in a unit of its kind (in the smallest one unless given)."""
        own, other = measured(self.unit.written), measured(unit.written) if unit else None
        return self.amount * (own.size if own else 1) / (other.size if other else 1)


BudgetLike = Budget | str | float | int


def what_fits(account: Account) -> str:
    """What can be asked of a cost, with an example."""
    counted = measured(account.unit)
    if counted is not None:
        return f"ask for an amount in {spellings(counted.kind)}, or for a share of it, such as {account.cost}=70%"
    if not account.unit:
        return f"say it in the table, such as `# unit: ns`, or ask for a share of it, such as {account.cost}=70%"
    return f"ask for a share of it, such as {account.cost}=70%, or for a whole number of {account.unit}"
