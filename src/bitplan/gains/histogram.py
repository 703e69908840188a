"""Count the codes round(clip(W/s, −2^(b−1), 2^(b−1)−1)) of weights: exact histograms, and steps for weights without.

Rounding is half to even. Codes are computed in fp32, by dividing by the step: multiplying by its reciprocal misplaces
ties. ±inf clamps, −0 is 0, NaN is an error. Loops are compiled by numba. They work on pieces of a tensor, so that a
file larger than memory can be counted.

The paper validates EAGL on learned steps only. For other weights `lsq` is LSQ's initial step, which does not see a
layer's scale or tails; `mse` and `absmax` do. All-zero weights get step 1.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bitplan.adapters.numba import compile_at_call
from bitplan.core.codes import code_range
from bitplan.core.errors import InputError
from bitplan.core.progress import Progress
from bitplan.weights.tensors import Layout, Rows, Tensor

Kind = Literal["lsq", "mse", "absmax"]
KINDS: tuple[Kind, ...] = ("lsq", "mse", "absmax")
Per = Literal["tensor", "channel", "group"]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Counts = NDArray[np.int64]
Histograms = tuple[Counts, ...]
_SIXTEEN_BITS = ("F16", "BF16")

PIECE = 1 << 22  # weights that are read at once
_TABLES, _CHUNK = 4, 512
_MAGIC = np.float32(1.5 * 2**23)  # adding it to a code rounds half to even and leaves the code in the lowest bits
_EXPONENT = np.uint32(0x7F800000)  # of an fp32; all ones: infinity or NaN
_PREFIX_SHIFT = 13  # of 23 bits of mantissa 10 are kept: fp32 values to within 0.05 %
_COARSE = 0.05  # logarithm of the ratio of neighbouring trial steps
_FINE = np.exp(np.linspace(-_COARSE, _COARSE, 17))
_FRACTIONS = np.concatenate(  # of max|W|/Qp: dense where the best step of many bits lies
    [np.geomspace(0.1, 0.7, 28, endpoint=False), np.geomspace(0.7, 1.02, 28)]
).astype(np.float32)


@dataclass(frozen=True)
class Weights:
    """A layer's weights. `learned` are its steps (one, or one for each output channel) at `bits` bits.

    If a quantizer does not make its codes by steps, `codes_at` returns the codes for a number of bits.
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
        channels = self.tensor.size // max(Rows.of(self.tensor.shape, self.layout).width, 1)
        if self.learned.size not in (1, channels):
            raise InputError(
                f"{self.tensor.name!r} has {self.learned.size} learned steps; one is possible, or one for "
                f"each of its {channels} output channels"
            )

    def learned_at(self, bits: int) -> Floats:
        """Return the learned steps, times 2^(b1−b2) at another precision."""
        assert self.learned is not None
        learned = self.learned.ravel()
        return learned if bits == self.bits else np.ldexp(learned, self.bits - bits).astype(np.float32)


@dataclass(frozen=True)
class Scheme:
    """The kind of step for weights that learned none, and how many of them share one."""

    kind: Kind = "mse"
    per: Per = "tensor"
    group_size: int = 128


def count_weights(
    weights: Sequence[Weights], bits: Sequence[int], scheme: Scheme, progress: Progress | None = None
) -> list[Histograms]:
    """Return for each layer the histogram of its codes at each precision; layers are shared among the cores."""
    total, done = sum(layer.tensor.size for layer in weights), 0
    histograms: list[Histograms] = []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = ThreadPoolExecutor(cores)
    try:
        by_steps = (layer for layer in weights if layer.codes_at is None)
        counted = pool.map(lambda layer: _count_layer(layer, bits, scheme), by_steps)
        for layer in weights:
            codes_at = layer.codes_at
            histograms.append(next(counted) if codes_at is None else tuple(_count_given(codes_at(b), b) for b in bits))
            done += layer.tensor.size
            if progress is not None:
                progress(done, total, "weights")
    finally:
        pool.shutdown(cancel_futures=True)  # no further layer is begun after an error
    return histograms


def _count_given(codes: NDArray[np.integer[Any]], bits: int) -> Counts:
    """Return the histogram of a quantizer's own codes; codes beyond the range of `bits` are appended."""
    low, high = code_range(bits)
    flat = codes.ravel().astype(np.int64)
    beyond = (flat < low) | (flat > high)
    counts = np.bincount(flat[~beyond] - low, minlength=high - low + 1)
    return np.concatenate([counts, np.unique(flat[beyond], return_counts=True)[1]])


