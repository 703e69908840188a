"""This machine: in this process one item after the other, or in several processes of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, final

from bitplan.core.errors import InputError
from bitplan.engines.base import Failure, attempt
from bitplan.engines.keeping import KEPT
from bitplan.engines.workers import Pool, SentWork

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
_log = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Local:
    """In this process, in turn; or, with `workers`, in that many others with `threads` threads each.

    An item whose worker dies is given to another, `retries` times at most.
    """

    workers: int = 0
    threads: int = 1
    retries: int = 2

    def __post_init__(self) -> None:
        if self.workers < 0 or self.threads < 1 or self.retries < 0:
            raise InputError(
                f"local engine: workers ({self.workers}) and retries ({self.retries}) must be at least 0, "
                f"threads ({self.threads}) at least 1"
            )

    def run(self, work: Callable[[Item], Outcome], items: Iterable[Item]) -> Iterator[tuple[Item, Outcome | Failure]]:
        """Do the work on every item; what one raises becomes its Failure."""
        if not self.workers:
            for item in items:
                yield item, attempt(work, item)
            return
        yield from self._in_processes(work, list(items))

    def _in_processes(
        self, work: Callable[[Item], Outcome], items: list[Item]
    ) -> Iterator[tuple[Item, Outcome | Failure]]:
        waiting = list(range(len(items)))[::-1]
        lost, packed = [0] * len(items), SentWork(work)
        with _pool(self.threads, min(self.workers, len(items))) as pool:
            while waiting or pool.busy:
                while waiting and pool.idle:
                    index = waiting.pop()
                    pool.give(packed, index, items[index])
                for index, outcome, death in pool.wait():
                    if death is None:
                        yield items[index], outcome
                        continue
                    lost[index] += 1
                    if lost[index] > self.retries:
                        line = f"its worker died ({death}), {lost[index]} times in all"
                        yield items[index], Failure(line, fault="worker")
                    else:
                        _log.warning("a worker died (%s): its item is tried again", death)
                        waiting.append(index)


@contextmanager
def _pool(threads: int, most: int) -> Iterator[Pool]:
    """The pool that is kept, unless somebody uses it at the same time; else one for the block alone."""
    kept = KEPT.get()
    pool = None if kept is None else kept.setdefault(threads, Pool(threads))
    if pool is not None and not pool.taken:
        with pool.taken_for(most):
            yield pool
        return
    pool = Pool(threads)
    try:
        with pool.taken_for(most):
            yield pool
    finally:
        pool.close()
