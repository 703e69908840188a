"""How often each code occurs among the weights of a layer, at each precision it can get, and the bits this carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitplan.core.codes import entropy
from bitplan.reports.subject import Subject

MOST_BARS = 256


def histograms(subject: Subject) -> dict[str, Any] | None:
    """The codes of every layer by weight bits, from the first method that counted them, at most 256 bars each.

    Methods count at the highest choice, `bits`; what is below is derived from that (see `lowered`).
    """
    for candidate in subject.candidates:
        counted, choices = candidate.gains.histograms, candidate.gains.choices
        if counted:
            top = choices[-1].weight_bits
            below = sorted({top - choice.weight_bits for choice in choices}, reverse=True)
            layers = {name: _by_bits(counts, top, below) for name, counts in counted.items()}
            return {"method": candidate.title, "bits": top, "layers": layers}
    return None


def _by_bits(counts: Sequence[int], top: int, below: Sequence[int]) -> dict[str, list[Any]]:
    """What is shown of a layer counted at `top` bits, at so many bits below that."""
    return {str(top - fewer): _shown(lowered(counts, fewer) if fewer else counts) for fewer in below}


def lowered(counts: Sequence[int], bits: int) -> list[int]:
    """The same weights with so many bits fewer and a step of 2^bits, as a lowered layer starts: an estimate.

    A weight lies within half a step of its code c, so its new code is c / 2^bits rounded, except where that falls
    between two codes: there a line through the neighbouring counts says how many weights lie on either side.
    """
    old = np.asarray(counts, np.int64)  # (N), and so are all below, but for `new`: (N / 2^bits)
    width = 1 << bits
    codes = np.arange(len(old)) - len(old) // 2
    lower, rest = np.divmod(codes, width)  # the new code below or at c / 2^bits, and how many old steps c is above it
    before, after = np.roll(old, 1), np.roll(old, -1)
    upper_half = np.clip(np.rint(old / 2 - (before - after) / 16), 0, old).astype(np.int64)
    rounded_up = np.where(2 * rest == width, upper_half, np.where(2 * rest > width, old, 0))
    new = np.zeros(len(old) >> bits, np.int64)
    for code, amount in ((lower, old - rounded_up), (lower + 1, rounded_up)):
        place = np.minimum(code + len(new) // 2, len(new) - 1)  # beyond the highest code, clipped to it
        np.add.at(new, place, amount)
    return [int(count) for count in new]


def short(value: float) -> float:
    """Seven digits are enough for the eye."""
    return float(f"{value:.7g}")


def _shown(counts: Sequence[int]) -> list[Any]:
    """Bars, neighbouring codes together where there are more than the eye can tell apart; and the entropy."""
    width = -(-len(counts) // MOST_BARS)
    bars = [sum(counts[start : start + width]) for start in range(0, len(counts), width)]
    return [bars, short(entropy(counts))]
