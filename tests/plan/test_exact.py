"""The exact selector equals brute force, tie rule included, whichever way it takes."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitplan.core.errors import BudgetError
from bitplan.core.precision import Precision
from bitplan.plan import exact as module
from bitplan.plan.exact import exact
from bitplan.plan.problem import Problem


def problem(values, costs, capacities):
    values = np.array(values, dtype=np.int64)
    choices = tuple(Precision(weight_bits=2 + index, act_bits=2 + index) for index in range(values.shape[1]))
    names = tuple(f"g{index}" for index in range(len(values)))
    return Problem(names, choices, values, np.array(costs, dtype=np.int64), np.array(capacities, dtype=np.int64))


def best_of_all(problem):
    """The greatest value, then the lowest costs in order, then the higher precision for the earlier group."""
    groups, choices = problem.values.shape
    best = None
    for picks in itertools.product(range(choices), repeat=groups):
        costs = problem.costs[:, range(groups), picks].sum(axis=1)
        if (costs <= problem.capacities).all():
            rank = (int(problem.values[range(groups), picks].sum()), *(-int(cost) for cost in costs), picks)
            best = rank if best is None else max(best, rank)
    return best and best[-1]


@st.composite
def problems(draw, most_budgets=2):
    choices = draw(st.integers(2, 4))
    groups = draw(st.integers(1, {2: 8, 3: 6, 4: 5}[choices]))
    budgets = draw(st.integers(1, most_budgets))
    largest_value, largest_cost = draw(st.sampled_from([(1, 1), (3, 4), (0, 9), (50, 2), (1000, 1000)]))
    numbers = lambda most: st.lists(st.integers(0, most), min_size=choices, max_size=choices)  # noqa: E731
    rows = lambda most: st.lists(numbers(most), min_size=groups, max_size=groups)  # noqa: E731
    values = [sorted(row) for row in draw(rows(largest_value))]
    costs = [[sorted(row) for row in draw(rows(largest_cost))] for _ in range(budgets)]
    lowest = [sum(row[0] for row in table) for table in costs]
    highest = [sum(row[-1] for row in table) for table in costs]
    capacities = [draw(st.integers(low, high)) for low, high in zip(lowest, highest, strict=True)]
    return problem(values, costs, capacities)


@settings(max_examples=1500, deadline=None)
@given(problems())
def test_equals_brute_force(one):
    found = exact(one)
    assert found.picks == best_of_all(one)
    assert found.gap == 0


@pytest.mark.parametrize("widths", [(1_000_000,), (1, 2, 4, 1_000_000)])
def test_equals_brute_force_with_bounds_and_cut_lists(monkeypatch, widths):
    monkeypatch.setattr(module, "PLAIN", 0)
    monkeypatch.setattr(module, "WIDTHS", widths)

    @settings(max_examples=700, deadline=None)
    @given(problems(most_budgets=3))
    def check(one):
        found = exact(one)
        assert found.picks == best_of_all(one)
        assert found.gap == 0

    check()


def test_a_list_cut_short_says_how_far_off_it_can_be(monkeypatch):
    monkeypatch.setattr(module, "PLAIN", 0)
    monkeypatch.setattr(module, "WIDTHS", (2,))
    draw = np.random.default_rng(0)
    cut = 0
    for _ in range(50):
        values = np.sort(draw.integers(0, 1000, (7, 3)))
        costs = np.sort(draw.integers(0, 1000, (2, 7, 3)), axis=2)
        one = problem(values, costs, costs[:, :, -1].sum(axis=1) * 6 // 10)
        if (costs[:, :, 0].sum(axis=1) > one.capacities).any():
            continue
        found, best = exact(one), best_of_all(one)
        worth = [int(values[range(7), picks].sum()) for picks in (found.picks, best)]
        assert worth[0] <= worth[1] <= worth[0] + found.gap
        cut += found.gap > 0
    assert cut > 5


@settings(max_examples=300, deadline=None)
@given(problems(), st.data())
def test_a_larger_budget_never_gains_less(one, data):
    more = one.capacities + np.array([data.draw(st.integers(0, 50)) for _ in one.capacities])
    worth = lambda picks: int(one.values[range(len(picks)), picks].sum())  # noqa: E731
    assert worth(exact(one.within(more)).picks) >= worth(exact(one).picks)


def test_costs_that_fall_as_bits_rise_are_solved_too():
    draw = np.random.default_rng(1)
    for _ in range(200):
        groups = int(draw.integers(1, 6))
        values = np.sort(draw.integers(0, 9, (groups, 3)))
        costs = draw.integers(0, 9, (1, groups, 3))
        one = problem(values, costs, [int(costs.min(axis=2).sum() + draw.integers(0, 9))])
        assert exact(one).picks == best_of_all(one)


def test_budgets_that_exclude_each_other_are_refused():
    one = problem([[0, 1], [0, 1]], [[[0, 5], [0, 5]], [[5, 0], [5, 0]]], [4, 4])
    with pytest.raises(BudgetError, match="cannot all be met at once"):
        exact(one)


def test_hundreds_of_ugly_layers_are_solved_to_the_end():
    draw = np.random.default_rng(2)
    values = np.sort(draw.integers(0, 10**6, (300, 4)))
    costs = np.sort(draw.integers(0, 10**9, (1, 300, 4)), axis=2)
    one = problem(values, costs, costs[:, :, -1].sum(axis=1) * 7 // 10)
    found = exact(one)
    assert found.gap == 0
    assert costs[0, range(300), found.picks].sum() <= one.capacities[0]
