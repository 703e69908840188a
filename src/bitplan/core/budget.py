"""A budget as people write it: 70%, memory=60%, 3.2bpw, 12ms, 2MB, or a whole number of units."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from fractions import Fraction
from typing import ClassVar, Literal, final

from bitplan.core.errors import BudgetError
from bitplan.core.precision import Precision
from bitplan.core.records import Costs, Graph

# --- The units that budgets are written in: one entry of `UNITS` each, and everything that differs between them.

Kind = Literal["share", "bits per weight", "units", "time", "energy", "memory"]
"""Amounts of one kind can be compared, in whichever of its units they are written."""

FILE = " file"
"""What the names of costs end in that count the bytes of a target's file, as in "gguf file"."""

WEIGHT_BITS = "weight bits"
"""What bits per weight limit: a cost of their own, which follows from the graph alone."""


@dataclass(frozen=True)
class Account:
    """What a network costs by one measure, as far as a budget asks.

    `highest` is the cost of all choosable groups at the highest choice, `top`; `weights` is how many weights they have;
    `fixed` is the cost of the fixed layers, but for those in `lacking`, which have no number.
    """

    cost: str
    unit: str
    top: str
    highest: int
    weights: int
    fixed: int = 0
    lacking: tuple[str, ...] = ()

    @classmethod
    def of(cls, graph: Graph, cost: Costs) -> Account:
        """Add up a cost over the layers of its graph."""
        fixed = graph.fixed_beside(cost.choices)
        return cls(
            cost=cost.name,
            unit=cost.unit,
            top=str(cost.choices[-1]),
            highest=sum(row[-1] for row in cost.rows.values()),
            weights=sum(group.weights for group in graph.selectable),
            fixed=sum(cost.fixed.values()),
            lacking=tuple(
                f"{layer.name} at {fixed[layer.name]}"
                for layer in graph.layers
                if layer.fixed and (layer.name in cost.lacking or layer.name not in cost.fixed)
            ),
        )


@dataclass(frozen=True)
class Unit(ABC):
    """A way to write an amount of a cost; `also` are other spellings of it.

    People are told `decimals` digits behind the point, also where they are 0 (`idle_zeros`); a place on an axis has
    `fine` ones. `usual` is the cost that an amount limits where none is named.
    """

    whole_numbers: ClassVar[bool] = False
    """Whether there are no fractions of it."""
    brings_cost: ClassVar[bool] = False
    """Whether it says itself what it limits."""

    written: str
    kind: Kind
    also: tuple[str, ...] = ()
    decimals: int = 0
    fine: int = 4
    idle_zeros: bool = True
    usual: str | None = None

    @abstractmethod
    def one(self, account: Account) -> Fraction:
        """How many units of the cost an amount of 1 is."""

    @abstractmethod
    def axis(self, account: Account) -> str:
        """What an axis of such amounts is called."""

    def aside(self, account: Account) -> int | None:
        """What the fixed layers take of an amount; None where they stand outside."""
        return None

    def fits(self, cost: str, unit: str) -> bool:
        """Whether it can limit the cost of that name, which counts such units."""
        return True

    def own_cost(self, graph: Graph, choices: tuple[Precision, ...]) -> Costs | None:
        """The cost that it brings with it, if it does."""
        return None

    def capacity(self, amount: Fraction, account: Account) -> int:
        """How many units of the cost an amount leaves to the choosable layers; below 0 where fixed ones take more."""
        return math.floor(amount * self.one(account)) - (self.aside(account) or 0)

    def amount(self, spent: int, account: Account) -> Fraction:
        """The reverse: the amount that so many units, spent on choosable layers, make."""
        return (spent + (self.aside(account) or 0)) / self.one(account)

    def told(self, spent: int, account: Account, *, more: int = 0, trim: bool = False) -> str:
        """What choosable layers spend, as an amount for people; with some more decimals where asked for."""
        return self.text(self.amount(spent, account), more=more, trim=trim)

    def text(self, amount: Fraction, *, more: int = 0, trim: bool = False) -> str:
        """An amount, rounded, with its unit; `trim` leaves out zeros behind the point that say nothing."""
        number = f"{float(amount):.{self.places(amount) + more}f}"
        return (number if self.idle_zeros and not trim else strip_zeros(number)) + self.written

    def enough(self, spent: int, account: Account, *, fine: bool = False) -> str:
        """What they spend, rounded up, so that a budget so written allows it; `fine` is for an axis."""
        amount = self.amount(spent, account)
        places = self.places(amount, fine=fine)
        number = f"{Decimal(math.ceil(amount * 10**places)).scaleb(-places):f}"
        return (number if self.idle_zeros and not fine else strip_zeros(number)) + self.written

    def places(self, amount: Fraction, *, fine: bool = False) -> int:
        """How many decimals an amount is told with."""
        return self.fine if fine else self.decimals

    def of(self, cost: str) -> str:
        """What it is an amount of, in words."""
        return f"of {cost}"

    @property
    def on_axis(self) -> Unit:
        """The unit that places between budgets of this one are written in."""
        return self


