"""Many independent jobs: what an engine must be, and jobs whose outcome is a file."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from bitplan.core.errors import Fault, fault_of
from bitplan.core.registry import ENGINES

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Failure:
    """What went wrong with one item: one line, the traceback, whose fault it is, and what the error itself says."""

    error: str
    traceback: str = ""
    fault: Fault = "code"
    message: str = field(default="", compare=False)


class Engine(Protocol):
    """A frozen dataclass whose fields are its options: where, and how many at once.

    An item that fails gives a `Failure` and does not stop the others. `work` and the items must be picklable for
    engines with other processes: a module-level function, a `functools.partial` of one, or a frozen dataclass with
    `__call__`.
    """

    def run(self, work: Callable[[Item], Outcome], items: Iterable[Item]) -> Iterator[tuple[Item, Outcome | Failure]]:
        """Do the work on every item, giving each outcome as it is ready, in any order."""


def attempt(work: Callable[[Item], Outcome], item: Item) -> Outcome | Failure:
    """Do the work on one item; what it raises becomes a Failure."""
    try:
        return work(item)
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc(), fault_of(error), str(error))


def make_engine(name: str, options: Mapping[str, Any]) -> Engine:
    """The engine of that name with its options."""
    engine: Engine = ENGINES.make(name, options)
    return engine
