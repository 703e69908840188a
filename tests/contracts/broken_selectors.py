"""Selectors that break one clause each."""

import dataclasses
import itertools

import numpy as np

from bitplan.selection.exact import exact
from bitplan.selection.problem import Selection
from bitplan.testing import check_selector

CALLS = itertools.count()


def failing(problem):
    raise ZeroDivisionError("no such luck")


def changing(problem):
    found = exact(problem)
    problem.values[:] = 0
    return found


def wandering(problem):
    """Another selection each time: the second time only the first group is at the lowest."""
    picks = np.zeros(len(problem.groups), int) if next(CALLS) % 2 else np.array(exact(problem).picks)
    return Selection(tuple(picks.tolist()), None)


BROKEN = [
    ("it solves every problem that can be met", lambda: check_selector(failing)),
    ("the problem stays as it was", lambda: check_selector(changing)),
    ("it gives a Selection", lambda: check_selector(lambda problem: exact(problem).picks)),
    ("one choice for each group, within every budget", lambda: check_selector(lambda problem: Selection((0,), 0))),
    ("one choice for each group, within every budget", lambda: check_selector(lambda problem: Selection((1, 1, 1), 0))),
    (
        "the gap is a whole number from 0, or None",
        lambda: check_selector(lambda problem: dataclasses.replace(exact(problem), gap=-1)),
    ),
    ("the same problem has the same answer", lambda: check_selector(wandering)),
    (
        "where the budget allows it every group has the highest choice",
        lambda: check_selector(lambda problem: Selection((0,) * len(problem.groups), None)),
    ),
]


def right():
    check_selector(exact)
