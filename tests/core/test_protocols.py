"""What a thing lacks of a protocol is found and said; what a protocol has a default for is inherited."""

from abc import abstractmethod
from typing import ClassVar, Protocol

import pytest

from bitplan.core.errors import InputError
from bitplan.core.registry import check_is, find_missing_members


class Named(Protocol):
    name: str


class Walking(Named, Protocol):
    legs: ClassVar[int] = 2

    @abstractmethod
    def walk(self):
        """Go."""


class Duck(Walking):
    name = "duck"

    def walk(self):
        return self.legs


class Stone:
    name = "stone"


def test_members_are_looked_for_from_the_base_on():
    assert find_missing_members(object(), Walking) == ["name", "legs", "walk"]
    assert find_missing_members(Stone(), Walking) == find_missing_members(Stone, Walking) == ["legs", "walk"]
    assert find_missing_members(Duck(), Walking) == []
    assert find_missing_members(type("Lame", (Duck,), {"walk": None})(), Walking) == ["walk"]


def test_it_is_said_in_one_line():
    check_is(Duck(), Walking, "bird")
    said = r"^Stone is no bird, for it has no legs and no walk: derive it from test_protocols\.Walking \(docs/.*\)$"
    for stone in (Stone, Stone()):
        with pytest.raises(InputError, match=said):
            check_is(stone, Walking, "bird")
