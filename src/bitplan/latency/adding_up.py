"""Rounds of whole networks and of their layers → the time that each layer takes at each choice."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from bitplan.core.latencies import Latency, Measuring, Mixed, Rounds, Taken, Whole
from bitplan.core.precision import Precision
from bitplan.core.records import Graph

MIXED = "mixed"
_ALIKE = 0.05  # whole networks that differ by less than this share, or than their spread, take the same time
_LEAST = 0.5  # of what raising a layer adds where all are raised


def latency_of(about: Measuring, graph: Graph, blocks: Sequence[Rounds], mixed: Mapping[str, Precision]) -> Latency:
    """Add up all rounds; `mixed` are the precisions of the network that checks the sums, empty where there is none."""
    whole = {name: _taken(_seconds(block.whole[name] for block in blocks)) for name in blocks[0].whole}
    layers = {name: _layers(name, blocks) for name in blocks[0].layers}
    sums = {name: sum(taken.ns for taken in row.values()) for name, row in layers.items()}
    scaled = {
        name: {layer: _times(taken, whole[name].ns / max(1, sums[name])) for layer, taken in row.items()}
        for name, row in layers.items()
    }
    alike = _alike({choice: whole[str(choice)] for choice in about.choices})
    rows = {
        layer.name: _row(layer.name, graph.fixed_beside(about.choices).get(layer.name), about.choices, scaled, alike)
        for layer in graph.layers
    }
    expected = sum(rows[layer][precision].ns for layer, precision in mixed.items())
    among_others = _among_others(rows, mixed, expected, whole[MIXED].ns) if mixed else 1.0
    return Latency(
        about=about,
        rounds=sum(len(block.whole[str(about.choices[0])]) for block in blocks),
        macs={layer.name: layer.macs for layer in graph.layers},
        rows={layer: _raised(row, among_others) for layer, row in rows.items()},
        whole={choice: Whole(taken=whole[str(choice)], layers=sums[str(choice)]) for choice in about.choices},
        alike=tuple(tuple(group) for group in alike if len(group) > 1),
        mixed=Mixed(expected=expected, taken=whole[MIXED], among_others=among_others) if mixed else None,
        beside=tuple(name for name in rows if all(name not in row for row in layers.values())),
    )


def _among_others(
    rows: Mapping[str, Mapping[Precision, Taken]], mixed: Mapping[str, Precision], expected: int, took: int
) -> float:
    """How many times more, or less, a raised layer adds among lowered ones than in a network where all are raised.

    Where floats and integers meet, a runtime converts and reorders, which no network at one choice does. Small networks
    were quicker than their layers, too. It is never less than `_LEAST`: one mixed network does not show that raising a
    layer is free.
    """
    added = sum(max(0, rows[layer][precision].ns - _lowest(rows[layer])) for layer, precision in mixed.items())
    return max(_LEAST, 1.0 + (took - expected) / added) if added > 0 else 1.0


def _raised(row: Mapping[Precision, Taken], times: float) -> dict[Precision, Taken]:
    """A layer's times with so many times what its choices add to the lowest, where they add something."""
    low = _lowest(row)
    return {
        choice: Taken(ns=round(low + times * (one.ns - low)), spread=one.spread) if one.ns > low else one
        for choice, one in row.items()
    }


def _lowest(row: Mapping[Precision, Taken]) -> int:
    """What a layer takes at its lowest choice."""
    return next(iter(row.values())).ns


def _row(
    layer: str,
    fixed: Precision | None,
    choices: Sequence[Precision],
    scaled: Mapping[str, Mapping[str, Taken]],
    alike: Sequence[Sequence[Precision]],
) -> dict[Precision, Taken]:
    """A layer's times; choices that take the same time share the mean of theirs, and a fixed layer has one."""
    nothing = Taken(ns=0)
    if fixed is not None:
        return {fixed: _mean([scaled[str(choice)].get(layer, nothing) for choice in choices])}
    row: dict[Precision, Taken] = {}
    for group in alike:
        row |= dict.fromkeys(group, _mean([scaled[str(choice)].get(layer, nothing) for choice in group]))
    return {choice: row[choice] for choice in choices}


def _alike(whole: Mapping[Precision, Taken]) -> list[list[Precision]]:
    """The choices, those of them together that whole networks do not tell apart by their time."""
    ordered = sorted(whole, key=lambda choice: whole[choice].ns)
    groups = [[ordered[0]]]
    for before, choice in pairwise(ordered):
        apart = whole[choice].ns - whole[groups[-1][0]].ns
        spread = max(whole[before].spread, whole[choice].spread)
        if apart > max(_ALIKE * whole[groups[-1][0]].ns, min(spread, 2 * _ALIKE * whole[choice].ns)):
            groups.append([])
        groups[-1].append(choice)
    return [[choice for choice in whole if choice in group] for group in groups]


def _layers(network: str, blocks: Sequence[Rounds]) -> dict[str, Taken]:
    names = dict.fromkeys(layer for block in blocks for layer in block.layers[network])
    found = {layer: _seconds(block.layers[network].get(layer, ()) for block in blocks) for layer in names}
    return {layer: _taken(seconds, best=True) for layer, seconds in found.items()}


def _seconds(parts: Iterable[Sequence[float]]) -> list[float]:
    return [seconds for part in parts for seconds in part]


def _taken(seconds: Sequence[float], *, best: bool = False) -> Taken:
    """The median; or of layers, whose times are the wall's, the best round, for others' programs only add to it."""
    usual = min(seconds) if best else statistics.median(seconds)
    if len(seconds) < 2:
        return Taken(ns=round(1e9 * usual))
    first, _, third = statistics.quantiles(seconds, n=4)
    return Taken(ns=round(1e9 * usual), spread=round(1e9 * (third - first)))


def _times(taken: Taken, factor: float) -> Taken:
    return Taken(ns=round(factor * taken.ns), spread=round(factor * taken.spread))


def _mean(several: Sequence[Taken]) -> Taken:
    return Taken(
        ns=round(statistics.mean(taken.ns for taken in several)),
        spread=round(statistics.mean(taken.spread for taken in several)),
    )
