import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitplan.core.errors import InputError
from bitplan.stats.compare import area, deviation, mean

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=8)


@given(VALUES)
def test_mean_and_deviation_are_the_standard_librarys(values):
    assert mean(values) == pytest.approx(statistics.fmean(values))
    assert deviation(values) == pytest.approx(statistics.stdev(values), abs=1e-6)


def test_one_seed_has_no_deviation_and_none_no_mean():
    assert deviation([3.0]) is None
    assert mean([3.0]) == 3.0
    assert math.isnan(mean([]))


def test_area_is_the_mean_score_over_the_budgets():
    found = area({"60%": {0: 50.0}, "100%": {0: 70.0}, "80%": {0: 70.0}})  # in any order
    assert found.value == pytest.approx((20 * 60 + 20 * 70) / 40)
    assert found.low is None
    assert found.high is None


def test_unequal_distances_between_budgets_count():
    found = area({"60%": {0: 0.0}, "90%": {0: 60.0}, "100%": {0: 60.0}})
    assert found.value == pytest.approx((30 * 30 + 10 * 60) / 40)


def test_budgets_in_different_units_of_one_kind_lie_on_one_axis():
    times = {"600us": {0: 0.0}, "0.9ms": {0: 60.0}, "0.001s": {0: 60.0}}
    assert area(times).value == pytest.approx((30 * 30 + 10 * 60) / 40)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=2, max_size=6), st.integers(0, 9))
def test_the_interval_holds_the_area_lies_among_the_seeds_and_repeats(curves, seed):
    scores = {
        budget: dict(enumerate(row)) for budget, row in zip(("60%", "90%"), zip(*curves, strict=True), strict=True)
    }
    found = area(scores, seed=seed, resamples=300)
    assert found == area(scores, seed=seed, resamples=300)
    assert found.value == pytest.approx(mean(found.by_seed))
    assert min(found.by_seed) - 1e-9 <= found.low <= found.high <= max(found.by_seed) + 1e-9


def test_seeds_without_every_budget_do_not_count():
    found = area({"60%": {0: 1.0, 1: 2.0, 2: 9.0}, "70%": {0: 3.0, 1: 4.0}})
    assert found.by_seed == (2.0, 3.0)


@pytest.mark.parametrize(
    "scores",
    [
        {"60%": {0: 1.0}},
        {"60%": {0: 1.0}, "70%": {1: 1.0}},
        {"60%": {0: 1.0}, "3.2bpw": {0: 1.0}},
        {"60%": {0: 1.0}, "60.0%": {0: 2.0}},
        {"1ms": {0: 1.0}, "1000us": {0: 2.0}},
        {"1ms": {0: 1.0}, "2MB": {0: 2.0}},
        {},
    ],
)
def test_no_area_where_there_is_none(scores):
    assert area(scores) is None


def test_an_interval_needs_resamples():
    with pytest.raises(InputError, match="resamples"):
        area({"60%": {0: 1.0}, "70%": {0: 1.0}}, resamples=0)
