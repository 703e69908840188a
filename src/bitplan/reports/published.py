"""Figures that others published, as data (`published.toml`), beside those that follow from structure alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Literal, Self

from pydantic import model_validator

from bitplan.core.errors import UnknownName
from bitplan.core.parsing import parse_toml
from bitplan.core.precision import LEFT_ALONE_BITS, Precision
from bitplan.core.record import Value
from bitplan.core.records import Graph, Layer, Name
from bitplan.costs.standard import FLOAT_BITS, bops
from bitplan.reports.formats import Column, Table, numbers
from bitplan.reports.formats import Value as Cell

Known = Literal["paper", "public", "second-hand"]
_HIGH, _LOW = 4, 2  # bits of the paper's choices


class Structure(Value):
    """A network of the zoo and its bits; `published.toml` explains each field."""

    network: Name
    weights: int = 0
    inputs: int = 0
    ends: int | None = None
    at: dict[int, tuple[str, ...]] = {}
    floats: tuple[str, ...] = ()
    budget: float | None = None

    def bits(self, layer: Layer) -> tuple[int, int]:
        """Return the bits of a layer's weights and inputs."""
        if self.ends is not None and layer.is_end:
            return self.ends, self.ends
        for bits, patterns in self.at.items():
            if any(fnmatchcase(layer.name, pattern) for pattern in patterns):
                return bits, bits
        return self.weights, self.inputs


class Publication(Value):
    """One network of one method as published; a drop without both scores is `lost`."""

    method: Name
    network: Name
    task: Name
    start: float | None = None
    score: float | None = None
    lost: float | None = None
    compression: float | None = None
    gbops: float | None = None
    weights: str = ""
    inputs: str = ""
    known: Known
    source: Name
    sources: dict[str, str] = {}
    structure: Structure | None = None
    why: str = ""

    @property
    def drop(self) -> float | None:
        """Return the lost score; it is below 0 for a gain."""
        if self.start is None or self.score is None:
            return self.lost
        return self.start - self.score

    @property
    def citation(self) -> str:
        """Return the source, and those of single figures."""
        return "; ".join([self.source, *(f"{figure}: {source}" for figure, source in self.sources.items())])


class Time(Value):
    """The published seconds that choosing took."""

    what: Name
    network: Name
    seconds: float
    of: Name
    source: Name


class Literature(Value):
    """The content of the file; a reason that is not in it is refused."""

    reasons: dict[str, str]
    figures: tuple[Publication, ...]
    times: tuple[Time, ...]

    @model_validator(mode="after")
    def _check_reasons(self) -> Self:
        for row in self.figures:
            if row.why and row.why not in self.reasons:
                raise ValueError(f"{row.method}: there is no reason {row.why!r}")
        return self


@dataclass(frozen=True)
class Traced:
    """A network's layers, and the number of all its parameters, biases and norms included."""

    graph: Graph
    parameters: int


@dataclass(frozen=True)
class Derived:
    """Figures that follow from the structure; None if one does not."""

    gbops: float | None = None
    compression: float | None = None


@cache
def literature() -> Literature:
    """Return the content of the file beside this one."""
    text = (files("bitplan.reports") / "published.toml").read_text(encoding="utf-8")
    return Literature.model_validate(parse_toml(text))


def select_figures(of: str | None) -> tuple[Publication, ...]:
    """Return all figures, or those of a network or a task."""
    rows = literature().figures
    if of is None:
        return rows
    found = tuple(row for row in rows if of in (row.network, row.task))
    if not found:
        raise UnknownName("network or task", of, _unique((row.network, row.task) for row in rows))
    return found


def list_networks(rows: Iterable[Publication]) -> tuple[str, ...]:
    """Return the names in the zoo of the networks whose structure the rows are compared with."""
    return _unique((row.structure.network,) for row in rows if row.structure)


def derive_figures(structure: Structure, traced: Traced) -> Derived:
    """Return the figures that follow from bits and structure, by the costs that plans are priced with."""
    if structure.budget is not None:
        return Derived(gbops=_within(structure.budget / 100, traced.graph) / 1e9)
    if structure.inputs:
        return Derived(gbops=sum(_bops(layer, *structure.bits(layer)) for layer in traced.graph.layers) / 1e9)
    return Derived(compression=_compression(structure, traced))