def _count_layer(layer: Weights, bits: Sequence[int], scheme: Scheme) -> Histograms:
    """Return the histogram of one layer at each precision."""
    tensor, learned = layer.tensor, layer.learned
    if learned.size > 1 if learned is not None else scheme.per != "tensor":
        return _count_rows(layer, bits, scheme)
    if learned is not None:
        steps = [layer.learned_at(b) for b in bits]
    elif scheme.kind == "mse":
        distribution = distribution_of(tensor)
        steps = [least_squares_step(distribution, b) for b in bits]
        if tensor.dtype in _SIXTEEN_BITS:  # the distribution is exact
            return tuple(distribution.count(step, b) for step, b in zip(steps, bits, strict=True))
    else:
        totals, tops = _measure_tensor(tensor)
        steps = [formula_steps(scheme.kind, b, totals, tops, tensor.size) for b in bits]
    counts = [_new_tables(b) for b in bits]
    for values in _pieces(tensor):
        for b, step, tables in zip(bits, steps, counts, strict=True):
            _add_codes_(tables, values[None], values.size, step, b, tensor.name)
    return tuple(tables.sum(axis=0) for tables in counts)


def _count_rows(layer: Weights, bits: Sequence[int], scheme: Scheme) -> Histograms:
    """Return the histograms of a layer whose rows (output channels), or groups of inputs, have steps of their own."""
    tensor, shape = layer.tensor, Rows.of(layer.tensor.shape, layer.layout)
    run = shape.width  # weights of a row that share a step
    if layer.learned is None and scheme.per == "group":
        run = min(run, scheme.group_size * shape.inner)
    counts, first = [_new_tables(b) for b in bits], 0
    for values in _pieces(tensor, shape.unit):
        rows = shape.arrange(values)  # (rows, width)
        for b, tables in zip(bits, counts, strict=True):
            if layer.learned is not None:
                steps = layer.learned_at(b)[first : first + len(rows)]
            else:
                steps = run_steps(scheme.kind, b, rows, run, tensor.name)
            _add_codes_(tables, rows, run, steps, b, tensor.name)
        first += len(rows)
    return tuple(tables.sum(axis=0) for tables in counts)


def _new_tables(bits: int) -> Counts:
    """Return (tables, codes) zeros for `_count_codes`."""
    return np.zeros((_TABLES, 2**bits), np.int64)


def _add_codes_(tables: Counts, rows: Floats, run: int, steps: Floats, bits: int, name: str) -> None:
    """Count the codes of rows (rows, width) with one step for every `run` weights of a row."""
    low, high = map(np.float32, code_range(bits))
    if _count_codes(rows, run, steps, low, high, tables):
        raise nan_error(name)


