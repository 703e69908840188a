"""Measure contestants interleaved, in one process, and take the best of several rounds."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from typing import Any


def in_turn(
    contestants: Mapping[str, Callable[[], Any]], rounds: int = 5, *, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the seconds of each contestant's best round; the order is the same in every round."""
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, run in contestants.items():
            start = clock()
            run()
            best[name] = min(best.get(name, float("inf")), clock() - start)
    return best


def cpu_seconds() -> float:
    """Return the CPU time of this process, all its threads, and the processes that it waited for."""
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + waited.ru_utime + waited.ru_stime
