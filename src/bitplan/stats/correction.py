"""How p-values are corrected for there being several tests; which way is in use is said here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bitplan.core.errors import InputError


@dataclass(frozen=True)
class Correction:
    """`adjust` gives corrected p-values, `floor` the least that can be left to any of tests with these floors."""

    name: str
    words: str
    adjust: Callable[[Sequence[float]], tuple[float, ...]]
    floor: Callable[[Sequence[float]], float]


def holm(values: Sequence[float]) -> tuple[float, ...]:
    """The p-values of several tests, corrected so that any one below α keeps the chance of a false one below α."""
    count = len(values)
    least_first = sorted(range(count), key=lambda index: values[index])
    adjusted = [0.0] * count
    highest = 0.0
    for done, index in enumerate(least_first):
        corrected = min(1.0, (count - done) * values[index])
        highest = max(highest, corrected)  # a greater p never has a smaller corrected one
        adjusted[index] = highest
    return tuple(adjusted)


def holm_floor(floors: Sequence[float]) -> float:
    """The least p that Holm's correction can leave to any of these tests, each with its own floor."""
    if not floors:
        raise InputError("Holm's correction needs at least one test")
    return min(1.0, len(floors) * min(floors))


CORRECTION = Correction("Holm", "Holm's correction", holm, holm_floor)
"""The one that `compare`, tables and the page use."""
