"""The step of weights that never learned one: `lsq`, `mse` or `absmax`, for a tensor or each run of weights.

The paper validates EAGL on learned steps only. `lsq` (LSQ's first step) does not see a layer's scale or
tails; `mse` and `absmax` do. All-zero weights get step 1, so that a step is always positive and finite.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bitplan.core.codes import code_range
from bitplan.core.errors import InputError
from bitplan.gains.counting import histogram
from bitplan.gains.counting.histogram import Distribution, Lines

Kind = Literal["lsq", "mse", "absmax"]
KINDS: tuple[Kind, ...] = ("lsq", "mse", "absmax")

Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]

_COARSE = 0.05  # logarithm of the ratio of neighbouring trial steps
_FINE = np.exp(np.linspace(-_COARSE, _COARSE, 17))
# Of max|W|/Qp: dense where the best step of many bits lies.
_FRACTIONS = np.concatenate([np.geomspace(0.1, 0.7, 28, endpoint=False), np.geomspace(0.7, 1.02, 28)]).astype(
    np.float32
)


def tensor_step(kind: Kind, bits: int, distribution: Distribution, name: str) -> np.float32:
    """One step for a whole tensor from the distribution of its weights."""
    total, top = distribution.measure()
    check_finite(total, name)
    if kind == "mse":
        return _usable(_least_squares(distribution, bits), top)
    return simple_step(kind, bits, total, top, int(distribution.counts.sum()))


def simple_step(kind: Kind, bits: int, total: float, top: float, size: int) -> np.float32:
    """`lsq`, 2·mean|W|/√Qp with Qp = 2^(b−1) − 1, or `absmax`, max|W|/Qp."""
    _, high = code_range(bits)
    step = 2 * total / max(size, 1) / math.sqrt(high) if kind == "lsq" else top / high
    return _usable(step, top)


def run_steps(kind: Kind, bits: int, lines: Lines, sizes: NDArray[np.int64], name: str) -> Floats:
    """One step for each run of weights; `sizes` are the runs' numbers of weights.

    `mse` tries max|W|/Qp times 56 fractions from 0.1 to 1.02 and refits the best to its codes: the squared
    error is within 2 % of the least one up to 4 bits, within 15 % at 8.
    """
    totals, tops = lines.measure()
    check_finite(float(totals.sum()), name)
    low, high = code_range(bits)
    if kind == "lsq":
        steps = (2 * totals / np.maximum(sizes, 1) / math.sqrt(high)).astype(np.float32)
    elif kind == "absmax":
        steps = (tops / np.float32(high)).astype(np.float32)
    else:
        steps = np.zeros(len(tops), np.float32)
        histogram.loops.fit_runs(lines.body, lines.per, _FRACTIONS, float(low), float(high), steps)
    smallest = np.finfo(np.float32).smallest_subnormal
    return np.where(tops == 0, np.float32(1), np.maximum(steps, smallest))


def check_finite(total: float, name: str) -> None:
    """Raise unless the sum of |W| is a number: no step follows from infinite weights."""
    if math.isnan(total):
        raise histogram.nan_error(name)
    if math.isinf(total):
        raise InputError(
            f"the weights {name!r} contain infinity, so no step follows from them; repair the checkpoint, "
            "or use steps that it learned"
        )


def _usable(step: float, top: float) -> np.float32:
    if top == 0:
        return np.float32(1)
    return max(np.float32(step), np.finfo(np.float32).smallest_subnormal)


def _least_squares(distribution: Distribution, bits: int) -> float:
    """The step that minimises ‖W − Q(W)‖², found on a grid and on finer ones in its three best valleys.

    For given codes q the best step is Σwq/Σq², which leaves Σw² − (Σwq)²/Σq²; trial steps are compared by
    that, so a trial only has to hit the right codes. The squared error is within 0.2 % of the least one for
    a thousand weights or more; for a handful of them at many bits, where the error is jagged, it may be
    further off.
    """
    low, high = code_range(bits)
    held = distribution.values != 0
    values = distribution.values[held].astype(np.float64)
    counts = distribution.counts[held].astype(np.float64)
    if not values.size:
        return 1.0
    sizes = np.abs(values)
    middle = float(np.log(sizes) @ counts / counts.sum())  # the geometric mean: an outlier does not move it
    least, most = middle - math.log(high + 1), math.log(float(sizes.max()) / high) + _COARSE
    trials = np.exp(np.linspace(least, most, 2 + int((most - least) / _COARSE)))
    gained, _ = _score(values, counts, trials, low, high)
    trials = (trials[_peaks(gained)[:3], None] * _FINE).ravel()
    for spread in (0.0,) if bits <= 4 else (_COARSE / 8, 0.0):  # the error of many bits is more jagged
        gained, refitted = _score(values, counts, trials, low, high)
        best = float(refitted[int(np.argmax(gained))])
        trials = best * np.exp(np.linspace(-spread, spread, 17))
    return best


def _score(values: Doubles, counts: Doubles, trials: Doubles, low: int, high: int) -> tuple[Doubles, Doubles]:
    """What each trial step's codes take off the squared error, and the step refitted to them."""
    coded = np.abs(values) > 0.49 * trials.min()  # the others have code 0 at every trial step and add nothing
    sums = np.zeros((2, trials.size))
    histogram.loops.fit(values[coded], counts[coded], 1 / trials, float(low), float(high), sums)
    cross, square = sums
    refitted = np.divide(cross, square, out=trials.copy(), where=square > 0)
    return cross * refitted * (square > 0), refitted


def _peaks(gained: Doubles) -> NDArray[np.int64]:
    """Where the gain is at least that of both neighbours, best first."""
    rising = np.append(True, gained[1:] >= gained[:-1])
    falling = np.append(gained[:-1] >= gained[1:], True)
    peaks = np.flatnonzero(rising & falling)
    return peaks[np.argsort(-gained[peaks], kind="stable")]
