"""Exact histograms of quantized weights: how often each code round(clip(W/s, −2^(b−1), 2^(b−1)−1)) occurs.

Rounding is half to even. Codes are computed in fp32, by dividing by the step: multiplying by its reciprocal
misplaces ties. ±inf clamps, −0 is 0, NaN is an error. numba does the counting where it is installed, numpy
otherwise, with equal results.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from bitplan.core.codes import code_range
from bitplan.core.errors import InputError
from bitplan.gains.counting import plain
from bitplan.weights.tensors import Tensor

LINE = plain.LINE
_FEWEST_COUNTS = 16  # the loops for up to 4 bits add to as many
PREFIX_SHIFT = 13  # of 23 bits of mantissa 10 are kept: fp32 values to within 0.05 %
_EXPONENT = 0x7F800000  # the bits of the exponent of an fp32; all ones: infinity or NaN

Counts = NDArray[np.int64]
Floats = NDArray[np.float32]

log = logging.getLogger(__name__)


def _load_loops() -> ModuleType:
    try:
        from bitplan.gains.counting import compiled
    except Exception as error:  # numba absent, or unable to work with what is installed beside it
        log.info("EAGL counts with numpy, about 15 times slower, since numba does not load: %s", error)
        return plain
    return compiled


loops = _load_loops()


@dataclass(frozen=True)
class Lines:
    """fp32 weights in lines of 128, `per` lines to each run that shares a step, filled up with zeros."""

    body: Floats  # (lines, 128)
    per: int
    fill: int  # how many zeros were added

    @classmethod
    def flat(cls, values: Floats) -> tuple[Lines, ...]:
        """One run: the full lines without a copy, then the rest in a line of its own."""
        full = values.size // LINE * LINE
        rest = values.size - full
        parts = []
        if full:
            parts.append(cls(values[:full].reshape(-1, LINE), full // LINE, 0))
        if rest:
            line = np.zeros((1, LINE), np.float32)
            line[0, :rest] = values[full:]
            parts.append(cls(line, 1, LINE - rest))
        return tuple(parts)

    @classmethod
    def runs(cls, rows: Floats, run: int) -> Lines:
        """Every row (rows, width) cut into runs; a row's last run may be shorter."""
        count, width = rows.shape
        run = max(1, min(run, width))
        per = -(-run // LINE)  # rounded up
        if run % LINE == 0 and width % run == 0:
            return cls(rows.reshape(-1, LINE), per, 0)
        full, rest = divmod(width, run)
        body = np.zeros((count, full + (rest > 0), per * LINE), np.float32)  # (rows, runs of a row, weights of a run)
        body[:, :full, :run] = rows[:, : full * run].reshape(count, full, run)
        if rest:
            body[:, full, :rest] = rows[:, full * run :]
        return cls(body.reshape(-1, LINE), per, body.size - rows.size)

    def count(self, steps: Floats, bits: int, name: str) -> Counts:
        """How often each of the 2^bits codes occurs."""
        counts = np.zeros(max(_FEWEST_COUNTS, 2**bits), np.int64)
        _add_counts_(counts, self, steps, bits, name)
        return counts[: 2**bits]

    def measure(self) -> tuple[NDArray[np.float64], Floats]:
        """The sum and the maximum of |W| of every run."""
        runs = len(self.body) // self.per
        sums, tops = np.zeros(runs, np.float64), np.zeros(runs, np.float32)
        loops.measure(self.body, self.per, sums, tops)
        return sums, tops


def count_flat(values: Floats, step: np.float32, bits: int, name: str = "weights") -> Counts:
    """The histogram of fp32 weights that share one step."""
    counts = np.zeros(max(_FEWEST_COUNTS, 2**bits), np.int64)
    for lines in Lines.flat(values):
        _add_counts_(counts, lines, np.array([step], np.float32), bits, name)
    return counts[: 2**bits]


def _add_counts_(counts: Counts, lines: Lines, steps: Floats, bits: int, name: str) -> None:
    """Count the codes of all weights but the zeros that fill up lines; `steps` has one for each run."""
    low, high = map(float, code_range(bits))
    body, per = lines.body, lines.per
    if not body.size:
        return
    if bits <= 4:
        scratch, seen = np.empty((8, 64), np.uint32), np.zeros(16, np.uint32)
        has_nan = loops.count_nibbles(body, steps, per, low, high, scratch, seen, counts)
    else:
        has_nan = loops.count_codes(body, steps, per, low, high, counts)
    if has_nan:
        raise nan_error(name)
    code_of_zero = -int(low)
    counts[code_of_zero] -= lines.fill


@dataclass(frozen=True)
class Distribution:
    """Which values occur how often; exact for 16-bit weights, to within 0.05 % for fp32 ones."""

    values: Floats
    counts: Counts

    def count(self, step: np.float32, bits: int) -> Counts:
        """The histogram of codes for one step, by looking up each value's code."""
        low, high = code_range(bits)
        with np.errstate(all="ignore"):
            codes = np.rint(np.clip(self.values / step, np.float32(low), np.float32(high))).astype(np.int64)
        return np.bincount(codes - low, weights=self.counts, minlength=2**bits).astype(np.int64)

    def measure(self) -> tuple[float, float]:
        """The sum and the maximum of |W|."""
        sizes = np.abs(self.values.astype(np.float64))
        return float(np.sum(sizes * self.counts)), float(sizes.max(initial=0))


def count_patterns(tensor: Tensor, start: int, stop: int) -> Counts:
    """How often each of the 65,536 patterns occurs in part of a 16-bit tensor."""
    part: NDArray[np.uint16] = tensor.data[start:stop].view(np.uint16)
    table = np.zeros(65536, np.uint32)
    if part.ctypes.data % 2:
        part = part.copy()
    head = min(part.size, -(part.ctypes.data // 2) % 4)  # up to a multiple of 8 bytes
    tail = part.size - (part.size - head) % 4
    loops.count_patterns(part[head:tail].view(np.uint64), table)
    counts = table.astype(np.int64)
    np.add.at(counts, part[:head], 1)
    np.add.at(counts, part[tail:], 1)
    return counts


def count_prefixes(tensor: Tensor, start: int, stop: int) -> Counts:
    """How often each leading part of the pattern occurs in part of a tensor of more than 16 bits."""
    table = np.zeros(1 << (32 - PREFIX_SHIFT), np.uint32)
    loops.count_prefixes(tensor.floats(start, stop).view(np.uint32), PREFIX_SHIFT, table)
    return table.astype(np.int64)


def distribution_of(tensor: Tensor, table: Counts) -> Distribution:
    """The values behind a table of patterns (16-bit tensors) or of prefixes (the middle of each bin)."""
    patterns = np.flatnonzero(table != 0)  # five times faster than on the counts themselves
    if tensor.dtype == "F16":
        values = patterns.astype(np.uint16).view(np.float16).astype(np.float32)
    elif tensor.dtype == "BF16":
        values = (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = _middles(patterns.astype(np.uint32))
    if np.isnan(values).any():
        raise nan_error(tensor.name)
    return Distribution(values, table[patterns])


def _middles(prefixes: NDArray[np.uint32]) -> Floats:
    """The middle of each bin; the bin at 0 is 0, those of infinity and NaN are just that."""
    patterns = prefixes << np.uint32(PREFIX_SHIFT)
    is_finite = patterns & np.uint32(_EXPONENT) != _EXPONENT
    half = np.where(is_finite, 1 << (PREFIX_SHIFT - 1), 0).astype(np.uint32)
    values = (patterns | half).view(np.float32)
    without_sign = prefixes & np.uint32((1 << (31 - PREFIX_SHIFT)) - 1)
    values[without_sign == 0] = 0
    return values


def nan_error(name: str) -> InputError:
    """The error for weights that are not numbers."""
    return InputError(f"the weights {name!r} contain NaN, so they have no histogram; repair the checkpoint")
