"""This machine: one item after the other."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar, final

from bitplan.engines.base import Failure

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


@final
@dataclass(frozen=True)
class Local:
    """In this process, in turn."""

    def run(self, work: Callable[[Item], Outcome], items: Iterable[Item]) -> Iterator[tuple[Item, Outcome | Failure]]:
        """Do the work on every item; what one raises becomes its Failure."""
        for item in items:
            try:
                yield item, work(item)
            except Exception as error:
                yield item, Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
