"""The budgets that the slider stops at, and the selection of every method at each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import getitem

from bitplan.core.budget import Budget
from bitplan.core.errors import BudgetError
from bitplan.core.records import Costs, Plan
from bitplan.costs.base import price
from bitplan.costs.totals import FLOAT_BITS
from bitplan.reports.subject import Candidate, Subject
from bitplan.selection.base import select
from bitplan.selection.frontier import Frontier, Point, Points, select_all

LIMIT = 200
LIMIT_TOGETHER = 30  # where several budgets hold at once, every stop is a search of its own
LIMIT_LARGE, LARGE = 60, 5000  # of so many groups and more; a selection then takes a tenth of a second
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
STEPS = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(5))

Picks = tuple[int, ...]
"""A selection: for each group that may be chosen, in order, which of the choices it has."""
PointAt = Callable[[int], Point | None]


@dataclass(frozen=True)
class Stop:
    """A place of the slider: how it is written, and the units it allows."""

    label: str
    capacity: int


@dataclass(frozen=True)
class Ride:
    """A method's selection at every stop; None where none meets the other budgets."""

    candidate: Candidate
    points: tuple[Point | None, ...]


@dataclass(frozen=True)
class Track:
    """All stops by ascending capacity, and the ride of every method; `complete`: no point of a frontier is left out."""

    stops: tuple[Stop, ...]
    rides: tuple[Ride, ...]
    complete: bool


def lay_track(subject: Subject) -> Track:
    """Find the selections of all methods: from whole frontiers where one budget holds and the selector is exact."""
    together = bool(subject.others)
    frontiers = {
        candidate.title: select_all(subject.graph, candidate.gains, subject.cost)
        for candidate in subject.candidates
        if candidate.selector == "exact" and not together
    }
    written = _written(subject)
    points = {int(cost) for frontier in frontiers.values() for cost in frontier.costs}
    complete = bool(points) and len(points) + len(written) <= LIMIT
    most = LIMIT if len(subject.graph.selectable) < LARGE else LIMIT_LARGE
    room = (LIMIT_TOGETHER if together else most) - len(written)
    between = points if complete else _grid(subject.cost, subject.account.highest, room)
    stops = _stops(subject, written, between)
    rides = []
    for candidate in subject.candidates:
        point_at = _planner(subject, candidate, frontiers.get(candidate.title))
        rides.append(Ride(candidate, tuple(_ride(subject, stops, point_at))))
    return Track(stops, tuple(rides), complete)


def _stops(subject: Subject, written: Mapping[int, str], between: Iterable[int]) -> tuple[Stop, ...]:
    """The budgets as they are written, and the places between, by ascending capacity."""
    unit, account = Budget.parse(subject.budget).unit.on_axis, subject.account
    # A label is rounded up, so that who asks for it gets the plan of its stop.
    stops = [Stop(unit.enough(place, account, fine=True), place) for place in between if place not in written]
    stops += [Stop(label, capacity) for capacity, label in written.items()]
    return tuple(sorted(stops, key=lambda stop: stop.capacity))


def _written(subject: Subject) -> dict[int, str]:
    """The budgets that can be met, by their capacity; those too many are thinned out, the chosen one is kept."""
    least = sum(min(row) for row in subject.cost.rows.values())
    if subject.capacity(subject.budget) < least:  # refused with what is possible
        select(subject.graph, subject.candidates[0].gains, subject.costs, budget=subject.budget)
    every = math.ceil(len(subject.budgets) / (LIMIT - 1))
    kept = [*subject.budgets[::every], subject.budget]
    labels = {subject.capacity(budget): budget for budget in kept}
    return {capacity: label for capacity, label in labels.items() if capacity >= least}


