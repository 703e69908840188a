"""Branches and tables of sums find what brute force finds, tie rule included."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_exact import best_of_all, problem, problems, within_budgets

from bitplan.plan import branches, states
from bitplan.plan.bound import Bound
from bitplan.plan.branches import Subproblem, search_branches
from bitplan.plan.core import Incumbent
from bitplan.plan.exact import exact
from bitplan.plan.relaxation import relaxed_prices
from bitplan.plan.states import list_all
from bitplan.plan.sums import list_sums

STEPS = np.array([2, 3, 4, 8])


def worth(one, picks):
    return int(one.values[range(len(picks)), picks].sum())


def table(kind, draw, groups, choices, budgets, share=0.7):
    """A problem of a kind that is hard for bounds: many ties, or values and costs that go together."""
    bits = STEPS[:choices]
    costs = np.sort(draw.integers(1, 1_000, (budgets, groups, choices)), axis=2)
    values = costs.sum(axis=0) // budgets + 100 * np.arange(choices)  # correlated
    if kind == "ties":
        values, costs = np.sort(draw.integers(0, 4, (groups, choices))), costs // 250
    if kind == "equal":
        values, costs = np.tile([0, 5, 8, 10][:choices], (groups, 1)), np.tile(3 * bits, (budgets, groups, 1))
        costs = costs * np.arange(1, budgets + 1)[:, None, None] + np.arange(budgets)[:, None, None]
    if kind == "linear":
        values, costs = np.tile(bits - 2, (groups, 1)), draw.integers(1, 4, (budgets, groups, 1)) * bits
    if kind == "hawq":
        values = (10 ** draw.uniform(5, 15, (groups, 1)) * (1 - 4.0 ** -(bits - 2.0))).astype(np.int64)
        costs = (10 ** draw.uniform(6, 9, (budgets, groups, 1))).astype(np.int64) * bits
    return problem(values, costs, (costs[:, :, -1].sum(axis=1) * share).astype(np.int64))


def from_nothing(one):
    """By branches alone, without a selection to begin with."""
    return search_branches(one, Bound.of(one, relaxed_prices(one)), Incumbent(None, -(2**62)))


@pytest.fixture
def narrow(monkeypatch):
    """Searches so narrow that small problems are split, and as many of them as it takes."""
    for name, value in {"WIDTHS": (8, 16), "BRANCHES": 10**6, "TIED": 10**6}.items():
        monkeypatch.setattr(branches, name, value)
    monkeypatch.setattr(branches, "_TRIAL", 10**6)


@pytest.mark.usefixtures("narrow")
def test_branches_equal_brute_force():
    @settings(max_examples=200, deadline=None)
    @given(problems(most_budgets=3))
    def check(one):
        assume(len(one.groups) > 1)
        best = best_of_all(one)
        found, most = from_nothing(one)
        if best is None:
            assert found.picks is None
            return
        assert tuple(found.picks.tolist()) == best
        assert found.value == most == worth(one, best)

    check()


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("kind", ["correlated", "ties", "equal", "linear", "hawq"])
@pytest.mark.parametrize("budgets", [1, 2, 3])
def test_branches_equal_brute_force_where_bounds_are_weak(kind, budgets):
    draw = np.random.default_rng(budgets)
    for groups, choices in ((7, 3), (6, 4), (6, 4), (10, 2)):
        one = table(kind, draw, groups, choices, budgets)
        found, most = from_nothing(one)
        assert tuple(found.picks.tolist()) == best_of_all(one)
        assert found.value == most


@pytest.mark.parametrize("kind", ["correlated", "hawq"])
def test_branches_cut_short_say_how_far_off_they_can_be(monkeypatch, narrow, kind):
    draw, cut = np.random.default_rng(6), 0
    for stop in (2, 3) * 10:
        monkeypatch.setattr(branches, "BRANCHES", stop)
        one = table(kind, draw, 7, 3, 2)
        found, most = from_nothing(one)
        best = worth(one, best_of_all(one))
        assert found.value <= best <= most
        cut += best < most
    assert cut > 2


@pytest.mark.parametrize(("kind", "groups", "budgets"), [("hawq", 500, 2), ("hawq", 300, 3), ("correlated", 500, 2)])
def test_hundreds_of_layers_that_one_bound_cannot_settle_are_proven(monkeypatch, kind, groups, budgets):
    one = table(kind, np.random.default_rng(11), groups, 4, budgets)
    found = exact(one)
    assert found.gap == 0
    assert (one.costs[:, range(groups), found.picks].sum(axis=1) <= one.capacities).all()
    monkeypatch.setattr("bitplan.plan.exact.search_branches", lambda problem, bound, best: (best, bound.value_above(0)))
    without = exact(one)
    assert without.gap > 0
    assert worth(one, without.picks) <= worth(one, found.picks) <= worth(one, without.picks) + without.gap


@pytest.mark.parametrize("budgets", [1, 2])
def test_branches_that_count_steps_keep_the_tie_rule(budgets):
    """Each finds the best of those with at most so many steps, or with more; the count itself decides nothing."""
    draw = np.random.default_rng(7)
    for _ in range(60):
        values, costs = np.sort(draw.integers(0, 3, (6, 3))), np.sort(draw.integers(0, 3, (budgets, 6, 3)), axis=2)
        one = problem(values, costs, costs[:, :, 0].sum(axis=1) + 4)
        steps = int(draw.integers(2, 8))
        whole = Subproblem(one, np.arange(6), np.zeros(6, dtype=np.intp), 0)
        for up, most in ((range(3), steps), (range(2, -1, -1), 12 - steps - 1)):
            branch = branches._bounded(whole.counted(up, most), np.zeros(budgets))
            picks, totals, spent = within_budgets(one)
            inside = np.array(up)[picks].sum(axis=1) <= most
            picks, totals, spent = picks[inside], totals[inside], spent[:, inside]
            order = np.lexsort((*(-picks.T[::-1]), *spent[::-1], -totals))
            found = Incumbent(None, -(2**62))
            if branch is not None:
                found, _ = branches._searched(one, branch, found)
            assert (None if found.picks is None else found.picks.tolist()) == next(iter(picks[order].tolist()), None)


@settings(max_examples=300, deadline=None)
@given(problems(most_budgets=1), st.integers(1, 5), st.integers(-3, 3))
def test_sums_are_the_list_of_states(one, unit, more):
    """The same states, and the same choices for each, whatever the unit and however negative the values."""
    one = problem(one.values + more, one.costs * unit, one.capacities * unit)
    summed = list_sums(one, int(one.capacities[0]), 2_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "list_sums", lambda *_: None)
        listed = list_all(one, int(one.capacities[0]))
    assert summed is not None
    assert listed is not None
    costs, values, trail = summed
    assert costs.tolist() == listed.costs.tolist()
    assert values.tolist() == listed.values.tolist()
    assert all(trail.picks(state) == listed.trail.picks(state) for state in range(len(costs)))


@pytest.mark.parametrize("scale", [1, 2**40])
def test_sums_of_values_of_any_size(scale):
    """Values that fit into 32 bits, and values that do not."""
    draw = np.random.default_rng(9)
    for _ in range(30):
        costs = np.sort(draw.integers(0, 9, (1, 6, 3)), axis=2)
        one = problem(np.sort(draw.integers(-5, 9, (6, 3))) * scale, costs, [int(costs[:, :, -1].sum()) * 6 // 10])
        if int(costs[0].min(axis=1).sum()) <= one.capacities[0]:
            assert exact(one).picks == best_of_all(one)


def test_too_many_sums_are_left_to_the_list():
    draw = np.random.default_rng(10)
    costs = np.sort(draw.integers(1, 10**9, (1, 20, 3)), axis=2)
    assert list_sums(problem(costs[0], costs, [10**10]), 10**10, 2_000) is None
    equal = problem(costs[0] % 7, np.tile([[200, 300, 400]], (1, 20, 1)), [6_000])
    assert list_sums(equal, 6_000, 2_000) is not None
    assert list_sums(equal, 6_000, 0) is None
    assert list_sums(equal, 3_999, 2_000) is None  # less than the lowest choices cost
