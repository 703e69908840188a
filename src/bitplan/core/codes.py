"""Codes: the whole numbers that quantized values are stored as; their range, and the bits that a histogram carries."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def code_range(bits: int, signed: bool = True) -> tuple[int, int]:
    """Lowest and highest code of so many bits: (−Qn, Qp) of LSQ, section 2."""
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)


def code_bits(low: int, high: int) -> int:
    """The bits of codes in a range that `code_range` gave."""
    return (high - low + 1).bit_length() - 1


def entropy(counts: ArrayLike) -> float:
    """H = −Σ p·log2 p in bits, with 0·log 0 = 0; without the paper's 1e-10."""
    return float(entropies(np.asarray(counts, np.float64)[None])[0])


def entropies(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """The entropy of each row of counts (N, codes) → (N); of nothing it is 0."""
    totals = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    p = counts / totals
    logs = np.log2(p, out=np.zeros_like(p), where=p > 0)
    bits: NDArray[np.float64] = np.abs((p * logs).sum(axis=1))
    return bits
