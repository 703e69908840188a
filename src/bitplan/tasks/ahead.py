"""Batches that are decoded in threads while the one before is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
_AHEAD = 2  # batches that are being decoded while one is used


def read_ahead(batches: Iterable[Sequence[Callable[[], T]]], workers: int) -> Iterator[list[T]]:
    """What the jobs of each batch return, in order; what is random must be drawn before, threads have no order."""
    waiting = iter(batches)
    with ThreadPoolExecutor(workers) as pool:
        ahead: deque[list[Future[T]]] = deque()
        try:
            while True:
                for jobs in islice(waiting, 1 + _AHEAD - len(ahead)):
                    ahead.append([pool.submit(job) for job in jobs])
                if not ahead:
                    return
                yield [future.result() for future in ahead.popleft()]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
