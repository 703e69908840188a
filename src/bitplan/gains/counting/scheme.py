"""The histograms of many layers at several precisions, each tensor read as few times as its steps allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bitplan.core.codes import code_range
from bitplan.core.errors import InputError
from bitplan.core.progress import Progress
from bitplan.gains.counting import histogram, steps
from bitplan.gains.counting.histogram import Counts, Floats, Lines
from bitplan.gains.counting.pieces import reduce_pieces
from bitplan.weights.tensors import Layout, Rows, Tensor

_FLAT_PIECE = 1 << 22  # weights that are counted where they lie: fewer jobs, fewer calls
_TABLE_PIECE = 1 << 23  # a table of patterns is worth starting for eight million weights

Per = Literal["tensor", "channel", "group"]
Histograms = tuple[Counts, ...]


@dataclass(frozen=True)
class Weights:
    """A layer's weights; `learned` are its steps (one, or one per output channel) at `bits` bits.

    Where a quantizer makes codes otherwise than by steps, `codes_at` gives those of so many bits.
    """

    tensor: Tensor
    layout: Layout = "out_in"
    learned: Floats | None = None
    bits: int = 0
    codes_at: Callable[[int], NDArray[np.integer[Any]]] | None = None

    def __post_init__(self) -> None:
        if self.learned is None:
            return
        if not self.learned.size or not all(0 < step < math.inf for step in self.learned.ravel().tolist()):
            raise InputError(f"the learned steps of {self.tensor.name!r} must be finite and above 0")
        if self.learned.size == 1:
            return
        width = Rows.of(self.tensor.shape, self.layout).width
        if self.learned.size != self.tensor.size // max(width, 1):
            raise InputError(
                f"{self.tensor.name!r} has {self.learned.size} learned steps; one is possible, or one for "
                f"each of its {self.tensor.size // max(width, 1)} output channels"
            )

    @property
    def sixteen(self) -> bool:
        """Whether the weights have 16-bit patterns."""
        return self.tensor.dtype in ("F16", "BF16")

    def learned_at(self, bits: int) -> Floats:
        """The learned steps, times 2^(b1−b2) at another precision (docs/decisions/0009, 10)."""
        assert self.learned is not None
        learned = self.learned.ravel()
        return learned if bits == self.bits else np.ldexp(learned, self.bits - bits).astype(np.float32)


@dataclass(frozen=True)
class Scheme:
    """Which step weights get that learned none, and how many of them share one."""

    kind: steps.Kind = "mse"
    per: Per = "tensor"
    group_size: int = 128

    def by_rows(self, weights: Weights) -> bool:
        """Whether a layer has more than one step."""
        return weights.learned.size > 1 if weights.learned is not None else self.per != "tensor"


def count_weights(
    weights: Sequence[Weights], bits: Sequence[int], scheme: Scheme, progress: Progress | None = None
) -> list[Histograms]:
    """For each layer the histogram of its codes at each of the precisions."""
    ways = [_way(item, scheme) for item in weights]
    advance = _meter(progress, sum(_weights_to_read(item, way) for item, way in zip(weights, ways, strict=True)))
    histograms: dict[int, Histograms] = {}
    # Layers of one way together: small ones share a job.
    for way in (_count_given, _count_sixteen, _count_wide, _count_rows):
        places = [place for place, own in enumerate(ways) if own is way]
        if places:
            counted = way([weights[place] for place in places], tuple(bits), scheme, advance)
            histograms.update(zip(places, counted, strict=True))
    return [histograms[place] for place in range(len(weights))]


Advance = Callable[[int], None] | None
"""Told after each job how many more weights are done."""
Way = Callable[[list[Weights], tuple[int, ...], Scheme, Advance], list[Histograms]]
TensorSteps = tuple[np.float32, ...]
"""The steps of a tensor, one per precision."""


def _way(item: Weights, scheme: Scheme) -> Way:
    """How a layer is counted with the fewest passes over its weights."""
    if item.codes_at is not None:
        return _count_given
    if scheme.by_rows(item):
        return _count_rows
    return _count_sixteen if item.sixteen else _count_wide


def _weights_to_read(item: Weights, way: Way) -> int:
    """How many weights the passes over a layer read; finding the step of a wide tensor is a pass of its own."""
    passes = 2 if way is _count_wide and item.learned is None else 1
    return passes * item.tensor.size


def _meter(progress: Progress | None, total: int) -> Advance:
    if progress is None:
        return None
    done = 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        progress(done, total, "weights")

    return advance


def _count_given(items: list[Weights], bits: tuple[int, ...], scheme: Scheme, advance: Advance) -> list[Histograms]:
    """The codes that quantizers give."""
    counted = []
    for item in items:
        assert item.codes_at is not None
        counted.append(tuple(_histogram(item.codes_at(b), b) for b in bits))
        if advance is not None:
            advance(item.tensor.size)
    return counted


def _histogram(codes: NDArray[np.integer[Any]], bits: int) -> Counts:
    """How often each code of so many bits is there; then each of those beyond them that a quantizer has, if any."""
    low, high = code_range(bits)
    flat = codes.ravel().astype(np.int64)
    beyond = (flat < low) | (flat > high)
    counts = np.bincount(flat[~beyond] - low, minlength=high - low + 1)
    return np.concatenate([counts, np.unique(flat[beyond], return_counts=True)[1]])


def _count_sixteen(items: list[Weights], bits: tuple[int, ...], scheme: Scheme, advance: Advance) -> list[Histograms]:
    """One pass: a table of all 65,536 patterns gives every step and every precision exactly."""
    tensors = [item.tensor for item in items]

    def finish(index: int, table: Counts) -> Histograms:
        item = items[index]
        spread = histogram.distribution_of(item.tensor, table)
        if item.learned is not None:
            return tuple(spread.count(item.learned_at(b)[0], b) for b in bits)
        name = item.tensor.name
        return tuple(spread.count(steps.tensor_step(scheme.kind, b, spread, name), b) for b in bits)

    def work(index: int, start: int, stop: int) -> Counts:
        return histogram.count_patterns(tensors[index], start, stop)

    return reduce_pieces(tensors, work, finish, piece=_TABLE_PIECE, progress=advance)


def _count_wide(items: list[Weights], bits: tuple[int, ...], scheme: Scheme, advance: Advance) -> list[Histograms]:
    """A pass to find the steps, where none were learned, and a pass to count."""
    tensors = [item.tensor for item in items]
    steps_of = _wide_steps(items, bits, scheme, advance)

    def work(index: int, start: int, stop: int) -> Counts:
        tensor = tensors[index]
        values = tensor.floats(start, stop)
        counted = [
            histogram.count_flat(values, step, b, tensor.name) for step, b in zip(steps_of[index], bits, strict=True)
        ]
        return counted[0] if len(counted) == 1 else np.concatenate(counted)

    def finish(_: int, counts: Counts) -> Histograms:
        return _by_precision(counts, bits)

    return reduce_pieces(tensors, work, finish, piece=_FLAT_PIECE, progress=advance)


def _by_precision(counts: Counts, bits: tuple[int, ...]) -> Histograms:
    """(2^b1 + 2^b2 + …,), the histograms of all precisions in one array → each by itself."""
    ends = accumulate(2**b for b in bits)
    return tuple(counts[end - 2**b : end] for b, end in zip(bits, ends, strict=True))


def _wide_steps(items: list[Weights], bits: tuple[int, ...], scheme: Scheme, advance: Advance) -> list[TensorSteps]:
    """The steps of every tensor: learned ones, or those that a pass over the tensors without any finds."""
    without = [item.tensor for item in items if item.learned is None]
    find = _least_squares_steps if scheme.kind == "mse" else _simple_steps
    derived = iter(find(without, bits, scheme, advance) if without else [])
    steps_of: list[TensorSteps] = []
    for item in items:
        if item.learned is None:
            steps_of.append(next(derived))
        else:
            steps_of.append(tuple(item.learned_at(b)[0] for b in bits))
    return steps_of


def _least_squares_steps(
    tensors: list[Tensor], bits: tuple[int, ...], scheme: Scheme, advance: Advance
) -> list[TensorSteps]:
    """`mse`: a table of prefixes per tensor, on which steps are tried instead of on the weights."""

    def finish(index: int, table: Counts) -> TensorSteps:
        tensor = tensors[index]
        spread = histogram.distribution_of(tensor, table)
        return tuple(steps.tensor_step("mse", b, spread, tensor.name) for b in bits)

    def work(index: int, start: int, stop: int) -> Counts:
        return histogram.count_prefixes(tensors[index], start, stop)

    return reduce_pieces(tensors, work, finish, piece=_TABLE_PIECE, progress=advance)


def _simple_steps(tensors: list[Tensor], bits: tuple[int, ...], scheme: Scheme, advance: Advance) -> list[TensorSteps]:
    """`lsq` or `absmax`. Sums of |W| add up and maxima do not, so each piece leaves its maximum in a list."""
    tops: list[list[float]] = [[0.0] for _ in tensors]

    def work(index: int, start: int, stop: int) -> NDArray[np.float64]:
        total = 0.0
        for lines in Lines.flat(tensors[index].floats(start, stop)):
            sums, maxima = lines.measure()
            total += float(sums[0])
            tops[index].append(float(maxima[0]))
        return np.array([total])

    def finish(index: int, sums: NDArray[np.float64]) -> TensorSteps:
        tensor, total, top = tensors[index], float(sums[0]), max(tops[index])
        steps.check_finite(total, tensor.name)
        return tuple(steps.simple_step(scheme.kind, b, total, top, tensor.size) for b in bits)

    return reduce_pieces(tensors, work, finish, progress=advance)


def _count_rows(items: list[Weights], bits: tuple[int, ...], scheme: Scheme, advance: Advance) -> list[Histograms]:
    """One pass over whole rows: their steps are found and their codes counted while they are at hand."""
    tensors = [item.tensor for item in items]
    shapes = [Rows.of(item.tensor.shape, item.layout) for item in items]

    def work(index: int, start: int, stop: int) -> Counts:
        item, shape = items[index], shapes[index]
        rows = np.zeros((0, 1), np.float32)  # a tensor without weights is one empty piece
        if stop > start:
            rows = shape.arrange(item.tensor.floats(start, stop))  # (rows, width)
        first = start // max(shape.width, 1)
        return _count_some_rows(item, shape, rows, first, bits, scheme)

    def finish(_: int, counts: Counts) -> Histograms:
        return _by_precision(counts, bits)

    return reduce_pieces(tensors, work, finish, units=[shape.unit for shape in shapes], progress=advance)


def _count_some_rows(
    item: Weights, shape: Rows, rows: Floats, first: int, bits: tuple[int, ...], scheme: Scheme
) -> Counts:
    """The histograms of some rows (rows, width) of a layer, from its row `first` on, for `_by_precision`."""
    run = _run_length(item, shape, scheme)
    lines = Lines.runs(rows, run)
    sizes = np.tile(_run_sizes(shape.width, run), len(rows))  # (runs,)
    counted = []
    for b in bits:
        if item.learned is not None:
            run_steps = item.learned_at(b)[first : first + len(rows)]  # a run is a row
        else:
            run_steps = steps.run_steps(scheme.kind, b, lines, sizes, item.tensor.name)
        counted.append(lines.count(run_steps, b, item.tensor.name))
    return np.concatenate(counted)


def _run_length(item: Weights, shape: Rows, scheme: Scheme) -> int:
    """How many weights of a row share a step: all of them, or those of a group of inputs."""
    run = shape.width
    if item.learned is None and scheme.per == "group":
        run = min(run, scheme.group_size * shape.inner)
    return max(1, run)


def _run_sizes(width: int, run: int) -> NDArray[np.int64]:
    """The number of weights in each run of a row; the last may have fewer."""
    whole, rest = divmod(width, run)
    return np.array([run] * whole + [rest] * (rest > 0), np.int64)
