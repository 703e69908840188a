"""The data of both splits, each read once, when it is first asked for."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence, Sized
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

import numpy as np

from bitplan.core.errors import InputError
from bitplan.tasks.base import Split
from bitplan.tasks.images import check_request

T = TypeVar("T", bound=Sized)
_DRAW = 0  # which samples are held out


class Splits(ABC, Generic[T]):
    """A frozen dataclass below it brings `_read`, and asks `_data`; what it reads is a list or knows its `part`."""

    def size(self, split: Split) -> int:
        """How many samples a split has."""
        return len(self._data(split))

    def hold_out(self, share: float) -> tuple[Self, Self]:
        """The task with a share of its training samples left out, and one whose test split they are."""
        whole: Any = self._data("train")
        parts: list[Any] = [
            [whole[row] for row in rows] if isinstance(whole, list) else whole.part(rows)
            for rows in held_out(len(whole), share)
        ]
        return self._with("train", parts[0]), self._with("test", parts[1])

    @abstractmethod
    def _read(self, split: Split) -> T:
        """What a split holds, from its files."""

    def _data(self, split: Split) -> T:
        check_request(split, 1)
        if split not in self._kept:
            self._kept[split] = self._read(split)
        return self._kept[split]

    def _with(self, split: Split, data: T) -> Self:
        """A copy in which a split holds this; the other is read when asked for."""
        made = copy.copy(self)
        made._kept[split] = data
        return made

    @cached_property
    def _kept(self) -> dict[Split, T]:
        return {}


def held_out(count: int, share: float) -> tuple[Sequence[int], Sequence[int]]:
    """The rows that stay and those held out, both in order: at least one of each, drawn once for all."""
    held = max(1, round(share * count))
    if held >= count:
        raise InputError(f"of {count} training samples {held} cannot be held out (held_out = {share:g}): lower it")
    ticket = np.random.RandomState(_DRAW).permutation(count)  # numpy keeps this stream for ever
    return sorted(ticket[held:].tolist()), sorted(ticket[:held].tolist())


def other_split(split: Split) -> Split:
    """The one that a split must not be mixed up with."""
    return "test" if split == "train" else "train"
