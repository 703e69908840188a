"""Many tensors cut into jobs of about a million weights, on all cores, with memory that stays small."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from bitplan.weights.tensors import Tensor

PIECE = 1 << 20
T = TypeVar("T")
Work = Callable[[int, int, int], NDArray[Any]]


def reduce_pieces(
    tensors: Sequence[Tensor],
    work: Work,
    finish: Callable[[int, NDArray[Any]], T],
    *,
    units: Sequence[int] | None = None,
    piece: int = PIECE,
    progress: Callable[[int], None] | None = None,
) -> list[T]:
    """Sum `work(index, start, stop)` over the pieces of each tensor, then `finish(index, sum)`, in parallel.

    Pieces begin and end at multiples of a tensor's unit. A tensor's sum is dropped once finished, so only
    as many are alive as there are threads; `progress` is told the weights done, from the calling thread.
    """
    totals = [_Total(finish, index) for index in range(len(tensors))]
    jobs = list(_batches(tensors, units, piece))
    for job in jobs:
        for index, _, _ in job:
            totals[index].pieces += 1

    def run(job: list[tuple[int, int, int]]) -> int:
        for index, start, stop in job:
            totals[index].add(work(index, start, stop))
            tensors[index].done(start, stop)
        return sum(stop - start for _, start, stop in job)

    workers = min(threads(), len(jobs))
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(workers)) if workers > 1 else None
        try:
            for weights in map(run, jobs) if pool is None else pool.map(run, jobs):
                if progress is not None:
                    progress(weights)
        except BaseException:
            if pool is not None:
                pool.shutdown(cancel_futures=True)
            raise
    return [total.result[0] for total in totals]


def threads() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class _Total(Generic[T]):
    finish: Callable[[int, NDArray[Any]], T]
    index: int
    pieces: int = 0
    sum: NDArray[Any] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    result: list[T] = field(default_factory=list)

    def add(self, part: NDArray[Any]) -> None:
        with self.lock:
            self.sum = part if self.sum is None else np.add(self.sum, part, out=self.sum)
            self.pieces -= 1
            if self.pieces:
                return
        whole, self.sum = self.sum, None
        self.result.append(self.finish(self.index, whole))


def _batches(
    tensors: Sequence[Tensor], units: Sequence[int] | None, piece: int
) -> Iterator[list[tuple[int, int, int]]]:
    """Pieces in order, small ones together; an empty tensor is one empty piece."""
    batch: list[tuple[int, int, int]] = []
    held = 0
    for index, tensor in enumerate(tensors):
        unit = max(1, units[index] if units else 1)
        length = max(1, piece // unit) * unit
        for start in range(0, max(tensor.size, 1), length):
            stop = min(start + length, tensor.size)
            if held and held + stop - start > piece:
                yield batch
                batch, held = [], 0
            batch.append((index, start, stop))
            held += stop - start
    if batch:
        yield batch
