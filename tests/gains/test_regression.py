"""The oracle: which networks it trains, and that it finds the coefficients of a score that adds up."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from toys import RECIPE, Stripes, quantized

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.studies import Fit
from bitplan.gains.base import Context
from bitplan.gains.regression import Regression, describe_fit, fit_line, random_networks, split

WORTH = {"left": 3.0, "middle": 7.5, "wide": 1.25, "last": -0.5}


@dataclass(frozen=True)
class Additive(Stripes):
    """The score is the sum of what the groups at four bits are worth, and (`noise`) what chance adds."""

    noise: float = 0.0
    higher: bool = True

    @property
    def higher_is_better(self):
        return self.higher

    def score(self, model):
        plan = bitplan.plan_of(model)
        kept = [name for name in WORTH if plan.precisions[name].weight_bits == 4]
        chance = np.random.default_rng(len(kept) + sum(map(len, kept))).normal()
        return (1 if self.higher else -1) * (50 + sum(WORTH[name] for name in kept)) + self.noise * chance


@pytest.fixture(scope="module")
def start():
    return quantized(Stripes(), train=False)


def choices(graph):
    return bitplan.price("bmac", graph).choices


def context(task, **options):
    return Context(task=task, recipe=RECIPE.model_copy(update={"steps": 1}), **options)


def test_the_networks_are_those_of_the_paper():
    vectors = random_networks(48, 3, None, seed=0)
    assert len(vectors) == len(set(vectors)) == 135
    assert Counter(vector.count(0) for vector in vectors) == dict.fromkeys(range(2, 47), 3)
    assert vectors == random_networks(48, 3, None, seed=0) != random_networks(48, 3, None, seed=1)
    thinned = random_networks(48, 3, 60, seed=0)
    assert thinned == vectors[:60]
    assert set(Counter(vector.count(0) for vector in thinned).values()) == {1, 2}
    assert [len(part) for part in split(135, 48, 0.1, 0)] == [121, 14]


@pytest.mark.parametrize("higher", [True, False])
def test_it_recovers_the_coefficients_of_an_additive_task(start, higher):
    gains = bitplan.estimate("regression", *start, context=context(Additive(higher=higher)))
    assert {name: row[1] for name, row in gains.rows.items()} == pytest.approx(WORTH)
    assert max(row[1] for row in gains.errors.values()) < 1e-9
    assert gains.counts["trainings"] == gains.counts["steps"] == 1 + 3 + 3 + 3 + 1
    assert gains.counts["rank"] == gains.counts["unknowns"] == 5


def test_choices_between_get_their_share_by_bits(start):
    gains = bitplan.estimate("regression", *start, choices="w2a2,w3a3,w4a4", context=context(Additive()))
    assert gains.rows["middle"] == pytest.approx((0, 3.75, 7.5))
    assert gains.rows["left"][0] == 0


def test_by_loss_a_group_gains_what_the_loss_falls():
    task = Stripes()
    model, graph = quantized(task)
    setting = Context(task=task, recipe=RECIPE)
    method = Regression(by="loss", steps=3, lr_factor=1e-9)
    fit = method.fit(model, graph, choices(graph), setting)
    gains = bitplan.estimate(method, model, graph, context=setting)
    assert fit.metric == "loss"
    assert [row[1] for row in gains.rows.values()] == [-coefficient for coefficient in fit.coefficients]
    assert fit.measured[fit.vectors.index((0, 0, 0, 0))] > fit.measured[fit.vectors.index((1, 1, 1, 1))]
    assert sum(row[1] for row in gains.rows.values()) > 0


def test_the_record_tells_every_network_and_how_well_the_line_fits(start):
    model, graph = start
    method = Regression(held_out=0.2)
    fit = method.fit(model, graph, choices(graph), context(Additive(noise=0.1), seed=2))
    assert fit == Fit.from_json(fit.to_json())
    assert (fit.networks, fit.metric, fit.graph) == (11, "top-1", graph.id)
    assert len(fit.held_out) == 2
    assert fit.correlation > 0.99
    assert fit.epochs == pytest.approx(16 / 128)
    lines = np.array(fit.vectors) @ np.array(fit.coefficients) + fit.intercept
    assert fit.predicted == pytest.approx(lines.tolist())
    gains = bitplan.estimate("regression", model, graph, context=context(Additive(noise=0.1), seed=2), held_out=0.2)
    assert [row[1] for row in gains.rows.values()] == list(fit.coefficients)


def test_standard_errors_are_those_of_least_squares():
    """Against many draws of the noise: the spread of a coefficient is what one fit says of it."""
    chance = np.random.default_rng(0)
    vectors = random_networks(10, 3, None, seed=0)
    true, rows = np.arange(10.0), range(len(vectors))
    fits = [fit_line(vectors, np.array(vectors) @ true + chance.normal(size=len(vectors)), rows) for _ in range(400)]
    spread = np.std([fit.coefficients for fit in fits], axis=0)
    told = np.sqrt(np.mean(np.square([fit.errors for fit in fits]), axis=0))
    assert spread == pytest.approx(told, rel=0.15)


def test_too_few_networks_are_said(start, caplog):
    gains = bitplan.estimate("regression", *start, context=context(Additive()), networks=3)
    assert "3 networks cannot tell 5 unknowns apart" in caplog.text
    assert gains.errors is None
    assert gains.counts["rank"] < 5


def test_a_constant_score_has_no_correlation(start):
    vectors = random_networks(4, 3, None, seed=0)
    fit = describe_fit(start[1], vectors, [5.0] * len(vectors), metric="top-1", rows=split(len(vectors), 4, 0.2, 0))
    assert fit.correlation_held_out is None
    assert fit.residual == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("options", [{"per_level": 0}, {"networks": 1}, {"held_out": 1.0}, {"by": "luck"}])
def test_bad_options_are_one_line(start, options):
    with pytest.raises(InputError) as caught:
        bitplan.estimate("regression", *start, context=context(Additive()), **options)
    assert "\n" not in str(caught.value)
