"""A run that is looked at as if it stood still."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from bitplan.core.records import Gains, Plan
from bitplan.core.runs import RunFolder
from bitplan.core.studies import Agenda, Study
from bitplan.core.trials import Result


@dataclass(frozen=True)
class StillRun(RunFolder):
    """A run as it was when it was first looked at: several tables of it read its thousands of files once."""

    @cached_property
    def study(self) -> Study:
        """What is compared here."""
        return super().study

    @cached_property
    def agenda(self) -> Agenda | None:
        """All trials of the study, done or not."""
        return super().agenda

    @cached_property
    def gains(self) -> dict[str, Gains]:
        """The gains of each method that is done, by its title."""
        return super().gains

    @cached_property
    def bound_gains(self) -> dict[str, Gains]:
        """Of the methods that choose within a budget, the gains that are done."""
        return super().bound_gains

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """Every plan, by its id."""
        return super().plans

    @cached_property
    def results(self) -> list[Result]:
        """The trials of the study that are done, without the logs of their trainings, which no table shows."""
        found = self.trials.ids()
        return [self.trials.read(name, without="log") for name in self._wanted(found) if name in found]
