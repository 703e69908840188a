"""The data of both splits, each read once, when it is first asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sized
from functools import cached_property
from typing import Generic, TypeVar

from bitplan.tasks.base import Split
from bitplan.tasks.images import check_request

T = TypeVar("T", bound=Sized)


class Splits(ABC, Generic[T]):
    """A frozen dataclass below it brings `_read`, and asks `_data`."""

    def size(self, split: Split) -> int:
        """How many samples a split has."""
        return len(self._data(split))

    @abstractmethod
    def _read(self, split: Split) -> T:
        """What a split holds, from its files."""

    def _data(self, split: Split) -> T:
        check_request(split, 1)
        if split not in self._kept:
            self._kept[split] = self._read(split)
        return self._kept[split]

    @cached_property
    def _kept(self) -> dict[Split, T]:
        return {}


def other_split(split: Split) -> Split:
    """The one that a split must not be mixed up with."""
    return "test" if split == "train" else "train"