def _bops(layer: Layer, weights: int, inputs: int) -> int:
    """Return bit operations; those of 32-bit inputs are twice those of 16 bits, the most that a precision has."""
    most = min(inputs, LEFT_ALONE_BITS)
    return bops(layer, Precision(weight_bits=weights, act_bits=most)) * inputs // most


def _within(share: float, graph: Graph) -> float:
    """Return bit operations without the ends if 4- and 2-bit layers use a share of the 4-bit BMACs in full."""
    chosen = sum(layer.macs for group in graph.selectable for layer in group.layers)
    high = (share * _HIGH - _LOW) / (_HIGH - _LOW)  # the part of the MACs at the higher precision
    fixed = sum(bops(layer, layer.fixed) for layer in graph.layers if layer.fixed and not layer.is_end)
    return chosen * (high * _HIGH**2 + (1 - high) * _LOW**2) + fixed


def _compression(structure: Structure, traced: Traced) -> float:
    """Return 32 bits over the mean bits of a parameter; without `floats`, every one has the bits of weights."""
    if not structure.floats:
        return FLOAT_BITS / structure.weights
    quantized = sum(
        layer.weights
        for layer in traced.graph.layers
        if not any(fnmatchcase(layer.name, pattern) for pattern in structure.floats)
    )
    stored = quantized * structure.weights + (traced.parameters - quantized) * FLOAT_BITS
    return FLOAT_BITS * traced.parameters / stored


def tabulate_published(traced: Mapping[str, Traced], of: str | None = None) -> Table:
    """Return a row per published network beside the figures that follow from its structure, with notes."""
    rows, reasons = select_figures(of), literature().reasons
    used = _unique((row.why,) for row in rows if row.why)
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        found = _derive(row, traced)
        note = f"note {used.index(row.why) + 1}" if row.why else None
        bits = f"{row.weights or '?'} / {row.inputs or '?'}" if row.weights or row.inputs else None
        cells.append(
            (row.method, row.network, bits, row.start, row.score, row.drop, row.compression, found.compression,
             row.gbops, found.gbops, note, row.known)
        )  # fmt: skip
    columns = (
        Column("method"), Column("network"), Column("bits w / a"), *numbers("float", "quantized", "lost", digits=2),
        *numbers("× smaller", "by structure", digits=2), *numbers("GBOPs"), *numbers("by structure", digits=1),
        Column("why not"), Column("known"),
    )  # fmt: skip
    notes = tuple(f"note {number + 1}: {reasons[name]}" for number, name in enumerate(used))
    return Table("What others published, and what follows of it from structure alone", columns, tuple(cells), notes)


def tabulate_published_values(traced: Mapping[str, Traced], of: str | None = None) -> Table:
    """Return the same rows with the task, the sources and the reasons in full."""
    reasons = literature().reasons
    cells: list[tuple[Cell, ...]] = []
    for row in select_figures(of):
        found = _derive(row, traced)
        cells.append(
            (row.method, row.network, row.task, row.weights or None, row.inputs or None, row.start, row.score, row.drop,
             row.compression, found.compression, row.gbops, found.gbops, reasons.get(row.why), row.known, row.citation)
        )  # fmt: skip
    columns = (
        *map(Column, ("method", "network", "task", "weight bits", "input bits")),
        *numbers("float", "quantized", "lost", "times smaller", "times smaller by structure", "GBOPs"),
        *numbers("GBOPs by structure"), *map(Column, ("why not", "known", "source")),
    )  # fmt: skip
    return Table("published", columns, tuple(cells))


def tabulate_published_times(of: str | None = None) -> Table:
    """Return the seconds that the paper reports for estimating gains and solving the knapsack."""
    rows = literature().times
    if of is not None:
        rows = tuple(row for row in rows if row.network == of)
        if not rows:
            raise UnknownName("network", of, _unique((row.network,) for row in literature().times))
    columns = (Column("what"), Column("network"), *numbers("seconds"), Column("of"), Column("source"))
    cells = tuple((row.what, row.network, _drop_zeros(row.seconds), row.of, row.source) for row in rows)
    return Table("What choosing took in the paper", columns, cells)


def _derive(row: Publication, traced: Mapping[str, Traced]) -> Derived:
    return derive_figures(row.structure, traced[row.structure.network]) if row.structure else Derived()


def _drop_zeros(seconds: float) -> float | int:
    """Return whole seconds as an integer, which tables print to the last digit."""
    return int(seconds) if seconds.is_integer() else seconds


def _unique(several: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return each name once, in order."""
    return tuple(dict.fromkeys(name for some in several for name in some))
