"""Timing in turn: what is compared runs side by side, so that whatever else the machine does falls on all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Turns(NamedTuple):
    """Of each contestant: seconds per run in every round, and how many runs a turn of it had."""

    seconds: dict[str, list[float]]
    runs: dict[str, int]


def in_turn(contestants: Mapping[str, Callable[[], Any]], rounds: int, *, least: float, threads: int) -> Turns:
    """Run all of them in turn, round after round.

    A turn takes at least `least` seconds: shorter ones measure the clock. With one thread the processor's time is
    taken, which other programs change less; else the wall's.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    runs: dict[str, int] = {}
    for name, run in contestants.items():
        run()  # the first takes longer
        start = time.perf_counter()
        run()
        runs[name] = max(1, round(least / max(1e-6, time.perf_counter() - start)))
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            start = clock()
            for _ in range(runs[name]):
                run()
            seconds[name].append((clock() - start) / runs[name])
    return Turns(seconds, runs)
