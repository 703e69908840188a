"""The rank-sum test against brute force, scipy and the paper's two values."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu, permutation_test, rankdata

from bitplan.core.errors import InputError
from bitplan.stats.correction import holm, holm_floor
from bitplan.stats.ranksum import floor, rank_sum

SCORES = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=5)


def by_brute_force(first, second):
    ranks = rankdata([*first, *second])
    sums = [sum(ranks[list(places)]) for places in combinations(range(len(ranks)), len(first))]
    observed = sum(ranks[: len(first)])
    below, above = sum(one <= observed for one in sums), sum(one >= observed for one in sums)
    return min(1.0, 2 * min(below, above) / len(sums))


@given(SCORES, SCORES)
def test_p_is_the_share_of_all_splits(first, second):
    assert rank_sum(first, second) == pytest.approx(by_brute_force(first, second), abs=1e-12)
    assert rank_sum(first, second) == rank_sum(second, first)
    assert rank_sum(first, second) >= floor(len(first), len(second)) - 1e-12


@given(SCORES.filter(lambda one: len(one) > 1), SCORES.filter(lambda one: len(one) > 1))
def test_p_is_scipys_permutation_test(first, second):
    def statistic(ours, theirs):
        return rankdata([*ours, *theirs])[: len(ours)].sum()

    theirs = permutation_test((first, second), statistic, n_resamples=10**6, vectorized=False)
    assert rank_sum(first, second) == pytest.approx(theirs.pvalue, abs=1e-9)


@given(st.lists(st.floats(-5, 5), min_size=12, max_size=40, unique=True), st.integers(5, 7))
def test_without_ties_p_is_scipys_exact_one(values, cut):
    expected = mannwhitneyu(values[:cut], values[cut:], method="exact").pvalue
    assert rank_sum(values[:cut], values[cut:]) == pytest.approx(expected, rel=1e-9)


def test_the_papers_two_values():
    assert rank_sum([6, 7, 8, 9, 10], [1, 2, 3, 4, 5]) == pytest.approx(2 / 252)
    assert round(rank_sum([6, 7, 8, 9, 10], [1, 2, 3, 4, 5]), 4) == 0.0079
    assert round(rank_sum([1, 2, 3, 4, 5], [5, 5, 6, 7, 8]), 4) == 0.0238


def test_floors_of_three_and_five_seeds_alone_and_over_eight_budgets():
    assert floor(3, 3) == 0.10
    assert floor(5, 5) == 2 / 252
    assert floor(1, 1) == 1.0
    assert round(holm_floor([floor(5, 5)] * 8), 3) == 0.063
    assert rank_sum([4, 5, 6], [1, 2, 3]) == floor(3, 3)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert holm([]) == ()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_holm_never_lowers_a_p_keeps_their_order_and_its_floor(values):
    corrected = holm(values)
    for (p, q), (other_p, other_q) in combinations(zip(values, corrected, strict=True), 2):
        assert p <= q <= 1
        assert p >= other_p or q <= other_q
    assert min(corrected) == pytest.approx(holm_floor([min(values)] * len(values)))


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [([], [1.0], "1 to 100 values"), ([1.0] * 101, [1.0], "got 101"), ([float("nan")], [1.0], "finite")],
)
def test_bad_samples_are_refused_in_one_line(first, second, said):
    with pytest.raises(InputError, match=said):
        rank_sum(first, second)


def test_floors_need_values():
    with pytest.raises(InputError, match="at least one value"):
        floor(0, 3)
    with pytest.raises(InputError, match="at least one test"):
        holm_floor([])
