"""What must be met: costs of picks, costs to be expected, and repairs that never exceed a budget."""

from itertools import permutations, product

import numpy as np
import pytest
import torch
from additive import problem
from hypothesis import given, settings
from hypothesis import strategies as st

import bitplan
from bitplan.core.errors import BudgetError
from bitplan.core.precision import parse_choices
from bitplan.core.spend import PassMeter, Spend
from bitplan.selection.budget_constraint import BudgetConstraint
from bitplan.testing.networks import hand_made_graph

CHOICES = parse_choices("w2a2,w3a3,w4a4")


def aimed(*budgets):
    graph = hand_made_graph()
    return BudgetConstraint.of(
        graph, CHOICES, [bitplan.price(name, graph, CHOICES) for name in ("bmac", "memory")], budgets
    )


def test_it_is_made_of_budgets_and_costs():
    aim = aimed("70%", "memory=80%")
    assert (aim.groups, aim.budgets) == (("a", "b", "c"), ("70%", "memory=80%"))
    assert aim.cost((0, 0, 0)) == tuple(int(row[:, 0].sum()) for row in aim.costs)
    assert aim.fits((0, 0, 0))
    assert not aim.fits(aim.top)
    with pytest.raises(BudgetError, match="budget 40% cannot be met"):
        aimed("40%")


def test_expected_costs_have_no_unit_and_let_gradients_through():
    aim = aimed("70%", "memory=80%")
    certain = np.eye(3)[[2, 0, 1]]
    assert aim.expected(certain) == pytest.approx(np.array(aim.cost((2, 0, 1))) / aim.capacities)
    chances = torch.full((3, 3), 1 / 3, requires_grad=True)
    expected = aim.expected(chances)
    assert expected.detach().numpy() == pytest.approx(aim.expected(np.full((3, 3), 1 / 3)), rel=1e-6)
    expected[0].backward()
    assert chances.grad.numpy() == pytest.approx(aim.shares[0], rel=1e-6)


@pytest.mark.parametrize("budgets", [("70%", "memory=80%"), ("85%", "memory=72%"), ("95%", "memory=66%")])
def test_of_several_budgets_none_is_exceeded_by_what_is_lowered_and_raised(budgets):
    aim = aimed(*budgets)
    for picks, order in product(product(range(3), repeat=3), permutations(range(3))):
        full = aim.raised(aim.lowered(picks, order), order[::-1])
        assert aim.fits(full)
        assert not any(aim.fits((*full[:g], full[g] + 1, *full[g + 1 :])) for g in range(3) if full[g] < 2)


@given(st.integers(0, 10**6), st.integers(1, 7), st.floats(0.51, 1.0), st.data())
@settings(max_examples=60, deadline=None)
def test_repairs_fit_and_leave_alone_what_does(seed, groups, share, data):
    _, aim, _ = problem(groups, "w2a2,w3a3,w4a4", share, seed)
    picks = tuple(data.draw(st.lists(st.integers(0, 2), min_size=groups, max_size=groups)))
    nearest, from_last = aim.repair(picks), aim.repair(picks, "last")
    for repaired in (nearest, from_last):
        assert aim.fits(repaired)
        assert repaired == picks or not aim.fits(picks)
    moved = [sum(abs(a - b) for a, b in zip(picks, one, strict=True)) for one in (nearest, from_last)]
    assert moved[0] <= moved[1]
    full = aim.raised(from_last, range(groups))
    assert aim.fits(full)
    assert all(not aim.fits((*full[:g], full[g] + 1, *full[g + 1 :])) for g in range(groups) if full[g] < 2)


def test_from_the_last_group_backwards_and_again():
    """HAQ's: each group one choice less before any is lowered twice."""
    costs = np.array([[[2, 3, 4]] * 4])
    aim = BudgetConstraint(("a", "b", "c", "d"), CHOICES, costs, np.array([11]))
    assert aim.repair(aim.top, "last") == (1, 1, 1, 0)
    assert aim.repair((0, 2, 0, 2), "last") == (0, 2, 0, 1)


def test_where_the_lowest_is_not_the_cheapest_a_repair_still_fits():
    aim = BudgetConstraint(("a", "b"), CHOICES, np.array([[[9, 2, 4], [9, 2, 4]]]), np.array([5]))
    assert aim.fits(aim.repair((2, 2), "last"))


def test_a_meter_pays_as_long_as_there_is_room():
    meter, price = PassMeter(25), Spend(forwards=4, backwards=3, evaluations=1)
    assert (price.passes, meter.room(price)) == (10, 2)
    meter.charge(price, 2)
    assert (meter.room(price), meter.room(Spend(forwards=5)), meter.spent.passes) == (0, 1, 20)
    assert meter.spent.counts == {"spend": 20, "samples": 8, "trainings": 0, "evaluations": 2}
    with pytest.raises(AssertionError):
        meter.charge(price)
