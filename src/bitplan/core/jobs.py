"""Job and Outcome: a piece of work on a network that a method hands out, and the numbers that came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import JsonValue

from bitplan.core.precision import Precision
from bitplan.core.record import Record
from bitplan.core.records import Count, Name
from bitplan.core.spend import Spend
from bitplan.core.trials import NotNegative, Recipe

Numbers = Mapping[str, Sequence[float]]
"""The numbers that a function finds for a job, by name."""


class Job(Record):
    """A piece of work on a network, with everything that its outcome depends on. Its id names the file of its outcome.

    `work` names the function that does it. `groups` are lowered, their `layers` to these precisions. `network`,
    `weights`, `task` and `teacher` identify what it runs on, by hashes and titles. A job that trains has a `recipe`.
    A job on batches says how many there are, drawn by `seed`; `first` and `count` are its part of the samples, probes
    or layers. `members` are the layers of groups, `options` are the method's. `label` is for people.
    """

    outside_id: ClassVar[frozenset[str]] = Record.outside_id | {"label"}

    work: Name
    network: str
    weights: str
    task: str
    task_options: dict[str, str] = {}
    seed: int
    groups: tuple[Name, ...] = ()
    layers: dict[Name, Precision] = {}
    recipe: Recipe | None = None
    teacher: str | None = None
    batches: Count = 0
    batch_size: Count = 0
    first: Count = 0
    count: Count = 0
    members: dict[Name, tuple[Name, ...]] = {}
    choices: tuple[Precision, ...] = ()
    options: dict[str, JsonValue] = {}
    label: str = ""

    @property
    def words(self) -> str:
        """The job in words: its label, or the groups that it lowers."""
        if self.label:
            return self.label
        if not self.groups:
            return "the network as it is"
        shown = ", ".join(self.groups[:3]) + (f" and {len(self.groups) - 3} more" if len(self.groups) > 3 else "")
        return f"{shown} at {', '.join(sorted({str(precision) for precision in self.layers.values()}))}"

    @property
    def samples(self) -> int:
        """The samples of all its batches."""
        return self.batches * self.batch_size

    def option(self, name: str) -> Any:
        """Return one of the method's options."""
        return self.options[name]


class Outcome(Record):
    """The numbers that came of a job, by name, and what it took: seconds, and passes through the network."""

    outside_id: ClassVar[frozenset[str]] = Record.outside_id | {"spend"}

    numbers: dict[Name, tuple[float, ...]]
    seconds: NotNegative = 0.0
    spend: Spend | None = None

    def value(self, name: str) -> float:
        """Return a number that stands alone under its name."""
        (value,) = self.numbers[name]
        return value