def _grid(cost: Costs, whole: int, room: int) -> set[int]:
    """Round percentages between the least and the highest cost, as fine as there is room for."""
    least = sum(min(row) for row in cost.rows.values())
    for step in STEPS:
        low = math.ceil(Fraction(100 * least, whole) / step)
        stops = [whole * step * place // 100 for place in range(low, int(100 / step) + 1)]
        if len(stops) <= room:
            break
    return {int(stop) for stop in stops}


def _ride(subject: Subject, stops: Sequence[Stop], point_at: PointAt) -> Iterator[Point | None]:
    """The selection at every stop; where the page is about one plan, that very plan at its budget."""
    for stop in stops:
        if subject.plan is not None and stop.label == subject.budget:
            yield _point(subject.plan, subject)
        else:
            yield point_at(stop.capacity)


def _planner(subject: Subject, candidate: Candidate, frontier: Frontier | None) -> PointAt:
    if frontier is not None:
        return frontier.point
    cost = subject.cost
    others = [other for other in subject.costs if other.name != cost.name]
    costs = [cost, *others]  # the first budget, in units, is of the first cost
    budgets = [str(subject.account.highest), *subject.others]
    try:
        return Points.of(subject.graph, candidate.gains, costs, budgets, candidate.selector).at
    except BudgetError:
        return lambda _: None


def _point(plan: Plan, subject: Subject) -> Point:
    limit, choices = plan.limits[0], subject.cost.choices
    picks = tuple(choices.index(plan.precisions[group.name]) for group in subject.graph.selectable)
    return Point(picks, limit.cost, plan.gain, limit.shadow_price)


def encode(ride: Ride, subject: Subject) -> dict[str, object]:
    """A ride for the page: every different selection once, as one digit per group, and which one is at each stop."""
    by_picks = {point.picks: point for point in ride.points if point is not None}
    selections, points = list(by_picks), list(by_picks.values())
    place = {picks: index for index, picks in enumerate(selections)}
    at: list[int | None] = []
    prices: list[float | None] = []
    for point in ride.points:  # stops may share a selection, but each has a shadow price of its own
        at.append(None if point is None else place[point.picks])
        prices.append(None if point is None else point.shadow_price)
    return {
        "picks": [_digits(picks) for picks in selections],
        "cost": [point.cost for point in points],
        "used": [used(subject, point.cost) for point in points],
        "gain": [point.gain for point in points],
        "bops": _sums(subject, "bops", selections),
        "bits": _sums(subject, "memory", selections),
        "smaller": _compressions(subject, selections),
        "at": at,
        "price": prices,
    }


def _digits(picks: Picks) -> str:
    return "".join(DIGITS[pick] for pick in picks)


def used(subject: Subject, spent: int) -> str:
    """What choosable layers spend, as budgets are written, without idle zeros."""
    unit = Budget.parse(subject.budget).unit.on_axis
    return unit.told(spent, subject.account, more=1, trim=True)


def _sums(subject: Subject, cost: str, selections: Sequence[Picks]) -> list[int]:
    """What selections cost by another measure, fixed layers included."""
    priced = price(cost, subject.graph, subject.cost.choices)
    fixed = sum(priced.fixed.values())
    rows = [priced.rows[group.name] for group in subject.graph.selectable]
    return [fixed + _sum_of_picked(rows, picks) for picks in selections]


def _compressions(subject: Subject, selections: Sequence[Picks]) -> list[float]:
    """How many times smaller the weights are than in 32-bit floating point; 1 for a network without weights."""
    graph, choices = subject.graph, subject.cost.choices
    fixed = sum(layer.weights * layer.fixed.weight_bits for layer in graph.layers if layer.fixed)
    rows = [[group.weights * choice.weight_bits for choice in choices] for group in graph.selectable]
    as_floats = FLOAT_BITS * sum(layer.weights for layer in graph.layers)
    compressions = []
    for picks in selections:
        stored = fixed + _sum_of_picked(rows, picks)
        compressions.append(as_floats / stored if stored else 1.0)
    return compressions


def _sum_of_picked(rows: Sequence[Sequence[int]], picks: Picks) -> int:
    """The sum over groups of the value, in the group's row of choices, that is picked there."""
    return sum(map(getitem, rows, picks))
