"""How the rank sums of all splits of a pooled sample are distributed: by counting them, or by inverting a transform.

A split takes `size` of the pooled ranks; all are equally likely. The share of splits with a sum of at most `observed`
is a tail of the coefficients of Π (1 + x q^rank). Few ranks are counted one by one, in whole numbers. For many, the
product is evaluated at roots of unity and transformed back, which gives the same coefficients: first each rank gets a
weight e^(a + b rank) that centres the product on what was observed, or rounding would swallow small tails; then the
product is tiny but near a few points, and a bound on its size says where it need not be evaluated. All that is left
out is below 1e-15 of the answer (docs/decisions/0030).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.int64]
Floats = NDArray[np.float64]
_TINY = 30.0  # where the product is surely below e^−30 it is left out; it is far smaller there than the bound
_TINY_FAR = 18.0  # the same where p is below 1e-12, of which five digits are enough
_FAR = 7.0  # standard deviations from the mean
_ORDERS = 4  # of the bound
_PIECE = 1 << 14  # points at which the product is evaluated at once: what a core's cache holds
_ROUNDING = 1e-13


@dataclass(frozen=True)
class Tail:
    """The share of splits with a sum of at most the observed one, and with just that one."""

    upto: float
    equal: float


def counted_tail(ranks: Ranks, size: int, observed: int) -> Tail:
    """Every split counted: exact while there are fewer than 2^53 of them."""
    counts = np.zeros((size + 1, observed + 1))  # of subsets of the ranks so far: (members, sum)
    counts[0, 0] = 1
    for rank in ranks[ranks <= observed]:
        with_rank = counts[:-1, : observed + 1 - rank].copy()  # or a rank would be taken twice
        counts[1:, rank:] += with_rank
    whole = math.comb(len(ranks), size)
    return Tail(float(counts[size].sum()) / whole, float(counts[size, observed]) / whole)


def inverted_tail(ranks: Ranks, size: int, observed: int) -> Tail:
    """The same for many ranks, by the weighted product's transform; for an observed sum up to the mean."""
    origin = int(ranks.min())
    unit = int(np.gcd.reduce(ranks - origin))
    ranks, observed = np.sort((ranks - origin) // unit), (observed - size * origin) // unit
    least, most = int(ranks[:size].sum()), int(ranks[-size:].sum())
    a, b = _weights(ranks, size, observed)
    draws = _Orders.of(ranks, a, b)
    others = len(ranks) - size
    away = (size * ranks.mean() - observed) / math.sqrt(size * others / (len(ranks) - 1) * ranks.var())
    tiny = _TINY_FAR if away > _FAR else _TINY
    reach = math.ceil(8.5 * draws.deviation) + 32  # sums that are farther than this from the observed one are unlikely
    while True:
        period = _fast_length(min(2 * reach, most - least + 1))
        sums = _transformed_back(draws, size, observed, period, tiny)  # at observed, observed − 1, …
        edge = np.abs(sums[reach - 3 : reach + 3]).max(initial=0.0) if period <= most - least else 0.0
        if edge * math.exp(b * reach) <= _ROUNDING * sums.max():
            break
        reach *= 2
    log_scale = float(np.logaddexp(0, a + b * ranks).sum()) - a * size - b * observed
    scale = math.exp(log_scale - math.log(math.comb(len(ranks), size)) + math.log(sums.max()))
    below = min(observed - least + 1, reach)
    parts = np.exp(b * np.arange(below)) * (sums[:below] / sums.max())
    return Tail(max(0.0, float(parts.sum()) * scale), float(parts[0]) * scale)


@dataclass(frozen=True)
class _Orders:
    """Independent draws of the distinct ranks, each as often as it is there, with these chances."""

    ranks: Ranks
    times: Ranks
    chances: Floats

    @classmethod
    def of(cls, ranks: Ranks, a: float, b: float) -> _Orders:
        """With the chances e^(a + b rank) to 1."""
        distinct, times = np.unique(ranks, return_counts=True)
        return cls(distinct, times, _logistic(a + b * distinct))

    @property
    def spread(self) -> Floats:
        """The variance of each."""
        spread: Floats = self.chances * (1 - self.chances)
        return spread

    @property
    def deviation(self) -> float:
        """That of the sum, where it is known how many are drawn."""
        weights = self.times * self.spread
        whole = weights.sum()
        if whole <= 0:
            return 0.0
        return math.sqrt(max(0.0, weights @ self.ranks.astype(float) ** 2 - (weights @ self.ranks) ** 2 / whole))

    def bound(self, period: int) -> Floats:
        """−log of the most that the product can be in size at each e^(2πi place/period), whatever x on the circle.

        |1 − p + p e^iθ|² = 1 − t with t = 2 p (1 − p) (1 − cos θ), and log(1 − t) ≤ −t − t²/2 − …; each power of
        1 − cos θ is a sum of cos kθ, which over all ranks are at most the size of a Fourier transform.
        """
        orders = range(1, _ORDERS + 1)
        powers = {order: self.times * self.spread**order / order for order in orders}
        least = sum(powers[order].sum() * math.comb(2 * order, order) / 2 for order in orders)
        bound = np.full(period // 2 + 1, least)
        for turn in orders:
            weights = sum(powers[order] * math.comb(2 * order, order - turn) for order in orders if order >= turn)
            bound -= np.abs(np.fft.rfft(np.bincount(turn * self.ranks % period, weights, period)))
        return bound


def _fast_length(least: int) -> int:
    """The first length from there on that is a product of 2, 3 and 5, which transforms of real numbers like."""
    whole = 30**40  # which every such number below 2^41 divides
    return next(length for length in itertools.count(least) if whole % length == 0)


def _transformed_back(draws: _Orders, size: int, observed: int, period: int, tiny: float) -> Floats:
    """P(`size` drawn, sum = observed − u) for u below the period; sums that are a period apart fall together.

    So do numbers of draws that are `members` apart, which is less likely than e^−36 (Bernstein's inequality).
    """
    drawn = int(draws.times.sum())
    members = min(drawn + 1, math.ceil(8 * math.sqrt(draws.times @ draws.spread)) + 24)
    places = np.flatnonzero(draws.bound(period) < tiny)
    turns = np.exp(2j * np.pi * np.arange(members) / members)
    back = turns[(-size * np.arange(members)) % members] / members
    found = np.zeros(period // 2 + 1, dtype=complex)
    for part in np.array_split(places, max(1, math.ceil(len(places) * members / _PIECE))):
        found[part] = back @ _products(draws, part, turns, period)
    shift = np.exp(-2j * np.pi * (np.arange(len(found)) * observed % period) / period)
    sums: Floats = np.fft.irfft(found * shift, n=period)
    return sums


def _products(draws: _Orders, places: Ranks, turns: NDArray[Any], period: int) -> NDArray[Any]:
    """Π over ranks of (1 − p + p e^(iφ) e^(iψ rank)): (φ, ψ), for φ of the turns and ψ of the places."""
    whole = np.ones((len(turns), len(places)), dtype=complex)
    factor = np.empty_like(whole)
    for times in np.unique(draws.times):
        alike = np.ones_like(whole)
        for rank, chance in zip(*(field[draws.times == times] for field in (draws.ranks, draws.chances)), strict=True):
            around = np.exp(2j * np.pi / period * (places * rank % period))
            np.multiply.outer(turns, chance * around, out=factor)
            factor += 1 - chance
            alike *= factor
        for _ in range(times):
            whole *= alike
    return whole


def _weights(ranks: Ranks, size: int, observed: int) -> tuple[float, float]:
    """a and b, about such that independent draws with chances 1/(1+e^−(a + b rank)) give `size` and `observed`.

    Any will do for the answer; these keep its digits. Newton's method on a convex function, halving steps.
    """
    middle, scale = float(ranks.mean()), float(ranks.std())
    x = (ranks - middle) / scale
    wanted = np.array([size, (observed - size * middle) / scale])
    basis = np.stack([np.ones_like(x), x])

    def height(point: Floats) -> float:
        return float(np.logaddexp(0, point @ basis).sum() - point @ wanted)

    point = np.array([math.log(size / (len(ranks) - size)), 0.0])
    for _ in range(60):
        chances = _logistic(point @ basis)
        slope = basis @ chances - wanted
        if np.abs(slope).max() < 0.05:
            break
        bend = (basis * (chances * (1 - chances))) @ basis.T
        step = np.linalg.solve(bend + 1e-9 * (1 + np.trace(bend)) * np.eye(2), slope)
        here = height(point)
        while height(point - step) > here and np.abs(step).max() > 1e-6:
            step /= 2
        point = point - step
    b = min(0.0, float(point[1]) / scale)
    return float(point[0]) - b * middle, b


def _logistic(values: Any) -> Floats:
    """1/(1 + e^−value), without overflow."""
    made: Floats = 0.5 * (1 + np.tanh(values / 2))
    return made
