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
            return {
                "method": candidate.title,
                "bits": top,
                "layers": {
                    name: {
                        str(bits): _shown(counts if bits == top else lowered(counts, top - bits))
                        for bits in sorted({choice.weight_bits for choice in choices})
                    }
                    for name, counts in counted.items()
                },
            }
    return None


def lowered(counts: Sequence[int], bits: int) -> list[int]:
    """The same weights with so many bits fewer and a step of 2^bits, as a lowered layer starts: an estimate.

    A weight lies within half a step of its code c, so its new code is c / 2^bits rounded, except where that falls
    between two codes: there a line through the neighbouring counts says how many weights lie on either side.
    """
    old = np.asarray(counts, np.int64)
    width, half = 1 << bits, len(old) // 2
    codes = np.arange(len(old)) - half
    low, rest = np.divmod(codes, width)
    before, after = np.roll(old, 1), np.roll(old, -1)
    upper = np.clip(np.rint(old / 2 - (before - after) / 16), 0, old).astype(np.int64)
    up = np.where(2 * rest == width, upper, np.where(2 * rest > width, old, 0))
    made = np.zeros(len(old) >> bits, np.int64)
    for target, amount in ((low, old - up), (low + 1, up)):
        np.add.at(made, np.minimum(target + len(made) // 2, len(made) - 1), amount)
    return [int(count) for count in made]


def short(value: float) -> float:
    """Seven digits are enough for the eye."""
    return float(f"{value:.7g}")


def _shown(counts: Sequence[int]) -> list[Any]:
    """Bars, neighbouring codes together where there are more than the eye can tell apart; and the entropy."""
    width = -(-len(counts) // MOST_BARS)
    bars = [sum(counts[start : start + width]) for start in range(0, len(counts), width)]
    return [bars, short(entropy(counts))]
