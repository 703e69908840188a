"""What others published, as data (`published.toml`), and beside it what follows from structure alone."""

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
    """What figures follow from: a network of the zoo and bits; `published.toml` says what each field means."""

    network: Name
    weights: int = 0
    inputs: int = 0
    ends: int | None = None
    at: dict[int, tuple[str, ...]] = {}
    floats: tuple[str, ...] = ()
    budget: float | None = None

    def bits(self, layer: Layer) -> tuple[int, int]:
        """Those of a layer's weights and inputs."""
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
        """What is lost; below 0 where it gained."""
        if self.start is None or self.score is None:
            return self.lost
        return self.start - self.score

    @property
    def cited(self) -> str:
        """Where it comes from, and single figures of it."""
        return "; ".join([self.source, *(f"{figure}: {source}" for figure, source in self.sources.items())])


class Time(Value):
    """What choosing took, as published."""

    what: Name
    network: Name
    seconds: float
    of: Name
    source: Name


class Literature(Value):
    """All that the file says; a reason that there is not is refused."""

    reasons: dict[str, str]
    figures: tuple[Publication, ...]
    times: tuple[Time, ...]

    @model_validator(mode="after")
    def _reasoned(self) -> Self:
        for row in self.figures:
            if row.why and row.why not in self.reasons:
                raise ValueError(f"{row.method}: there is no reason {row.why!r}")
        return self


@dataclass(frozen=True)
class Traced:
    """A network's structure: its layers, and how many parameters it has in all, biases and norms too."""

    graph: Graph
    parameters: int


@dataclass(frozen=True)
class Following:
    """What follows from structure; None for what does not."""

    gbops: float | None = None
    compression: float | None = None


@cache
def literature() -> Literature:
    """What the file beside this one says."""
    text = (files("bitplan.reports") / "published.toml").read_text(encoding="utf-8")
    return Literature.model_validate(parse_toml(text))


def about(of: str | None) -> tuple[Publication, ...]:
    """All figures, or those of a network or a task."""
    rows = literature().figures
    if of is None:
        return rows
    found = tuple(row for row in rows if of in (row.network, row.task))
    if not found:
        raise UnknownName("network or task", of, _names((row.network, row.task) for row in rows))
    return found


def needed(rows: Iterable[Publication]) -> tuple[str, ...]:
    """The networks, by their names in the zoo, whose structure rows want to be compared with."""
    return _names((row.structure.network,) for row in rows if row.structure)


def following(structure: Structure, traced: Traced) -> Following:
    """What bits and structure alone give, by the costs that plans are priced with."""
    if structure.budget is not None:
        return Following(gbops=_within(structure.budget / 100, traced.graph) / 1e9)
    if structure.inputs:
        return Following(gbops=sum(_bops(layer, *structure.bits(layer)) for layer in traced.graph.layers) / 1e9)
    return Following(compression=_compression(structure, traced))


def _bops(layer: Layer, weights: int, inputs: int) -> int:
    """Bit operations; those of 32-bit inputs are twice those of 16 bits, the most that a precision has."""
    told = min(inputs, LEFT_ALONE_BITS)
    return bops(layer, Precision(weight_bits=weights, act_bits=told)) * inputs // told


def _within(share: float, graph: Graph) -> float:
    """Bit operations without the ends where 4- and 2-bit layers use a share of the 4-bit BMACs in full."""
    chosen = sum(layer.macs for group in graph.selectable for layer in group.layers)
    high = (share * _HIGH - _LOW) / (_HIGH - _LOW)  # the part of the MACs at the higher precision
    fixed = sum(bops(layer, layer.fixed) for layer in graph.layers if layer.fixed and not layer.is_end)
    return chosen * (high * _HIGH**2 + (1 - high) * _LOW**2) + fixed


def _compression(structure: Structure, traced: Traced) -> float:
    """How many times fewer bits than 32 for each parameter; without `floats`, every one has the bits of weights."""
    if not structure.floats:
        return FLOAT_BITS / structure.weights
    quantized = sum(
        layer.weights
        for layer in traced.graph.layers
        if not any(fnmatchcase(layer.name, pattern) for pattern in structure.floats)
    )
    stored = quantized * structure.weights + (traced.parameters - quantized) * FLOAT_BITS
    return FLOAT_BITS * traced.parameters / stored


def published(traced: Mapping[str, Traced], of: str | None = None) -> Table:
    """For people: a row per published network, beside it what follows from structure, and notes where it does not."""
    rows, reasons = about(of), literature().reasons
    used = _names((row.why,) for row in rows if row.why)
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        found = _found(row, traced)
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


def published_values(traced: Mapping[str, Traced], of: str | None = None) -> Table:
    """For programs: the same with the task, the sources and the reasons in full."""
    reasons = literature().reasons
    cells: list[tuple[Cell, ...]] = []
    for row in about(of):
        found = _found(row, traced)
        cells.append(
            (row.method, row.network, row.task, row.weights or None, row.inputs or None, row.start, row.score, row.drop,
             row.compression, found.compression, row.gbops, found.gbops, reasons.get(row.why), row.known, row.cited)
        )  # fmt: skip
    columns = (
        *map(Column, ("method", "network", "task", "weight bits", "input bits")),
        *numbers("float", "quantized", "lost", "times smaller", "times smaller by structure", "GBOPs"),
        *numbers("GBOPs by structure"), *map(Column, ("why not", "known", "source")),
    )  # fmt: skip
    return Table("published", columns, tuple(cells))


def published_times(of: str | None = None) -> Table:
    """What choosing took, as the paper says: estimating gains, and solving the knapsack."""
    rows = literature().times
    if of is not None:
        rows = tuple(row for row in rows if row.network == of)
        if not rows:
            raise UnknownName("network", of, _names((row.network,) for row in literature().times))
    columns = (Column("what"), Column("network"), *numbers("seconds"), Column("of"), Column("source"))
    cells = tuple((row.what, row.network, _whole(row.seconds), row.of, row.source) for row in rows)
    return Table("What choosing took in the paper", columns, cells)


def _found(row: Publication, traced: Mapping[str, Traced]) -> Following:
    return following(row.structure, traced[row.structure.network]) if row.structure else Following()


def _whole(seconds: float) -> float | int:
    """Thousands of them are told to the last one."""
    return int(seconds) if seconds.is_integer() else seconds


def _names(several: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Each once, in order."""
    return tuple(dict.fromkeys(name for some in several for name in some))
