"""Regret against a ceiling, and the exact test within starts that its p is of."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import rankdata

from bitplan.core.ceilings import Ceiling, CeilingSearch, Finalist, FinalScore, TriedPlan, select_ceilings
from bitplan.core.errors import InputError
from bitplan.core.records import Plan
from bitplan.core.studies import Start, Study
from bitplan.core.trials import Result, Trial
from bitplan.stats.ranksum import least_p, least_stratified_p, rank_sum, stratified_rank_sum
from bitplan.stats.regret import regrets


def by_every_split(strata):
    """The two-sided p by listing every split of every stratum."""
    sums, observed = [0.0], 0.0
    for first, second in strata:
        ranks = rankdata([*first, *second])
        observed += ranks[: len(first)].sum()
        own = [sum(chosen) for chosen in itertools.combinations(ranks, len(first))]
        sums = [one + other for one in sums for other in own]
    lower = np.mean([one <= observed + 1e-9 for one in sums])
    upper = np.mean([one >= observed - 1e-9 for one in sums])
    return min(1.0, 2 * min(lower, upper))


@pytest.mark.parametrize("seed", range(6))
def test_the_test_within_strata_counts_every_split(seed):
    chance = np.random.default_rng(seed)
    strata = [
        (chance.integers(0, 6, size=one).tolist(), chance.integers(0, 6, size=other).tolist())
        for one, other in [(3, 4), (4, 2), (2, 2)][: 2 + seed % 2]
    ]
    assert stratified_rank_sum(strata) == pytest.approx(by_every_split(strata))


def test_one_stratum_is_the_plain_test():
    first, second = [3.0, 4.0, 5.5, 7.0], [1.0, 2.0, 2.5, 3.5]
    assert stratified_rank_sum([(first, second)]) == rank_sum(first, second)
    assert least_stratified_p([(4, 4)]) == least_p(4, 4)


def test_what_a_stratum_has_in_common_is_no_part_of_it():
    above = (1.0, 2.0, 3.0, 4.0), (0.1, 0.2, 0.3, 0.4)
    shifted = tuple(tuple(100 + value for value in side) for side in above)
    least = pytest.approx(2 / math.comb(8, 4) ** 2)
    assert (
        stratified_rank_sum([above, shifted])
        == stratified_rank_sum([above, above])
        == least_stratified_p([(4, 4), (4, 4)])
        == least
    )
    pooled = rank_sum([*above[0], *shifted[0]], [*above[1], *shifted[1]])
    assert pooled > 100 * stratified_rank_sum([above, shifted])


def test_strata_that_are_too_large_are_refused():
    with pytest.raises(InputError, match="200 values at most"):
        stratified_rank_sum([([1.0] * 150, [2.0] * 150)] * 2)


STUDY = Study(
    name="s", task="t", model="m", choices=("w2a2", "w4a4"), budgets=("70%",), seeds=(0, 1, 2),
    methods=({"name": "eagl"}, {"name": "drift"}), start=Start(weights="w", seeds=(0, 5)), recipe={"steps": 1},
)  # fmt: skip


def plan_of(*precisions):
    return Plan(model="m", precisions=dict(zip("ab", precisions, strict=True)), method="x", selector="exact")


BEST, OTHER = plan_of("w4a4", "w2a2"), plan_of("w2a2", "w4a4")


def result(method, start, seed, score, plan):
    trial = Trial(
        task="t", model="m", start=f"id{start}", method=method, choices=STUDY.choices, recipe=STUDY.recipe, seed=seed,
        budgets=("70%",), start_seed=start,
    )  # fmt: skip
    return Result(trial=trial, plan=plan.id, score=score, higher_is_better=True)


def ceiling(scores, *, up=True):
    """`scores` are those of the best plan by start and seed."""
    made = tuple(
        FinalScore(start=f"id{start}", seed=seed, training=f"t{start}{seed}", score=score)
        for (start, seed), score in scores.items()
    )
    best = Finalist(picks=(1, 0), by="swap", expected=90, error=1, scores=made)
    about = CeilingSearch(study=STUDY.id, graph="g", start="id0", budget="70%", seed=0, hold_out=0.1)
    return Ceiling(
        search=about, groups=("a", "b"), choices=STUDY.choices, trainings=9, metric="top-1", higher_is_better=up,
        judged=(), finalists=(best,),
    )  # fmt: skip


WON = {(0, 0): 90.0, (0, 1): 91.0, (0, 2): 92.0, (5, 0): 80.0, (5, 1): 81.0, (5, 2): 82.0}
PLANS = {BEST.id: BEST, OTHER.id: OTHER}


def test_regret_is_the_mean_over_pairs_with_its_error():
    lacks = [1.0, 2.0, 3.0, 2.0, 2.0, 2.0]
    results = [result("eagl", *key, score - lack, OTHER) for (key, score), lack in zip(WON.items(), lacks, strict=True)]
    results += [result("drift", *key, score, BEST) for key, score in WON.items()]
    eagl, drift = regrets(STUDY, results, [ceiling(WON)], PLANS)
    assert (eagl.value, eagl.pairs, eagl.by_start) == (2.0, 6, (2.0, 2.0))
    assert eagl.error == pytest.approx(np.std(lacks, ddof=1) / math.sqrt(6))
    assert (eagl.low, eagl.high) == (pytest.approx(2 - 2.571 * eagl.error, abs=1e-3), pytest.approx(4 - eagl.low))
    strata = [([90, 91, 92], [89, 89, 89]), ([80, 81, 82], [78, 79, 80])]
    assert eagl.p == pytest.approx(by_every_split(strata))
    assert not eagl.same
    assert (drift.value, drift.error, drift.same, drift.corrected) == (0.0, 0.0, True, 1.0)
    assert drift.words == "0, the same plan"


def test_of_several_searches_at_a_budget_the_longest_counts_unless_it_has_no_finalists():
    tried = TriedPlan(picks=(1, 0), by="swap", seed=9, training="t", score=1.0)
    short, long, longest = (ceiling(WON).model_copy(update={"judged": (tried,) * count}) for count in (1, 2, 3))
    unfinished = longest.model_copy(update={"finalists": ()})
    for order in itertools.permutations([short, long, unfinished]):
        assert select_ceilings(order, STUDY) == [long]


def test_a_regret_is_marked_where_it_is_significant():
    results = [result("eagl", *key, score - 5, OTHER) for key, score in WON.items()]
    results += [result("drift", *key, score - 0.5, OTHER) for key, score in WON.items()]
    eagl, drift = regrets(STUDY, results, [ceiling(WON)], PLANS)
    assert (eagl.text_with_mark, drift.text_with_mark) == ("5.00 ± 0.00 ▲", "0.50 ± 0.00")


def test_a_method_may_be_better_than_the_plan_that_won_and_a_low_score_may_be_the_better_one():
    results = [result("eagl", *key, score + 1, OTHER) for key, score in WON.items()]
    assert regrets(STUDY, results, [ceiling(WON)], PLANS)[0].value == -1.0
    assert regrets(STUDY, results, [ceiling(WON, up=False)], PLANS)[0].value == 1.0


def test_only_trainings_with_the_same_start_and_seed_are_paired():
    results = [result("eagl", 0, 1, 88.0, OTHER)]
    found = regrets(STUDY, results, [ceiling(WON)], PLANS)
    assert [(one.title, one.value, one.error, one.pairs) for one in found] == [("eagl", 3.0, None, 1)]


def test_p_is_corrected_over_all_methods_that_have_another_plan():
    results = [result("eagl", *key, score - 3, OTHER) for key, score in WON.items()]
    results += [result("drift", *key, score - 3, OTHER) for key, score in WON.items()]
    first, second = regrets(STUDY, results, [ceiling(WON)], PLANS)
    assert (first.corrected, second.corrected) == (2 * first.p, 2 * second.p)
