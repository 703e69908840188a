"""price: Graph → Costs, by any function of a layer and a precision."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from bitplan.core.budget import WEIGHT_BITS, Budget, find_physical_unit
from bitplan.core.defaults import CHOICES as CHOICES
from bitplan.core.defaults import COST
from bitplan.core.errors import FileError, InputError, suggestion
from bitplan.core.latencies import Latency
from bitplan.core.precision import Precision, PrecisionLike, parse_choices
from bitplan.core.records import Costs, Graph, Layer
from bitplan.core.registry import COSTS
from bitplan.store.files import load
from bitplan.store.user_tables import Row, is_record, is_table, read_table, read_unit

Cost = Callable[[Layer, Precision], int | None]
AnyCost = TypeVar("AnyCost", bound=Cost)
log = logging.getLogger(__name__)


@runtime_checkable
class CostWithUnit(Protocol):
    """A cost with a unit; `measured_in` gives one to a function."""

    unit: str


@runtime_checkable
class FileCostLike(CostWithUnit, Protocol):
    """A cost that counts the bytes of a target's file (`costs/files.py`)."""

    target: str

    def place(self, layer: Layer, precision: Precision) -> int:
        """Return the bits of a layer's place in the file."""

    def beside(self, graph: Graph) -> dict[str, int]:
        """Return the bytes that the file holds beside the layers."""


def measured_in(unit: str) -> Callable[[AnyCost], AnyCost]:
    """Return a decorator that gives a cost function its unit."""

    def mark(cost: AnyCost) -> AnyCost:
        cost.unit = unit  # type: ignore[attr-defined]
        return cost

    return mark


def price(cost: str | Cost, graph: Graph, choices: str | Iterable[PrecisionLike] = CHOICES) -> Costs:
    """Price every group at every choice, and every fixed layer at its precision.

    `cost` is a registered name, the path of a table (`costs/base.py`) or of a measurement (`costs/base.py`), or a
    function `(layer, precision) -> int`. It may answer None for a fixed layer that it has no number for.
    """
    function, name = _find(cost)
    precisions = parse_choices(choices)
    rows = {
        group.name: tuple(sum(_whole(function, layer, choice, name) for layer in group.layers) for choice in precisions)
        for group in graph.selectable
    }
    for group, row in rows.items():
        _warn_of_dominated(group, row, precisions, name)
    fixed_at = graph.fixed_beside(precisions)
    ruled = [(layer, fixed_at[layer.name]) for layer in graph.layers if layer.fixed]
    lacking = tuple(layer.name for layer, fixed in ruled if function(layer, fixed) is None)
    return Costs(
        name=name,
        unit=function.unit if isinstance(function, CostWithUnit) else "",
        choices=precisions,
        rows=rows,
        fixed={
            layer.name: 0 if layer.name in lacking else _whole(function, layer, fixed, name) for layer, fixed in ruled
        }
        | (function.beside(graph) if isinstance(function, FileCostLike) else {}),
        lacking=lacking,
        graph=graph.id,
        target=function.target if isinstance(function, FileCostLike) else "",
        places=_places(function, graph, precisions) if isinstance(function, FileCostLike) else {},
    )


def _places(function: FileCostLike, graph: Graph, choices: tuple[Precision, ...]) -> dict[str, tuple[int, ...]]:
    """Return, for each choice of a group, the widest choice with the same place in the file, if some differ."""
    found: dict[str, tuple[int, ...]] = {}
    for group in graph.selectable:
        taken = [[function.place(layer, choice) for layer in group.layers] for choice in choices]
        widest = {tuple(place): index for index, place in enumerate(taken)}
        row = tuple(widest[tuple(place)] for place in taken)
        if row != tuple(range(len(choices))):
            found[group.name] = row
    return found


def price_for(
    budgets: Iterable[Budget], names: Sequence[str], graph: Graph, choices: str | Iterable[PrecisionLike] = CHOICES
) -> list[Costs]:
    """Return the named costs, then those that budgets limit.

    The default cost is left out if no budget limits it: bits per weight concern weights alone, and bmac would need
    activations of the same bits.
    """
    limits = list(budgets)
    left_out = list(names) == [COST] and all(_is_found(budget.cost or budget.unit.usual) for budget in limits)
    priced = [price(name, graph, choices) for name in dict.fromkeys(() if left_out else names)]
    return add_limited(priced, limits, graph, choices)


