"""The exact selector equals brute force, tie rule included, whichever way it takes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import OptimizeResult

from bitplan.core.errors import BudgetError
from bitplan.core.precision import Precision
from bitplan.selection import exact as module
from bitplan.selection import several_budgets
from bitplan.selection.exact import Bound, exact, exact_each
from bitplan.selection.problem import Problem


def problem(values, costs, capacities):
    values = np.array(values, dtype=np.int64)
    choices = tuple(Precision(weight_bits=2 + index, act_bits=2 + index) for index in range(values.shape[1]))
    names = tuple(f"g{index}" for index in range(len(values)))
    return Problem(names, choices, values, np.array(costs, dtype=np.int64), np.array(capacities, dtype=np.int64))


def worth(problem, picks):
    return int(problem.values[range(len(picks)), picks].sum())


def within_budgets(problem):
    """All selections within the budgets (N, G), what they are worth (N) and what they cost (K, N)."""
    groups, choices = problem.values.shape
    picks = np.indices((choices,) * groups).reshape(groups, -1).T
    costs = problem.costs[:, np.arange(groups), picks].sum(axis=2)
    fits = (costs <= problem.capacities[:, None]).all(axis=0)
    return picks[fits], problem.values[np.arange(groups), picks[fits]].sum(axis=1), costs[:, fits]


def best_of_all(problem):
    """The greatest value, then the lowest costs in order, then the higher precision for the earlier group."""
    picks, values, costs = within_budgets(problem)
    if not len(values):
        return None
    order = np.lexsort((*(-picks.T[::-1]), *costs[::-1], -values))
    return tuple(picks[order[0]].tolist())


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


@settings(max_examples=400, deadline=None)
@given(problems())
def test_equals_brute_force(one):
    found = exact(one)
    assert found.picks == best_of_all(one)
    assert found.gap == 0


@pytest.mark.parametrize("solver", ["lists", "HiGHS"])
def test_equals_brute_force_where_nothing_is_listed_whole(monkeypatch, solver):
    """By lists of the states of least regret, with the tie rule; and by HiGHS, which decides between equal values."""
    monkeypatch.setattr(module, "LISTED", 0)
    if solver == "HiGHS":
        monkeypatch.setattr(module, "WIDEST", 0)

    @settings(max_examples=500, deadline=None)
    @given(problems(most_budgets=3))
    def check(one):
        best = best_of_all(one)
        if best is None:
            with pytest.raises(BudgetError, match="cannot all be met at once"):
                exact(one)
            return
        found = exact(one)
        assert found.gap == 0
        if solver == "lists":
            assert found.picks == best
        assert worth(one, found.picks) == worth(one, best)
        assert (one.costs[:, range(len(best)), found.picks].sum(axis=1) <= one.capacities).all()

    check()


@settings(max_examples=100, deadline=None)
@given(st.lists(problems(most_budgets=1), min_size=1, max_size=3), st.data())
def test_together_is_one_by_one(several, data):
    asked = []
    for one in several:
        lowest, highest = one.costs[0].min(axis=1).sum(), one.costs[0].max(axis=1).sum()
        for _ in range(3):
            asked.append(one.within(np.array([data.draw(st.integers(int(lowest), int(highest)))])))
    assert exact_each(asked) == [exact(one) for one in asked]


@settings(max_examples=200, deadline=None)
@given(problems(most_budgets=1), st.integers(1, 5), st.integers(1, 5), st.data())
def test_budgets_in_proportion_are_one(one, times, divided, data):
    """The same costs in other units: the tighter budget limits, and only more of it adds anything."""
    costs = np.concatenate((one.costs * divided, one.costs * times))
    least, most = costs.min(axis=2).sum(axis=1), costs.max(axis=2).sum(axis=1)
    capacities = [data.draw(st.integers(int(low), int(high))) for low, high in zip(least, most, strict=True)]
    both = problem(one.values, costs, capacities)
    found = exact(both)
    assert found.picks == best_of_all(both)
    assert min(found.more) == 0


@settings(max_examples=200, deadline=None)
@given(problems(most_budgets=3), st.data())
def test_the_bound_holds_at_any_prices(one, data):
    price = st.one_of(st.just(0.0), st.floats(1e-12, 1e30))
    check_bound(one, Bound.of(one, np.array([data.draw(price) for _ in one.capacities])))


def test_the_bound_holds_where_numbers_fill_their_64_bits():
    draw = np.random.default_rng(3)
    for _ in range(200):
        values = np.sort(draw.integers(0, 2**58, (4, 3)))
        costs = np.sort(draw.integers(0, 2**58, (2, 4, 3)), axis=2)
        one = problem(values, costs, costs[:, :, -1].sum(axis=1) * 6 // 10)
        check_bound(one, Bound.of(one, 10.0 ** draw.uniform(-20, 20, 2)))


def check_bound(one, bound):
    picks, values, _ = within_budgets(one)
    regrets = bound.regrets[np.arange(len(one.groups)), picks].sum(axis=1).tolist()
    for value, regret in zip(values.tolist(), regrets, strict=True):
        assert value <= bound.most(regret)
        assert regret <= bound.slack(value)


@pytest.mark.parametrize("budgets", [1, 2, 3])
def test_a_search_cut_short_says_how_far_off_it_can_be(monkeypatch, budgets):
    """Lists that get too long, and HiGHS that finds nothing in its time."""
    monkeypatch.setattr(module, "LISTED", 0)
    monkeypatch.setattr(module, "WIDEST", 6)
    nothing = OptimizeResult(status=1, x=None, mip_dual_bound=None)
    monkeypatch.setattr(several_budgets, "milp", lambda *_, **__: nothing)
    draw = np.random.default_rng(0)
    cut = 0
    for _ in range(200):
        values = np.sort(draw.integers(0, 1000, (7, 3)))
        costs = np.sort(draw.integers(0, 1000, (budgets, 7, 3)), axis=2)
        one = problem(values, costs, costs[:, :, -1].sum(axis=1) * 6 // 10)
        best = best_of_all(one)
        if best is None or (costs[:, :, 0].sum(axis=1) > one.capacities).any():
            continue
        found = exact(one)
        assert worth(one, found.picks) <= worth(one, best) <= worth(one, found.picks) + found.gap
        cut += found.gap > 0
    assert cut > 5


@pytest.mark.parametrize("budgets", [1, 2])
def test_budgets_that_highs_exceeds_by_rounding_hold_in_whole_numbers(monkeypatch, budgets):
    """Costs so large that the tolerance of HiGHS is many units; values equal to costs, so that it exceeds budgets."""
    monkeypatch.setattr(module, "LISTED", 0)
    monkeypatch.setattr(module, "WIDEST", 0)
    spent_too_much = []
    tighter = several_budgets._Program.rooms
    monkeypatch.setattr(several_budgets._Program, "rooms", lambda *args: spent_too_much.append(args) or tighter(*args))
    draw = np.random.default_rng(8)
    for _ in range(20):
        costs = np.sort(draw.integers(1, 10**12, (budgets, 8, 3)), axis=2)
        best = draw.integers(0, 3, 8)
        capacities = costs[:, range(8), best].sum(axis=1) - 1  # this selection is one unit over every budget
        one = problem(costs.sum(axis=0) // budgets, costs, capacities)
        optimum = best_of_all(one)
        if optimum is None:
            continue
        found = exact(one)
        assert (costs[:, range(8), found.picks].sum(axis=1) <= capacities).all()
        assert worth(one, found.picks) <= worth(one, optimum) <= worth(one, found.picks) + found.gap
    assert len(spent_too_much) > 2 * 20  # the prices, the program, and tightened ones


@settings(max_examples=200, deadline=None)
@given(problems(most_budgets=3))
def test_no_more_is_gained_than_the_prices_say(one):
    """What a selection and the gap leave open, and what the prices allow for one percent more."""
    if best_of_all(one) is None:
        return
    found = exact(one)
    if len(one.capacities) > 1:
        bound = Bound.of(one, several_budgets.prices_of(one))
    for index, (more, percent) in enumerate(zip(found.more, one.percents, strict=True)):
        wider = one.capacities.copy()
        wider[index] += percent
        gained = worth(one, exact(one.within(wider)).picks) - worth(one, found.picks)
        if len(one.capacities) == 1:
            assert more == gained  # the list is complete, and knows
        else:
            assert gained <= more * (1 + 1e-6) + bound.most(0) - worth(one, found.picks) + 1


@settings(max_examples=150, deadline=None)
@given(problems(), st.data())
def test_a_larger_budget_never_gains_less(one, data):
    more = one.capacities + np.array([data.draw(st.integers(0, 50)) for _ in one.capacities])
    assert worth(one, exact(one.within(more)).picks) >= worth(one, exact(one).picks)


def test_costs_that_fall_as_bits_rise_are_solved_too():
    draw = np.random.default_rng(1)
    for _ in range(200):
        groups = int(draw.integers(1, 6))
        values = np.sort(draw.integers(0, 9, (groups, 3)))
        costs = draw.integers(0, 9, (1, groups, 3))
        one = problem(values, costs, [int(costs.min(axis=2).sum() + draw.integers(0, 9))])
        assert exact(one).picks == best_of_all(one)


def test_a_budget_below_the_least_is_refused():
    one = problem([[0, 1], [0, 1]], [[[3, 5], [3, 5]]], [5])
    with pytest.raises(BudgetError, match="cannot"):
        exact(one)


def test_budgets_that_exclude_each_other_are_refused():
    one = problem([[0, 1], [0, 1]], [[[0, 5], [0, 5]], [[5, 0], [5, 0]]], [4, 4])
    with pytest.raises(BudgetError, match="cannot all be met at once"):
        exact(one)


@pytest.mark.parametrize("budgets", [1, 2])
def test_hundreds_of_ugly_layers_are_solved_to_the_end(budgets):
    draw = np.random.default_rng(2)
    values = np.sort(draw.integers(0, 10**6, (300, 4)))
    costs = np.sort(draw.integers(0, 10**9, (budgets, 300, 4)), axis=2)
    one = problem(values, costs, costs[:, :, -1].sum(axis=1) * 7 // 10)
    found = exact(one)
    assert found.gap == 0
    assert (costs[:, range(300), found.picks].sum(axis=1) <= one.capacities).all()


def old_list(one):
    """The best by the plain list of all states, group by group, in plain Python."""
    states = {0: (0, ())}
    for group in reversed(range(len(one.groups))):
        grown = {}
        for cost, (value, picks) in states.items():
            for pick in range(len(one.choices)):
                spent = cost + int(one.costs[0, group, pick])
                if spent <= one.capacities[0]:
                    rank = value + int(one.values[group, pick]), (pick, *picks)
                    grown[spent] = max(grown.get(spent, rank), rank)
        best, states = -1, {}
        for cost in sorted(grown):
            if grown[cost][0] > best:
                best, states[cost] = grown[cost][0], grown[cost]
    return max(states.items(), key=lambda state: (state[1][0], -state[0]))[1][1]


@pytest.mark.parametrize("kind", ["equal", "linear", "ties", "correlated", "repeated"])
def test_hard_cases_keep_the_tie_rule(monkeypatch, kind):
    """Against the list of all states: where most selections tie, and where costs and values go together."""
    monkeypatch.setattr(module, "LISTED", 0)
    draw = np.random.default_rng(5)
    for groups in (30, 60):
        costs = np.sort(draw.integers(1, 9, (groups, 3)), axis=1)
        values = np.sort(draw.integers(0, 4, (groups, 3)), axis=1)
        if kind in ("equal", "linear"):
            costs = np.tile([2, 3, 4], (groups, 1))
            values = np.tile([0, 1, 2] if kind == "linear" else [0, 5, 7], (groups, 1))
        if kind == "correlated":
            values = costs + 3 * np.arange(3)
        if kind == "repeated":
            costs, values = (np.resize(table[:4], (groups, 3)) for table in (costs, values))
        one = problem(values, [costs], [int(costs[:, -1].sum()) * 7 // 10])
        found = exact(one)
        assert found.gap == 0
        assert found.picks == old_list(one)


@pytest.mark.parametrize("scale", [1, 2**40])
def test_values_of_any_size_and_sign(scale):
    draw = np.random.default_rng(9)
    for _ in range(30):
        costs = np.sort(draw.integers(0, 9, (1, 6, 3)), axis=2)
        one = problem(np.sort(draw.integers(-5, 9, (6, 3))) * scale, costs, [int(costs[:, :, -1].sum()) * 6 // 10])
        if int(costs[0].min(axis=1).sum()) <= one.capacities[0]:
            assert exact(one).picks == best_of_all(one)


def test_thousands_of_layers_end_with_a_proven_selection():
    """Costs in nanoseconds, gains over ten powers of ten that flatten out with bits."""
    draw = np.random.default_rng(11)
    bits = np.array([2, 3, 4, 8])
    values = (10 ** draw.uniform(5, 15, (2_000, 1)) * (1 - 4.0 ** -(bits - 2.0))).astype(np.int64)
    costs = (10 ** draw.uniform(6, 9, (1, 2_000, 1))).astype(np.int64) * bits
    one = problem(values, costs, costs[:, :, -1].sum(axis=1) * 7 // 10)
    assert exact(one).gap == 0
