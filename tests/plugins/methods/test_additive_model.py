"""The additive model of plans: what it learns of steps and of plans, and how sure it is."""

import numpy as np
import pytest

from bitplan.plugins.methods.ceiling import AdditiveModel


def plans(groups, choices, count, seed=0):
    chance = np.random.default_rng(seed)
    return [tuple(int(pick) for pick in chance.integers(choices, size=groups)) for _ in range(count)]


def total(worth, picks):
    return float(sum(worth[group, pick] for group, pick in enumerate(picks)))


@pytest.mark.parametrize("choices", [2, 3])
def test_it_finds_the_worth_of_every_choice(choices):
    chance = np.random.default_rng(1)
    worth = np.cumsum(np.hstack([np.zeros((6, 1)), chance.random((6, choices - 1))]), axis=1)
    tried = plans(6, choices, 60)
    model = AdditiveModel.fit(choices, [(picks, 80 + total(worth, picks)) for picks in tried])
    np.testing.assert_allclose(model.gains(), worth, atol=0.02)
    new = plans(6, choices, 1, seed=5)[0]
    assert model.expected(new) == pytest.approx(80 + total(worth, new), abs=0.05)


@pytest.mark.parametrize("place", ["tried", "lowest", "highest"])
def test_errors_are_as_large_as_its_mistakes(place):
    chance = np.random.default_rng(2)
    misses = []
    for _ in range(60):
        worth = np.hstack([np.zeros((8, 1)), chance.normal(0, 1, (8, 1))])
        scored = [
            (picks, total(worth, picks) + chance.normal(0, 0.5)) for picks in plans(8, 2, 25, chance.integers(99))
        ]
        model = AdditiveModel.fit(2, scored)
        one = {"tried": scored[0][0], "lowest": (0,) * 8, "highest": (1,) * 8}[place]
        misses.append((model.expected(one) - total(worth, one)) / model.error(one))
    assert 0.7 < np.std(misses) < 1.4
    assert abs(np.mean(misses)) < 0.4


def test_a_plan_that_is_better_than_its_groups_say_is_believed_when_it_was_tried_often():
    chance = np.random.default_rng(3)
    usual = [(picks, float(sum(picks)) + chance.normal(0, 0.1)) for picks in plans(5, 2, 40)]
    odd = (1, 0, 1, 0, 0)
    scored = [one for one in usual if one[0] != odd] + [(odd, 12.0 + chance.normal(0, 0.1)) for _ in range(6)]
    model = AdditiveModel.fit(2, scored)
    assert model.expected(odd) > 11
    assert model.best_tried() == odd


def test_draws_spread_as_what_is_known_does():
    scored = [(picks, float(sum(picks))) for picks in plans(4, 2, 3)]
    model, chance = AdditiveModel.fit(2, scored), np.random.default_rng(0)
    draws = np.array([model.draw(chance) for _ in range(4000)])
    np.testing.assert_allclose(np.cov(draws.T), model.covariance, atol=0.1 * model.covariance.max())


def test_equal_scores_say_nothing_and_break_nothing():
    model = AdditiveModel.fit(2, [(picks, 50.0) for picks in plans(4, 2, 6)])
    assert model.expected((1, 1, 1, 1)) == pytest.approx(50)
    assert np.isfinite(model.draw(np.random.default_rng(0))).all()
