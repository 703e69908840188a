"""The histograms of many layers at several precisions, each tensor read as few times as its steps allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bitplan.core.errors import InputError
from bitplan.core.progress import Progress
from bitplan.gains.counting import histogram, steps
from bitplan.gains.counting.histogram import Counts, Floats, Lines
from bitplan.gains.counting.pieces import reduce_pieces
from bitplan.weights.tensors import Layout, Rows, Tensor

_TABLE_PIECE = 1 << 23  # a table of patterns is worth starting for eight million weights

Per = Literal["tensor", "channel", "group"]
Histograms = tuple[Counts, ...]


@dataclass(frozen=True)
class Weights:
    """A layer's weights; `learned` are its steps (one, or one per output channel) at `bits` bits."""

    tensor: Tensor
    layout: Layout = "out_in"
    learned: Floats | None = None
    bits: int = 0

    def __post_init__(self) -> None:
        if self.learned is None:
            return
        if not self.learned.size or not np.all(np.isfinite(self.learned) & (self.learned > 0)):
            raise InputError(f"the learned steps of {self.tensor.name!r} must be finite and above 0")
        width = Rows.of(self.tensor.shape, self.layout).width
        if self.learned.size not in (1, self.tensor.size // max(width, 1)):
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
    by_rows = [scheme.by_rows(item) for item in weights]
    kinds: list[tuple[Callable[..., list[Histograms]], list[int]]] = [
        (_count_sixteen, [i for i, item in enumerate(weights) if not by_rows[i] and item.sixteen]),
        (_count_wide, [i for i, item in enumerate(weights) if not by_rows[i] and not item.sixteen]),
        (_count_rows, [i for i in range(len(weights)) if by_rows[i]]),
    ]
    wide = [weights[i] for i in kinds[1][1]]
    total = sum(item.tensor.size for item in weights) + sum(w.tensor.size for w in wide if w.learned is None)
    told = _meter(progress, total)
    found: dict[int, Histograms] = {}
    for count, indices in kinds:
        if indices:
            part = count([weights[i] for i in indices], tuple(bits), scheme, told)
            found.update(zip(indices, part, strict=True))
    return [found[i] for i in range(len(weights))]


def _meter(progress: Progress | None, total: int) -> Callable[[int], None] | None:
    if progress is None:
        return None
    done = 0

    def told(more: int) -> None:
        nonlocal done
        done += more
        progress(done, total, "weights")

    return told


Told = Callable[[int], None] | None


def _count_sixteen(items: list[Weights], bits: tuple[int, ...], scheme: Scheme, told: Told) -> list[Histograms]:
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

    return reduce_pieces(tensors, work, finish, piece=_TABLE_PIECE, progress=told)


def _count_wide(items: list[Weights], bits: tuple[int, ...], scheme: Scheme, told: Told) -> list[Histograms]:
    """A pass to find the steps, where none were learned, and a pass to count."""
    tensors = [item.tensor for item in items]
    found = _wide_steps(items, bits, scheme, told)
    ends = np.cumsum([2**b for b in bits])[:-1]

    def work(index: int, start: int, stop: int) -> Counts:
        tensor = tensors[index]
        values = tensor.floats(start, stop)
        counted = [
            histogram.count_flat(values, step, b, tensor.name) for step, b in zip(found[index], bits, strict=True)
        ]
        return counted[0] if len(counted) == 1 else np.concatenate(counted)

    def finish(_: int, counts: Counts) -> Histograms:
        return tuple(np.split(counts, ends)) if len(ends) else (counts,)

    return reduce_pieces(tensors, work, finish, progress=told)


def _wide_steps(
    items: list[Weights], bits: tuple[int, ...], scheme: Scheme, told: Told
) -> list[tuple[np.float32, ...]]:
    found = [tuple(i.learned_at(b)[0] for b in bits) if i.learned is not None else () for i in items]
    missing = [index for index, item in enumerate(items) if item.learned is None]
    if not missing:
        return found
    tensors = [items[index].tensor for index in missing]
    find = _least_squares_steps if scheme.kind == "mse" else _simple_steps
    for index, steps_found in zip(missing, find(tensors, bits, scheme, told), strict=True):
        found[index] = steps_found
    return found


def _least_squares_steps(
    tensors: list[Tensor], bits: tuple[int, ...], scheme: Scheme, told: Told
) -> list[tuple[np.float32, ...]]:
    def finish(index: int, table: Counts) -> tuple[np.float32, ...]:
        tensor = tensors[index]
        spread = histogram.distribution_of(tensor, table)
        return tuple(steps.tensor_step("mse", b, spread, tensor.name) for b in bits)

    def work(index: int, start: int, stop: int) -> Counts:
        return histogram.count_prefixes(tensors[index], start, stop)

    return reduce_pieces(tensors, work, finish, piece=_TABLE_PIECE, progress=told)


def _simple_steps(
    tensors: list[Tensor], bits: tuple[int, ...], scheme: Scheme, told: Told
) -> list[tuple[np.float32, ...]]:
    """Sums of |W| add up and maxima do not, so each piece leaves its maximum in a list."""
    tops: list[list[float]] = [[0.0] for _ in tensors]

    def work(index: int, start: int, stop: int) -> NDArray[np.float64]:
        total = 0.0
        for lines in Lines.flat(tensors[index].floats(start, stop)):
            sums, maxima = lines.measure()
            total += float(sums[0])
            tops[index].append(float(maxima[0]))
        return np.array([total])

    def finish(index: int, total: NDArray[np.float64]) -> tuple[np.float32, ...]:
        tensor, top = tensors[index], max(tops[index])
        steps.check_finite(float(total[0]), tensor.name)
        return tuple(steps.simple_step(scheme.kind, b, float(total[0]), top, tensor.size) for b in bits)

    return reduce_pieces(tensors, work, finish, progress=told)


def _count_rows(items: list[Weights], bits: tuple[int, ...], scheme: Scheme, told: Told) -> list[Histograms]:
    """One pass over whole rows: their steps are found and their codes counted while they are at hand."""
    tensors = [item.tensor for item in items]
    rows = [Rows.of(item.tensor.shape, item.layout) for item in items]
    ends = np.cumsum([2**b for b in bits])[:-1]

    def work(index: int, start: int, stop: int) -> Counts:
        item, shape = items[index], rows[index]
        part = shape.arrange(item.tensor.floats(start, stop)) if stop > start else np.zeros((0, 1), np.float32)
        by_group = item.learned is None and scheme.per == "group"
        run = max(1, min(shape.width, scheme.group_size * shape.inner if by_group else shape.width))
        lines = Lines.runs(part, run)
        sizes = np.tile(_run_sizes(shape.width, run), len(part))
        first = start // max(shape.width, 1)
        counted = []
        for b in bits:
            if item.learned is not None:
                chosen = item.learned_at(b)[first : first + len(part)]
            else:
                chosen = steps.run_steps(scheme.kind, b, lines, sizes, item.tensor.name)
            counted.append(lines.count(chosen, b, item.tensor.name))
        return np.concatenate(counted)

    def finish(_: int, counts: Counts) -> Histograms:
        return tuple(np.split(counts, ends))

    return reduce_pieces(tensors, work, finish, units=[shape.unit for shape in rows], progress=told)


def _run_sizes(width: int, run: int) -> NDArray[np.int64]:
    whole, rest = divmod(width, run)
    return np.array([run] * whole + [rest] * (rest > 0), np.int64)
