"""Proposals by an additive model: they fit, repeat from their seed, and find the best plan of an additive problem."""

import numpy as np
import pytest
from additive import best_of_all, problem

from bitplan.plugins.methods.ceiling import Swaps


def searched(groups, trainings, *, noise=0.0, seed=0, choices="w2a2,w4a4", given=()):
    """The search with trainings whose scores are sums of worths, and noise; gives it, its aim and its judge."""
    _, aim, bench = problem(groups, choices=choices, seed=seed)
    swaps = Swaps(aim, seed, given, randoms=min(groups * (len(aim.choices) - 1), trainings // 3))
    chance, proposals = np.random.default_rng(seed), swaps.first()
    while len(swaps.scored) < trainings:
        asked = proposals[: trainings - len(swaps.scored)]
        assert asked
        assert len({picks for picks, _ in asked}) == len(asked)
        assert all(aim.fits(picks) for picks, _ in asked)
        swaps.learn_([(picks, bench.total(picks) + noise * chance.standard_normal()) for picks, _ in asked])
        proposals = swaps.propose()
    return swaps, aim, bench


@pytest.mark.parametrize(("groups", "choices"), [(10, "w2a2,w4a4"), (6, "w2a2,w3a3,w4a4")])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_best_plan_of_an_additive_problem_is_found(groups, choices, seed):
    swaps, aim, bench = searched(groups, 45, seed=seed, choices=choices)
    assert bench.total(swaps.model.best_tried()) == pytest.approx(best_of_all(aim, bench))


def test_noise_of_a_third_of_what_a_group_is_worth_costs_less_than_the_noise():
    noise, lost, random_lost = 0.17, [], []
    for seed in range(4):
        swaps, aim, bench = searched(8, 48, noise=noise, seed=seed)
        best = best_of_all(aim, bench)
        lost.append(best - bench.total(swaps.model.best_tried()))
        random_lost += [best - bench.total(picks) for picks, by in swaps.first() if by == "random"]
    assert max(lost) < noise
    assert np.mean(lost) < 0.1 * np.mean(random_lost)


def test_proposals_depend_on_the_seed_and_the_scores_alone():
    first, again = (searched(6, 30, noise=0.1)[0].scored for _ in range(2))
    assert first == again
    other = searched(6, 30, noise=0.1, seed=1)[0].scored
    assert [picks for picks, _ in other] != [picks for picks, _ in first]


def test_given_plans_come_first_and_once_with_all_who_chose_them():
    _, aim, _ = problem(5)
    low = tuple([0] * 5)
    swaps = Swaps(aim, 0, [(low, "eagl"), (low, "alps"), ((1, 0, 0, 0, 0), "drift")], randoms=2)
    assert swaps.first()[:2] == [(low, "eagl, alps"), ((1, 0, 0, 0, 0), "drift")]
    assert {by for _, by in swaps.first()[2:]} <= {"random"}


def test_a_problem_with_two_plans_goes_on_with_what_there_is():
    swaps, _, _ = searched(1, 9)
    assert len(swaps.scored) == 9