def _pieces(tensor: Tensor, unit: int = 1) -> Iterator[Floats]:
    """Yield a tensor as fp32 values, in pieces of whole units whose pages may leave memory afterwards."""
    length = max(1, PIECE // max(1, unit)) * max(1, unit)
    for start in range(0, tensor.size, length):
        stop = min(start + length, tensor.size)
        yield tensor.floats(start, stop)
        tensor.done(start, stop)


def nan_error(name: str) -> InputError:
    """Return the error for weights that are not numbers."""
    return InputError(f"the weights {name!r} contain NaN, so they have no histogram; repair the checkpoint")


def formula_steps(kind: Kind, bits: int, totals: Doubles, tops: Floats, sizes: Any) -> Floats:
    """Return `lsq`, 2·mean|W|/√Qp with Qp = 2^(b−1) − 1, or `absmax`, max|W|/Qp; `totals` are sums of |W|."""
    _, high = code_range(bits)
    steps = 2 * totals / np.maximum(sizes, 1) / math.sqrt(high) if kind == "lsq" else tops.astype(np.float64) / high
    return _usable(steps, tops)


def run_steps(kind: Kind, bits: int, rows: Floats, run: int, name: str) -> Floats:
    """Return one step for every `run` weights of each row (rows, width); a row's last run may be shorter.

    `mse` tries max|W|/Qp times 56 fractions from 0.1 to 1.02 and refits the best to its codes: the squared error is
    within 2 % of the least one up to 4 bits, within 15 % at 8.
    """
    totals, tops = _measure_runs(rows, run)
    _check_finite(float(totals.sum()), name)
    if kind == "mse":
        low, high = map(np.float32, code_range(bits))
        steps = np.zeros(tops.size, np.float32)
        _fit_runs(rows, run, _FRACTIONS, low, high, steps)
        return _usable(steps, tops)
    sizes = np.minimum(rows.shape[1] - np.arange(0, rows.shape[1], run), run)
    return formula_steps(kind, bits, totals, tops, np.tile(sizes, len(rows)))


def _usable(steps: NDArray[Any], tops: Any) -> Floats:
    """Return steps as positive fp32; 1 if all weights are zero."""
    smallest = np.finfo(np.float32).smallest_subnormal
    return np.where(tops == 0, np.float32(1), np.maximum(steps.astype(np.float32), smallest))


def _measure_tensor(tensor: Tensor) -> tuple[Doubles, Floats]:
    """Return the sum and the maximum of |W|, each as an array of one."""
    total, top = np.zeros(1), np.zeros(1, np.float32)
    for values in _pieces(tensor):
        totals, tops = _measure_runs(values[None], values.size)
        total, top = total + totals, np.maximum(top, tops)
    _check_finite(float(total[0]), tensor.name)
    return total, top


def _measure_runs(rows: Floats, run: int) -> tuple[Doubles, Floats]:
    """Return the sum and the maximum of |W| of every `run` weights of each row."""
    starts = (np.arange(len(rows))[:, None] * rows.shape[1] + np.arange(0, rows.shape[1], run)).ravel()
    sizes = np.abs(rows).ravel()
    return np.add.reduceat(sizes, starts, dtype=np.float64), np.maximum.reduceat(sizes, starts)


def _check_finite(total: float, name: str) -> None:
    """Raise unless the sum of |W| is a number: no step follows from infinite weights."""
    if math.isnan(total):
        raise nan_error(name)
    if math.isinf(total):
        raise InputError(
            f"the weights {name!r} contain infinity, so no step follows from them; repair the checkpoint, "
            "or use steps that it learned"
        )


@dataclass(frozen=True)
class Distribution:
    """The values that occur in a tensor and their counts; exact for 16-bit weights, to within 0.05 % for wider ones."""

    values: Floats
    counts: Counts

    def count(self, step: Floats, bits: int) -> Counts:
        """Return the histogram of codes for one step."""
        low, high = code_range(bits)
        with np.errstate(all="ignore"):
            codes = np.rint(np.clip(self.values / step, np.float32(low), np.float32(high))).astype(np.int64)
        return np.bincount(codes - low, weights=self.counts, minlength=2**bits).astype(np.int64)


def distribution_of(tensor: Tensor) -> Distribution:
    """Count the 65,536 patterns of 16-bit weights, or the leading 19 bits of wider ones, in one pass."""
    counter = np.uint32 if tensor.size < 2**32 else np.int64
    if tensor.dtype in _SIXTEEN_BITS:
        table = np.zeros(1 << 16, counter)
        for start in range(0, tensor.size, PIECE):
            stop = min(start + PIECE, tensor.size)
            _count_patterns(np.require(tensor.data[start:stop].view(np.uint16), requirements="A"), 0, table)
            tensor.done(start, stop)
    else:
        table = np.zeros(1 << (32 - _PREFIX_SHIFT), counter)
        for piece in _pieces(tensor):
            _count_patterns(piece.view(np.uint32), _PREFIX_SHIFT, table)
    patterns = np.flatnonzero(table != 0)  # five times faster than on the counts themselves
    if tensor.dtype == "F16":
        values = patterns.astype(np.uint16).view(np.float16).astype(np.float32)
    elif tensor.dtype == "BF16":
        values = (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = _middles(patterns.astype(np.uint32))
    _check_finite(float(np.abs(values).sum(dtype=np.float64)), tensor.name)
    return Distribution(values, table[patterns].astype(np.int64))


def _middles(prefixes: NDArray[np.uint32]) -> Floats:
    """Return the middle of each bin of fp32 values; the bins of 0, infinity and NaN stay just that."""
    patterns = prefixes << np.uint32(_PREFIX_SHIFT)
    is_finite = patterns & _EXPONENT != _EXPONENT
    values = (patterns | np.where(is_finite, 1 << (_PREFIX_SHIFT - 1), 0).astype(np.uint32)).view(np.float32)
    values[patterns << np.uint32(1) == 0] = 0
    return values


def least_squares_step(distribution: Distribution, bits: int) -> Floats:
    """Return the step that minimizes ‖W − Q(W)‖², found on a grid and on finer ones in its three best valleys.

    For given codes q the best step is Σwq/Σq², which leaves Σw² − (Σwq)²/Σq². Trial steps are compared by that, so a
    trial only has to hit the right codes. The squared error is within 0.2 % of the least one for a thousand weights or
    more. It may be further off for a handful of them at many bits, where the error is jagged.
    """
    low, high = code_range(bits)
    nonzero = distribution.values != 0
    values = distribution.values[nonzero].astype(np.float64)
    counts = distribution.counts[nonzero].astype(np.float64)
    if not values.size:
        return np.ones(1, np.float32)
    sizes = np.abs(values)
    middle = float(np.log(sizes) @ counts / counts.sum())  # the geometric mean: an outlier does not move it
    least, most = middle - math.log(high + 1), math.log(float(sizes.max()) / high) + _COARSE
    trials = np.exp(np.linspace(least, most, 2 + int((most - least) / _COARSE)))
    gained, _ = _score(values, counts, trials, low, high)
    rising, falling = np.append(True, gained[1:] >= gained[:-1]), np.append(gained[:-1] >= gained[1:], True)
    peaks = np.flatnonzero(rising & falling)
    peaks = peaks[np.argsort(-gained[peaks], kind="stable")]
    trials = (trials[peaks[:3], None] * _FINE).ravel()
    best = np.ones(1)
    for spread in (0.0,) if bits <= 4 else (_COARSE / 8, 0.0):  # the error of many bits is more jagged
        gained, refitted = _score(values, counts, trials, low, high)
        best = refitted[[int(np.argmax(gained))]]
        trials = best * np.exp(np.linspace(-spread, spread, 17))
    return _usable(best, sizes.max())


def _score(values: Doubles, counts: Doubles, trials: Doubles, low: int, high: int) -> tuple[Doubles, Doubles]:
    """Return by how much each trial step's codes lower the squared error, and the step refitted to them."""
    coded = np.abs(values) > 0.49 * trials.min()  # the others have code 0 at every trial step and add nothing
    cross, square = np.zeros((2, trials.size))
    _fit(values[coded], counts[coded], 1 / trials, float(low), float(high), cross, square)
    refitted = np.divide(cross, square, out=trials.copy(), where=square > 0)
    return cross * refitted * (square > 0), refitted


@compile_at_call
def _count_codes(rows: Any, run: int, steps: Any, low: Any, high: Any, tables: Any) -> bool:
    """Add the codes of rows (rows, width) to `tables` (4, codes), and return True if a weight is NaN.

    Raising one counter again and again is slow, so neighbours take turns at the tables.
    """
    magic, mask = _MAGIC - low, np.uint32(tables.shape[1] - 1)
    codes = np.empty(_CHUNK, np.uint32)
    seen, place = np.uint32(0), 0
    for row in range(rows.shape[0]):
        for start in range(0, rows.shape[1], run):
            step, stop = steps[place], min(start + run, rows.shape[1])
            place += 1
            for first in range(start, stop, _CHUNK):
                part = rows[row, first : min(first + _CHUNK, stop)]
                for i in range(part.size):  # compiled to instructions on many numbers at once
                    code = np.float32(min(max(part[i] / step, low), high) + magic).view(np.uint32)
                    seen |= code
                    codes[i] = code & mask
                whole = part.size // _TABLES * _TABLES
                for i in range(0, whole, _TABLES):
                    for table in range(_TABLES):
                        tables[table, codes[i + table]] += 1
                for i in range(whole, part.size):
                    tables[0, codes[i]] += 1
    return bool(seen & _EXPONENT == _EXPONENT)  # NaN is the only sum whose exponent is all ones


@compile_at_call
def _count_patterns(patterns: Any, shift: int, table: Any) -> None:
    """Add how often each pattern occurs without its lowest `shift` bits."""
    for i in range(patterns.size):
        table[patterns[i] >> shift] += 1


@compile_at_call
def _fit(values: Any, counts: Any, inverses: Any, low: float, high: float, cross: Any, square: Any) -> None:
    """Add Σ n·w·q and Σ n·q² for the inverse of every trial step; q is the code of w, which occurs n times."""
    magic = 6755399441055744.0  # 1.5 · 2⁵²
    for i in range(values.size):
        for k in range(inverses.size):
            q = (min(max(values[i] * inverses[k], low), high) + magic) - magic
            cross[k] += counts[i] * values[i] * q
            square[k] += counts[i] * q * q


@compile_at_call
def _fit_runs(rows: Any, run: int, fractions: Any, low: Any, high: Any, steps: Any) -> None:
    """Write the least-squares step of every `run` weights: the best of max|W|/high · `fractions`, refitted."""
    cross, square = np.zeros(fractions.size, np.float32), np.zeros(fractions.size, np.float32)
    inverse, place = high / fractions, -1
    for row in range(rows.shape[0]):
        for start in range(0, rows.shape[1], run):
            part = rows[row, start : min(start + run, rows.shape[1])]
            place += 1
            top = np.abs(part).max()
            if top == 0:
                continue
            cross[:] = 0
            square[:] = 0
            for i in range(part.size):
                value = part[i] / top
                for t in range(inverse.size):
                    q = (min(max(value * inverse[t], low), high) + _MAGIC) - _MAGIC
                    cross[t] += value * q
                    square[t] += q * q
            best = np.argmax(np.where(square > 0, cross * cross / square, np.float32(-1)))
            if square[best] > 0:
                steps[place] = cross[best] / square[best] * top
