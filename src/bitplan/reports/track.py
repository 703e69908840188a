"""The budgets that the slider stops at, and the plan of every method at each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from bitplan.core.budget import Budget
from bitplan.core.errors import BudgetError
from bitplan.core.records import Costs, Plan
from bitplan.costs.totals import total
from bitplan.plan.base import select
from bitplan.plan.frontier import Frontier, select_all
from bitplan.reports.subject import Candidate, Subject

LIMIT = 200
LIMIT_TOGETHER = 30  # where several budgets hold at once, every stop is a search of its own
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
STEPS = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(5))

PlanAt = Callable[[int], Plan | None]


@dataclass(frozen=True)
class Stop:
    """A place of the slider: how it is written, and the units it allows."""

    label: str
    capacity: int


@dataclass(frozen=True)
class Ride:
    """A method's plan at every stop; None where no plan meets the other budgets."""

    candidate: Candidate
    plans: tuple[Plan | None, ...]


@dataclass(frozen=True)
class Track:
    """All stops by ascending capacity, and the ride of every method; `complete`: no point of the frontier is left out."""

    stops: tuple[Stop, ...]
    rides: tuple[Ride, ...]
    whole: int
    complete: bool

    def plan(self, title: str, label: str) -> Plan | None:
        """The plan of a method at a stop."""
        place = next(index for index, stop in enumerate(self.stops) if stop.label == label)
        return next(ride.plans[place] for ride in self.rides if ride.candidate.title == title)


def lay_track(subject: Subject) -> Track:
    """Find the plans of all methods: from whole frontiers where one budget holds and the selector is exact."""
    cost, together = subject.cost, bool(subject.others)
    frontiers = {
        candidate.title: select_all(subject.graph, candidate.gains, cost)
        for candidate in subject.candidates
        if candidate.selector == "exact" and not together
    }
    whole = sum(row[-1] for row in cost.rows.values())
    points = {int(point) for frontier in frontiers.values() for point in frontier.costs}
    written = _written(subject)
    complete = bool(points) and len(points) + len(written) <= LIMIT
    grid = points if complete else _grid(cost, whole, (LIMIT_TOGETHER if together else LIMIT) - len(written))
    label = _labels(subject, whole)
    stops = [Stop(label(capacity), capacity) for capacity in grid if capacity not in written]
    stops += [Stop(label, capacity) for capacity, label in written.items()]
    stops.sort(key=lambda stop: stop.capacity)
    rides = [
        Ride(candidate, tuple(_ride(subject, stops, _planner(subject, candidate, frontiers.get(candidate.title)))))
        for candidate in subject.candidates
    ]
    return Track(tuple(stops), tuple(rides), whole, complete)


def _written(subject: Subject) -> dict[int, str]:
    """The budgets that can be met, by their capacity; those too many are thinned out, the chosen one is kept."""
    least = sum(min(row) for row in subject.cost.rows.values())
    if subject.capacity(subject.budget) < least:
        select(subject.graph, subject.candidates[0].gains, subject.costs, budget=subject.budget)  # says what is possible
    every = math.ceil(len(subject.budgets) / (LIMIT - 1))
    kept = [*subject.budgets[::every], subject.budget]
    found = {subject.capacity(budget): budget for budget in kept}
    return {capacity: label for capacity, label in found.items() if capacity >= least}


def _grid(cost: Costs, whole: int, room: int) -> set[int]:
    """Round percentages between the least and the highest cost, as fine as there is room for."""
    least = sum(min(row) for row in cost.rows.values())
    for step in STEPS:
        low = math.ceil(Fraction(100 * least, whole) / step)
        stops = [whole * step * place // 100 for place in range(low, int(100 / step) + 1)]
        if len(stops) <= room:
            break
    return {int(stop) for stop in stops}


def _labels(subject: Subject, whole: int) -> Callable[[int], str]:
    """How a capacity is written as a budget that can be asked for: rounded up, so that it allows the same plan."""
    per_weight = Budget.parse(subject.budget).unit == "bpw"
    unit, one = ("bpw", sum(group.weights for group in subject.graph.selectable)) if per_weight else ("%", Fraction(whole, 100))

    def label(capacity: int) -> str:
        share = math.ceil(capacity / Fraction(one) * 10**4)
        return f"{share / 10**4:.4f}".rstrip("0").rstrip(".") + unit

    return label


def _ride(subject: Subject, stops: Sequence[Stop], plan_at: PlanAt) -> Iterator[Plan | None]:
    """The plan at every stop; where the page is about one plan, that very plan at its budget."""
    for stop in stops:
        yield subject.plan if subject.plan and stop.label == subject.budget else plan_at(stop.capacity)


def _planner(subject: Subject, candidate: Candidate, frontier: Frontier | None) -> PlanAt:
    if frontier is not None:
        return lambda capacity: frontier.plan(capacity)
    cost = subject.cost
    costs = [cost, *(one for one in subject.costs if one.name != cost.name)]

    def search(capacity: int) -> Plan | None:
        budgets = [str(capacity), *subject.others]
        try:
            return select(subject.graph, candidate.gains, costs, budget=budgets, selector=candidate.selector)
        except BudgetError:
            return None

    return search


def encode(ride: Ride, subject: Subject) -> dict[str, object]:
    """A ride for the page: every different plan once, as one digit per group, and which one is at each stop."""
    groups, choices = subject.graph.selectable, ride.candidate.gains.choices
    picks = [
        plan and "".join(DIGITS[choices.index(plan.precisions[group.name])] for group in groups) for plan in ride.plans
    ]
    first: dict[str, int] = {}
    for index, picked in enumerate(picks):
        if picked is not None:
            first.setdefault(picked, index)
    plans = [plan for index in first.values() if (plan := ride.plans[index]) is not None]
    figures = [total(plan, subject.graph) for plan in plans]
    order = {picked: place for place, picked in enumerate(first)}
    return {
        "picks": list(first),
        "cost": [plan.limits[0].cost for plan in plans],
        "gain": [plan.gain for plan in plans],
        "bops": [one.bops for one in figures],
        "bmacs": [one.bmacs for one in figures],
        "bits": [one.bits for one in figures],
        "smaller": [round(one.compression, 4) for one in figures],
        "at": [None if picked is None else order[picked] for picked in picks],
        "price": [plan and plan.limits[0].shadow_price for plan in ride.plans],
    }
