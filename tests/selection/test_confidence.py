"""How sure a selection is: known cases, the normal distribution, and what it refuses."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bitplan
from bitplan.core.errors import BudgetError, InputError
from bitplan.core.records import Gains, Graph, Layer
from bitplan.models.zoo import load_model


def alike(count):
    """A network of equal layers."""
    layers = tuple(
        Layer(name=f"l{n}", kind="linear", macs=100, weights=10, in_features=256) for n in range(count)
    )  # fmt: skip
    return Graph(model="alike", layers=layers)


def gains_of(graph, values, errors, choices="w2a2,w4a4"):
    names = [group.name for group in graph.selectable]
    steps = choices.count(",") + 1
    return Gains(
        method="m", choices=tuple(choices.split(",")), graph=graph.id,
        rows={n: tuple(v * step for step in range(steps)) for n, v in zip(names, values, strict=True)},
        errors=errors and {n: tuple(e * step for step in range(steps)) for n, e in zip(names, errors, strict=True)},
    )  # fmt: skip


def asked(values, errors, budget="75%", **options):
    graph = alike(len(values))
    gains = gains_of(graph, values, errors)
    return bitplan.confidence(graph, gains, bitplan.price("bmac", graph), budget=budget, **options)


def test_huge_gaps_make_everything_stable():
    found = asked([100, 1, 90, 2], [0.1] * 4)
    assert found.stable == ("l0", "l1", "l2", "l3")
    assert found.coin_flips == ()
    assert found.shares["l0"] == (0.0, 1.0)
    assert found.shares["l1"] == (1.0, 0.0)
    assert str(found).startswith("4 of 4 groups are a stable core (200 resamples")


def test_equal_gains_with_errors_are_coin_flips():
    found = asked([5, 5, 5, 5], [1.0] * 4, resamples=600)
    assert found.coin_flips == ("l0", "l1", "l2", "l3")
    for row in found.shares.values():
        assert row[1] == pytest.approx(0.5, abs=0.08)
    assert "0 of 4 groups are a stable core; 4 are coin flips: l0, l1, l2, l3" in str(found)


def test_a_stable_core_around_one_close_pair():
    found = asked([100, 10.0, 10.1, 1], [1.0] * 4)
    assert found.stable == ("l0", "l3")
    assert found.coin_flips == ("l1", "l2")
    assert str(found.chosen["l2"]) == "w4a4"
    assert found.share("l2") == found.shares["l2"][1]
    assert 0.4 < found.share("l2") < 0.7


def test_one_against_one_wins_as_often_as_the_normal_distribution_says():
    found = asked([11.0, 10.0], [1.0, 1.0], resamples=2000)
    expected = 0.5 * (1 + math.erf(1 / math.sqrt(2) / math.sqrt(2)))  # the difference is N(1, √2)
    assert found.share("l0") == pytest.approx(expected, abs=0.04)


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 3)), min_size=1, max_size=6),
    st.sampled_from(["50%", "75%", "100%"]),
    st.integers(0, 5),
)
def test_shares_add_up_repeat_for_a_seed_and_every_group_is_on_one_side(pairs, budget, seed):
    values, errors = zip(*pairs, strict=True)
    found = asked(values, errors, budget, resamples=8, seed=seed)
    assert found == asked(values, errors, budget, resamples=8, seed=seed)
    assert all(sum(row) == pytest.approx(1) for row in found.shares.values())
    assert sorted(found.stable + found.coin_flips) == sorted(found.shares)
    assert list(found.shares) == [f"l{n}" for n in range(len(pairs))]


@given(st.lists(st.floats(0, 10), min_size=2, max_size=6))
def test_without_error_every_resample_is_the_plan_itself(values):
    graph = alike(len(values))
    gains, costs = gains_of(graph, values, [0.0] * len(values)), bitplan.price("bmac", graph)
    found = bitplan.confidence(graph, gains, costs, budget="70%", resamples=3)
    plan = bitplan.select(graph, gains, costs, budget="70%")
    assert {name: plan.precisions[name] for name in found.chosen} == found.chosen
    assert sum(gains.rows[n][row.index(1.0)] for n, row in found.shares.items()) == pytest.approx(plan.gain)


def test_several_choices_budgets_and_linked_layers(graph):
    choices = "w2a2,w3a3,w4a4"
    gains = gains_of(graph, [3, 2, 1], [0.5, 0.5, 0.5], choices)
    costs = [bitplan.price(name, graph, choices) for name in ("bmac", "memory")]
    found = bitplan.confidence(graph, gains, costs, budget=["80%", "memory=80%"], resamples=50)
    assert list(found.shares) == ["a", "b", "c"]
    assert all(len(row) == 3 and sum(row) == pytest.approx(1) for row in found.shares.values())


def test_every_group_of_a_whole_network_is_answered():
    model, example = load_model("resnet50", weightless=True)
    network = bitplan.trace(model, example)
    values = [1 + n % 7 + n / 100 for n, _ in enumerate(network.selectable)]
    gains = gains_of(network, values, [0.3] * len(values))
    found = bitplan.confidence(network, gains, bitplan.price("bmac", network), budget="70%")
    assert len(found.stable) + len(found.coin_flips) == 41


def test_what_cannot_be_said_is_refused_in_one_line():
    with pytest.raises(InputError, match="the gains by m carry no standard errors.*hawq or alps"):
        asked([1, 2], None)
    with pytest.raises(InputError, match="at least one resample"):
        asked([1, 2], [1, 1], resamples=0)
    with pytest.raises(BudgetError, match="cannot be met"):
        asked([1, 2], [1, 1], "40%")
