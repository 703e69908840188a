"""The rank-sum test against brute force, scipy and the paper's two values."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu, permutation_test, rankdata

from bitplan.core.errors import InputError
from bitplan.stats.compare import holm, holm_floor
from bitplan.stats.ranksum import MOST_COUNTED, doubled_ranks, is_exact, least_p, name_test, rank_sum

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
    assert rank_sum(first, second) >= least_p(len(first), len(second)) - 1e-12


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


@given(st.lists(st.integers(-3, 3) | st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_ranks_are_twice_scipys(values):
    found = doubled_ranks(values)
    assert found.tolist() == (2 * rankdata(values)).tolist()
    assert found.dtype == np.int64


def splits_in_whole_numbers(ranks, size, observed):
    """How many splits have at most the observed sum, in Python's integers; rank by rank, number by number."""
    ways = [{} for _ in range(size + 1)]
    ways[0][0] = 1
    for rank in ranks.tolist():
        for taken in range(size, 0, -1):
            for total, count in ways[taken - 1].items():
                if total + rank <= observed:
                    ways[taken][total + rank] = ways[taken].get(total + rank, 0) + count
    return sum(ways[size].values())


@pytest.mark.parametrize(
    ("counts", "apart", "digits"),
    [((25, 25), 0.1, 1), ((25, 25), 2, 1), ((18, 31), 0.3, 9), ((40, 3), 0.5, 0), ((30, 30), 9, 2), ((24, 24), 1, 0)],
)
def test_many_values_have_the_tail_of_all_splits_to_ten_digits(counts, apart, digits):
    draw = np.random.default_rng(sum(counts))
    first, second = (np.round(draw.normal(place * apart, 1, count), digits) for place, count in enumerate(counts))
    ranks, size = doubled_ranks([*first, *second]), len(first)
    observed = ranks[:size].sum()
    if observed > size * (len(ranks) + 1):  # looked at from the other end
        ranks, observed = 2 * (len(ranks) + 1) - ranks, 2 * (len(ranks) + 1) * size - observed
    whole = splits_in_whole_numbers(ranks, size, observed) / math.comb(len(ranks), size)
    assert rank_sum(first, second) == pytest.approx(min(1, 2 * whole), rel=1e-10)


@pytest.mark.parametrize("apart", [0.0, 0.1, 0.3])
def test_a_hundred_untied_values_on_each_side_are_near_scipys_exact_p(apart):
    draw = np.random.default_rng(1)
    first, second = draw.normal(0, 1, 100), draw.normal(apart, 1, 100)
    expected = mannwhitneyu(first, second, method="exact").pvalue
    assert rank_sum(first, second) == pytest.approx(expected, rel=0.2)
    assert rank_sum(first, second) == pytest.approx(rank_sum(second, first))


def test_the_largest_exact_test_and_the_smallest_approximate_one_agree():
    draw = np.random.default_rng(2)
    first, second = (np.round(draw.normal(place * 0.5, 1, MOST_COUNTED // 2), 1) for place in range(2))
    approximate = mannwhitneyu(first, second, method="asymptotic").pvalue
    assert approximate != rank_sum(first, second) == pytest.approx(approximate, rel=0.2)
    more = [*second, float(np.median(second))]
    assert rank_sum(first, more) == mannwhitneyu(first, more, method="asymptotic").pvalue


def test_values_that_are_all_equal_and_sides_that_are_apart():
    assert rank_sum([1.0] * 300, [1.0] * 200) == 1.0
    assert rank_sum([0.0] * 30, [1.0] * 30) == pytest.approx(least_p(30, 30), rel=1e-10)
    assert rank_sum(range(100), range(100, 200)) < 1e-30


def test_the_papers_two_values():
    assert rank_sum([6, 7, 8, 9, 10], [1, 2, 3, 4, 5]) == pytest.approx(2 / 252)
    assert round(rank_sum([6, 7, 8, 9, 10], [1, 2, 3, 4, 5]), 4) == 0.0079
    assert round(rank_sum([1, 2, 3, 4, 5], [5, 5, 6, 7, 8]), 4) == 0.0238


def test_floors_of_three_and_five_seeds_alone_and_over_eight_budgets():
    assert least_p(3, 3) == 0.10
    assert least_p(5, 5) == 2 / 252
    assert least_p(1, 1) == 1.0
    assert round(holm_floor([least_p(5, 5)] * 8), 3) == 0.063
    assert rank_sum([4, 5, 6], [1, 2, 3]) == least_p(3, 3)


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
    [([], [1.0], "at least one value"), ([float("nan")], [1.0], "finite")],
)
def test_bad_samples_are_refused_in_one_line(first, second, said):
    with pytest.raises(InputError, match=said):
        rank_sum(first, second)


def test_floors_need_values():
    with pytest.raises(InputError, match="at least one value"):
        least_p(0, 3)
    with pytest.raises(InputError, match="at least one test"):
        holm_floor([])


def test_the_test_is_named_exact_up_to_sixty_values_of_one_stratum():
    scores = [float(seed) for seed in range(MOST_COUNTED)]
    assert is_exact([(scores[:30], scores[30:])])
    assert not is_exact([(scores[:30], [*scores[30:], 0.0])])
    assert is_exact([(scores, scores), (scores, scores)])
    assert name_test([True, True]) == name_test([]) == "exact rank-sum test"
    assert name_test([False]) == "rank-sum test (normal approximation)"
    assert name_test([True, False]) == "rank-sum test (exact up to 60 scores, a normal approximation beyond)"