@final
class Share(Unit):
    """A part, in percent, of what all choosable groups cost at the highest choice."""

    def one(self, account: Account) -> Fraction:
        """A hundredth of it."""
        return Fraction(account.highest, 100)

    def axis(self, account: Account) -> str:
        """Of what, and at which precision that is all of it."""
        return f"budget, % of {account.cost} at {account.top}"


@final
class PerWeight(Unit):
    """Bits per choosable weight, on average."""

    brings_cost: ClassVar[bool] = True

    def one(self, account: Account) -> Fraction:
        """A bit for every weight."""
        counted = find_physical_unit(account.unit)
        return Fraction(account.weights, counted.size if counted else 1)

    def axis(self, account: Account) -> str:
        """The same whatever else is priced."""
        return "budget, bits per weight"

    def fits(self, cost: str, unit: str) -> bool:
        """Its own cost, or what the same weights take in a target's file, steps and zero points included."""
        return cost == WEIGHT_BITS or cost.endswith(FILE)

    def own_cost(self, graph: Graph, choices: tuple[Precision, ...]) -> Costs:
        """The bits of all weights, without steps."""
        rows = {group.name: tuple(group.weights * one.weight_bits for one in choices) for group in graph.selectable}
        return Costs(name=WEIGHT_BITS, unit="bits", choices=choices, rows=rows, graph=graph.id)


@final
class Plain(Unit):
    """A whole number in the units of the cost itself."""

    whole_numbers: ClassVar[bool] = True

    def one(self, account: Account) -> Fraction:
        """Itself."""
        return Fraction(1)

    def axis(self, account: Account) -> str:
        """What the cost counts."""
        return f"budget, {account.unit or account.cost}"

    def told(self, spent: int, account: Account, *, more: int = 0, trim: bool = False) -> str:
        """A bare number would not be understood as one of units."""
        return f"{spent} units"

    @property
    def on_axis(self) -> Unit:
        """Places between round numbers are better told as shares."""
        return UNITS["%"]


@final
@dataclass(frozen=True)
class Measured(Unit):
    """A physical quantity, asked of the whole network; `size` is how many of the smallest unit of its kind it is."""

    size: int = 1
    idle_zeros: bool = False

    def one(self, account: Account) -> Fraction:
        """Converted into what the cost counts."""
        counted = find_physical_unit(account.unit)
        assert counted is not None, f"{self.written} does not fit {account.unit}; Budget.capacity checks"
        return Fraction(self.size, counted.size)

    def axis(self, account: Account) -> str:
        """With whose amount it is."""
        return f"budget, {self.written} {self.of(account.cost)}"

    def aside(self, account: Account) -> int:
        """All of them: they run and are stored as well."""
        return account.fixed

    def fits(self, cost: str, unit: str) -> bool:
        """What counts the same kind of quantity."""
        counted = find_physical_unit(unit)
        return counted is not None and counted.kind == self.kind

    def places(self, amount: Fraction, *, fine: bool = False) -> int:
        """So many that four digits count, or seven; of what is larger, none is hidden."""
        before = math.floor(math.log10(amount)) + 1 if amount > 0 else 1
        return max(0, (7 if fine else 4) - before)

    def of(self, cost: str) -> str:
        """It must be said, because a share is of the choosable layers only."""
        return f"of {cost}, whole network"


