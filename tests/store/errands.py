"""Work that the tests send to other processes: it must live in a module that those can import."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from bitplan.core.record import Record
from bitplan.store.record_store import RecordStore


class Errand(Record):
    """A number to square."""

    number: int


class Squared(Record):
    """The answer."""

    value: int


def shelf(folder: Path) -> RecordStore[Squared]:
    """Where the answers are kept."""
    return RecordStore(folder / "jobs", Squared, folder / "leases")


@dataclass(frozen=True)
class Square:
    """Squares a number, leaving a line behind each time; can be told to fail, to die, or to take its time."""

    diary: Path
    fails: frozenset[int] = frozenset()
    dies: frozenset[int] = frozenset()
    seconds: float = 0.0

    def __call__(self, errand: Errand) -> Squared:
        line = self.diary / f"{errand.number}-{os.getpid()}-{time.monotonic_ns()}"
        line.touch()
        if errand.number in self.fails:
            raise ValueError(f"no square for {errand.number}")
        if errand.number in self.dies and len(list(self.diary.glob(f"{errand.number}-*"))) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.seconds)
        return Squared(value=errand.number**2)

    def times(self, number: int) -> int:
        """How often a number was worked on."""
        return len(list(self.diary.glob(f"{number}-*")))


def threads_of(_: int) -> int:
    """How many threads torch may use here."""
    import torch

    return torch.get_num_threads()


def always_dies(_: int) -> None:
    """Never returns."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Parameters:
    """How many a network has, and a number more."""

    model: object

    def __call__(self, errand: Errand) -> Squared:
        """Count them."""
        return Squared(value=errand.number + sum(one.numel() for one in self.model.parameters()))