def add_limited(
    priced: Sequence[Costs], budgets: Iterable[Budget], graph: Graph, choices: str | Iterable[PrecisionLike]
) -> list[Costs]:
    """Return these costs with the registered ones that budgets name or need."""
    known = list(priced)
    for budget in budgets:
        wanted = budget.cost or budget.unit.usual
        fitting = budget.cost is None and any(budget.unit.fits(cost.name, cost.unit) for cost in known)
        if wanted in COSTS and not fitting and wanted not in [cost.name for cost in known]:
            known.append(price(str(wanted), graph, choices))
    return known


def _is_found(cost: str | None) -> bool:
    """Return True if a cost is known without a table."""
    return cost in COSTS or cost == WEIGHT_BITS


def _find(cost: str | Cost) -> tuple[Cost, str]:
    if not isinstance(cost, str):
        return cost, getattr(cost, "__name__", type(cost).__name__)
    if is_record(cost):
        return LatencyCost.read(cost), Path(cost).stem
    if is_table(cost):
        return TableCost.read(cost), Path(cost).stem
    found: Cost = COSTS.get(cost)
    return found, cost


def _whole(function: Cost, layer: Layer, precision: Precision, name: str) -> int:
    value = function(layer, precision)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{name} of {layer.name} at {precision} is {value!r}; a cost is a whole number ≥ 0")
    return value


def _warn_of_dominated(group: str, row: tuple[int, ...], choices: tuple[Precision, ...], name: str) -> None:
    """A measured cost may fall as bits rise; the lower precision is then never worth choosing."""
    for index, value in enumerate(row):
        better = next((higher for higher in range(index + 1, len(row)) if row[higher] < value), None)
        if better is not None:
            log.warning(
                "%s of %s falls from %d at %s to %d at %s: the lower precision is dominated there",
                name, group, value, choices[index], row[better], choices[better],
            )  # fmt: skip


@dataclass(frozen=True)
class TableCost:
    """A cost function that looks its values up."""

    path: str
    rows: dict[str, Row]
    unit: str = ""

    @classmethod
    def read(cls, path: str | Path) -> TableCost:
        """Read the file; values must be whole numbers ≥ 0, in whichever unit was measured (`# unit: ns` says it)."""
        rows, said = read_table(path), read_unit(path)
        for layer, row in rows.items():
            for precision, value in row.items():
                if precision is None:
                    raise FileError(f"{path}: name a precision for every cost of {layer!r}, such as w4a4")
                if not isinstance(value, int) or value < 0:
                    raise FileError(
                        f"{path}: the cost of {layer!r} at {precision} is {value}; a cost is a whole number ≥ 0 "
                        "(measure in a smaller unit, such as nanoseconds)"
                    )
        counted = find_physical_unit(said)
        return cls(str(path), rows, counted.written if counted else said)

    def __call__(self, layer: Layer, precision: Precision) -> int | None:
        """The measured cost of one layer at one precision; None for a fixed one that was not measured.

        Most budgets are about the choosable layers only, so a table need not have the others.
        """
        row = self.rows.get(layer.name, {})
        if precision in row:
            return int(row[precision])
        if layer.fixed:
            return None
        if not row:
            raise FileError(f"{self.path} has no cost for layer {layer.name!r}{suggestion(layer.name, self.rows)}")
        known = ", ".join(str(column) for column in row)
        raise FileError(f"{self.path} has no cost for {layer.name!r} at {precision}, only at {known}")


@dataclass(frozen=True)
class LatencyCost:
    """A cost function that looks its values up in a measurement."""

    path: str
    record: Latency
    unit: str = "ns"

    @classmethod
    def read(cls, path: str | Path) -> LatencyCost:
        """Read the record."""
        return cls(str(path), load(path, Latency))

    def __call__(self, layer: Layer, precision: Precision) -> int | None:
        """Return the measured time of the layer; None for a fixed layer measured at another precision."""
        row = self.record.rows.get(layer.name)
        if row is None:
            raise FileError(
                f"{self.path} has no times of layer {layer.name!r}{suggestion(layer.name, self.record.rows)}"
            )
        if self.record.macs[layer.name] != layer.macs:
            raise FileError(
                f"{self.path} was measured with {self.record.macs[layer.name]:,} MACs in {layer.name!r}, where this "
                f"graph has {layer.macs:,}: measure with the same --input"
            )
        if precision in row:
            return row[precision].ns
        if layer.fixed:
            return None
        raise FileError(
            f"{self.path} has no time of {layer.name!r} at {precision}, only at {', '.join(map(str, row))}: measure "
            "with the same --bits and --rules"
        )
