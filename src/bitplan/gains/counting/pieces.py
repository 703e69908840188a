"""Many tensors cut into jobs of about a million weights, on all cores, with memory that stays small."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
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
Job = list[tuple[int, int, int]]
"""Pieces of tensors: index, start, stop."""


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

    def run(job: Job) -> int:
        for index, start, stop in job:
            totals[index].add(work(index, start, stop))
            tensors[index].done(start, stop)
        return sum(stop - start for _, start, stop in job)

    _run_all(run, jobs, progress)
    return [total.result[0] for total in totals]


def _run_all(run: Callable[[Job], int], jobs: list[Job], progress: Callable[[int], None] | None) -> None:
    """Do all jobs, on this thread and as many others as there are cores; after one that fails none begins."""
    left, lock = iter(jobs), threading.Lock()
    done: deque[int] = deque()  # weights of jobs of which `progress` was not told yet

    def next_job() -> Job | None:
        with lock:
            return next(left, None)

    def tell() -> None:
        while progress is not None and done:
            progress(done.popleft())

    def run_some(after_each: Callable[[], None]) -> None:
        try:
            for job in iter(next_job, None):
                done.append(run(job))
                after_each()
        except BaseException:
            while next_job() is not None:
                pass
            raise

    others = min(threads(), len(jobs)) - 1
    with ThreadPoolExecutor(others) if others > 0 else contextlib.nullcontext() as pool:
        running = [pool.submit(run_some, lambda: None) for _ in range(others)] if pool is not None else []
        run_some(tell)
        for one in running:
            one.result()
    tell()


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


def _batches(tensors: Sequence[Tensor], units: Sequence[int] | None, piece: int) -> Iterator[Job]:
    """Pieces in order, small ones together; an empty tensor is one empty piece."""
    batch: Job = []
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
