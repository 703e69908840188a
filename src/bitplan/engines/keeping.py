"""Worker processes that stay from one round of jobs to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bitplan.engines.workers import Pool

KEPT: ContextVar[dict[int, Pool] | None] = ContextVar("KEPT", default=None)
"""Pools that stay open, by the threads of their workers; None where none is to."""


@contextmanager
def keeping_workers() -> Iterator[None]:
    """Let every local engine keep its worker processes until the block ends: what comes in rounds starts them once.

    A worker that gets the same work again still has what it read and made for it.
    """
    if KEPT.get() is not None:  # whoever asked first keeps them
        yield
        return
    pools: dict[int, Pool] = {}
    token = KEPT.set(pools)
    try:
        yield
    finally:
        KEPT.reset(token)
        for pool in pools.values():
            pool.close()
