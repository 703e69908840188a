"""The noun of a ceiling: the plans that were trained to find the best one, and what the best of them reached."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

from bitplan.core.precision import Precision
from bitplan.core.record import Record, Value
from bitplan.core.records import Name
from bitplan.core.studies import Study
from bitplan.core.trials import Count, NotNegative


def _from_text(written: Any) -> Any:
    return tuple(map(int, written.split())) if isinstance(written, str) else written


PickedChoices = Annotated[
    tuple[int, ...],
    BeforeValidator(_from_text),
    PlainSerializer(lambda picks: " ".join(map(str, picks)), return_type=str),
]
"""For each group, the place of its choice among the choices; a line in a file."""


class TriedPlan(Value):
    """A plan that was trained on a part of the training samples, and its score on the others.

    `by` says why it was tried: the titles of the methods that chose it, or what `plugins/methods/ceiling.py` calls it.
    """

    picks: PickedChoices
    by: str
    seed: int
    training: str
    score: float


class FinalScore(Value):
    """What a plan reached on the test split, trained on all samples from a start with a seed of the study."""

    start: str
    seed: int
    training: str
    score: float


class Finalist(Value):
    """A plan that was trained again: what the judge expected of it, with the error of that, and what it reached."""

    picks: PickedChoices
    by: str
    expected: float
    error: NotNegative
    scores: tuple[FinalScore, ...] = ()


class CeilingSearch(Record):
    """What the search for a ceiling depends on, but for how long it goes on. Its id names the ceiling's file."""

    study: str
    graph: str
    start: str
    budget: Name
    seed: int
    hold_out: Annotated[float, Field(gt=0, lt=1)]


class Ceiling(Record):
    """How far the search for the best plan within a budget is, and the finalists, what the judge puts first before all.

    Which finalist is the first, the winner, was decided before any of them was scored on the test split. `trainings` is
    how many the search may take.
    """

    search: CeilingSearch
    groups: tuple[Name, ...]
    choices: tuple[Precision, ...]
    trainings: Count
    metric: str
    higher_is_better: bool
    judged: tuple[TriedPlan, ...]
    finalists: tuple[Finalist, ...] = ()
    complete: bool = False
    seconds: NotNegative = 0.0

    def precisions(self, picks: tuple[int, ...]) -> dict[str, Precision]:
        """Group → precision."""
        return {name: self.choices[pick] for name, pick in zip(self.groups, picks, strict=True)}


def select_ceilings(ceilings: Iterable[Ceiling], study: Study) -> list[Ceiling]:
    """Those of a study that are found: of each of its budgets the one that took the most trainings."""
    own = [one for one in ceilings if one.search.study == study.id and one.finalists]
    by_budget = {one.search.budget: one for one in sorted(own, key=lambda one: len(one.judged))}
    return [by_budget[budget] for budget in study.budgets if budget in by_budget]