_ALL: tuple[Unit, ...] = (
    Share("%", "share", decimals=1),
    PerWeight("bpw", "bits per weight", decimals=2, usual=WEIGHT_BITS),
    Plain("", "units"),
    Measured("ns", "time", size=1),
    Measured("us", "time", size=10**3, also=("µs", "μs")),  # the micro sign, and the Greek letter
    Measured("ms", "time", size=10**6),
    Measured("s", "time", size=10**9),
    Measured("pJ", "energy", size=1),
    Measured("nJ", "energy", size=10**3),
    Measured("uJ", "energy", size=10**6, also=("µJ", "μJ")),
    Measured("mJ", "energy", size=10**9),
    Measured("J", "energy", size=10**12),
    Measured("bits", "memory", size=1, usual="memory", also=("bit",)),
    Measured("bytes", "memory", size=8, usual="memory", also=("B", "byte")),
    Measured("kB", "memory", size=8 * 10**3, usual="memory", also=("KB",)),
    Measured("MB", "memory", size=8 * 10**6, usual="memory"),
    Measured("GB", "memory", size=8 * 10**9, usual="memory"),
    Measured("KiB", "memory", size=8 * 2**10, usual="memory"),
    Measured("MiB", "memory", size=8 * 2**20, usual="memory"),
    Measured("GiB", "memory", size=8 * 2**30, usual="memory"),
)
UNITS: dict[str, Unit] = {spelling: unit for unit in _ALL for spelling in (unit.written, *unit.also)}
"""Every spelling → its unit."""


def find_physical_unit(unit: str) -> Measured | None:
    """The physical unit that a cost counts, by its name; None where it counts something else."""
    found = UNITS.get(unit)
    return found if isinstance(found, Measured) else None


def strip_zeros(number: str) -> str:
    """A number without zeros that say nothing."""
    return number.rstrip("0").rstrip(".") if "." in number else number


def list_units(kind: Kind | None = None) -> str:
    """The units of a kind, or all that are written, as a list for people."""
    return ", ".join(unit.written for unit in _ALL if unit.written and kind in (None, unit.kind))


_WRITTEN = re.compile(r"(?:([A-Za-z_][\w.\-]*)=)?([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([^\s\d.=][^\s=]*)?")
_EXACT = Context(prec=60)
HOW = "write 70%, memory=60%, 3.2bpw, 12ms, 2MB or a whole number of units"


@dataclass(frozen=True)
class Budget:
    """An amount of one cost; what that means is its unit's business (`core/budget.py`)."""

    amount: Fraction
    unit: Unit
    cost: str | None = None

    def __str__(self) -> str:
        exact = _EXACT.divide(Decimal(self.amount.numerator), Decimal(self.amount.denominator))
        number = strip_zeros(f"{exact:f}") if self.amount.denominator > 1 else str(self.amount)
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
                f"budget {str(written)!r} cannot be read: {HOW}; {spelling!r} is none of the units {list_units()}"
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
                f"{account.unit or 'what its table does not say'}: {suggest_budgets(account)}"
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
        own, other = find_physical_unit(self.unit.written), find_physical_unit(unit.written) if unit else None
        return self.amount * (own.size if own else 1) / (other.size if other else 1)


BudgetLike = Budget | str | float | int


def suggest_budgets(account: Account) -> str:
    """What can be asked of a cost, with an example."""
    counted = find_physical_unit(account.unit)
    if counted is not None:
        return f"ask for an amount in {list_units(counted.kind)}, or for a share of it, such as {account.cost}=70%"
    if not account.unit:
        return f"say it in the table, such as `# unit: ns`, or ask for a share of it, such as {account.cost}=70%"
    return f"ask for a share of it, such as {account.cost}=70%, or for a whole number of {account.unit}"
