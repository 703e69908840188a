"""Budgets in time, energy and bytes: the whole network, its fixed layers included."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bitplan
from bitplan.core.budget import UNITS
from bitplan.core.errors import BudgetError, InputError
from bitplan.core.precision import parse_choices
from bitplan.core.records import Costs, Gains, Graph, Layer

TWO = parse_choices("w2a2,w4a4")


def gains_of(graph, values):
    names = [group.name for group in graph.selectable]
    rows = {name: (0.0, value) for name, value in zip(names, values, strict=True)}
    return Gains(method="mine", choices=TWO, rows=rows, graph=graph.id)


@pytest.fixture
def latency(graph):
    """Microseconds: 300 for the fixed layers, 400 to 1000 for the others."""
    rows = {"a": (100, 300), "b": (200, 500), "c": (100, 200)}
    fixed = {"stem": 250, "head": 50}
    return Costs(name="latency", unit="us", choices=TWO, rows=rows, fixed=fixed, graph=graph.id)


def test_an_absolute_budget_is_the_capacity_that_fixed_layers_leave(graph, latency):
    gains = gains_of(graph, [1, 2, 3])
    for whole in range(700, 1400, 10):
        for written in (f"{whole}us", f"{whole / 1000}ms", f"latency={whole * 1000}ns"):
            plan = bitplan.select(graph, gains, latency, budget=written)
            plain = bitplan.select(graph, gains, latency, budget=whole - 300)
            assert (plan.precisions, plan.gain) == (plain.precisions, plain.gain)
            (limit,), (other,) = plan.limits, plain.limits
            assert (limit.capacity, limit.cost, limit.fixed) == (other.capacity, other.cost, 300)
            assert other.fixed is None
            assert limit.cost + limit.fixed <= whole


def test_a_share_is_of_the_choosable_layers_only(graph, latency):
    (limit,) = bitplan.select(graph, gains_of(graph, [1, 2, 3]), latency, budget="70%").limits
    assert (limit.capacity, limit.fixed) == (700, None)


def test_a_plan_says_what_fixed_layers_take_and_reads_back(graph, latency):
    plan = bitplan.select(graph, gains_of(graph, [1, 2, 3]), latency, budget="1ms")
    assert '"fixed": 300' in plan.to_json()
    assert bitplan.Plan.from_json(plan.to_json()) == plan
    shares = bitplan.select(graph, gains_of(graph, [1, 2, 3]), latency, budget="70%")
    assert all(limit.fixed is None for limit in bitplan.Plan.from_json(shares.to_json()).limits)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("0.5ms", "budget 0.5ms cannot be met: with every layer at its lowest precision (w2a2) the latency of the "
                  "whole network is 0.7ms, 0.3ms of it for the 2 fixed layers. Raise the budget to at least 0.7ms, "
                  "or add a precision below w2a2, or fix fewer layers"),
        ("0.0001s", "at least 0.0007s"),
        ("2MB", "budget 2MB is an amount of memory, and no cost counts that (latency counts us)"),
        ("latency=2MB", "latency counts us: ask for an amount in ns, us, ms, s"),
    ],
)  # fmt: skip
def test_what_cannot_be_met_is_said_with_the_part_of_the_fixed_layers(graph, latency, budget, words):
    with pytest.raises(BudgetError) as caught:
        bitplan.select(graph, gains_of(graph, [1, 1, 1]), latency, budget=budget)
    assert words in str(caught.value)


def test_a_budget_falls_on_the_first_cost_that_it_fits(graph, latency):
    memory, bmac = bitplan.price("memory", graph), bitplan.price("bmac", graph)
    plan = bitplan.select(graph, gains_of(graph, [1, 2, 3]), [bmac, latency, memory], budget=["1ms", "200bytes", "90%"])
    assert [limit.cost_name for limit in plan.limits] == ["latency", "memory", "bmac"]
    assert [limit.fixed for limit in plan.limits] == [300, sum(memory.fixed.values()), None]


def test_the_frontier_takes_absolute_budgets(graph, latency):
    gains = gains_of(graph, [0.1, 0.7, 0.3])
    frontier = bitplan.select_all(graph, gains, latency)
    for whole in range(700, 1400, 10):
        assert frontier.plan(f"{whole}us") == bitplan.select(graph, gains, latency, budget=f"{whole}us")
    with pytest.raises(InputError, match="no point for a budget of 2MB: ask for an amount in ns, us, ms, s"):
        frontier.plan("2MB")


def test_costs_that_say_nothing_of_fixed_layers_cannot_carry_it(graph, latency):
    silent = latency.model_copy(update={"fixed": {}})
    with pytest.raises(BudgetError, match="no number for 2 of its fixed layers"):
        bitplan.select(graph, gains_of(graph, [1, 1, 1]), silent, budget="1ms")
    assert bitplan.select(graph, gains_of(graph, [1, 1, 1]), silent, budget="700").gain == 2


def test_how_sure_a_choice_is_can_be_asked_within_absolute_budgets(graph, latency):
    gains = gains_of(graph, [1, 2, 3]).model_copy(update={"errors": dict.fromkeys("abc", (0.0, 0.5))})
    sure = bitplan.confidence(graph, gains, latency, budget="1ms", resamples=20)
    assert sure == bitplan.confidence(graph, gains, latency, budget="700", resamples=20)


@st.composite
def networks(draw):
    """Small graphs with measured costs in some unit of time, and a budget in another."""
    count = draw(st.integers(2, 6))
    fixed = draw(st.integers(0, count - 1))
    layers = tuple(
        Layer(name=f"l{index}", kind="linear", macs=1, weights=1, in_features=1,
              **({"fixed": "w8a8", "rule": "pattern", "why": "because"} if index == fixed else {}))
        for index in range(count)
    )  # fmt: skip
    graph = Graph(model="m", layers=layers)
    names = [group.name for group in graph.selectable]
    rows = {name: tuple(sorted(draw(st.tuples(*[st.integers(0, 5000)] * 2)))) for name in names}
    counted, asked = draw(st.sampled_from(["ns", "us", "ms"])), draw(st.sampled_from(["ns", "us", "ms", "s"]))
    spared = {f"l{fixed}": draw(st.integers(0, 5000))}
    cost = Costs(name="latency", unit=counted, choices=TWO, rows=rows, fixed=spared, graph=graph.id)
    gains = gains_of(graph, [draw(st.integers(0, 4)) for _ in names])
    least = sum(min(row) for row in rows.values()) + sum(spared.values())
    total = least + draw(st.integers(0, 10_000))
    return graph, gains, cost, bitplan.Budget.parse(f"{total}{counted}"), UNITS[asked]


@settings(max_examples=200)
@given(networks())
def test_no_plan_whose_whole_network_is_within_the_budget_is_better(network):
    graph, gains, cost, budget, unit = network
    same = bitplan.Budget(budget.place(unit), unit)
    plan = bitplan.select(graph, gains, cost, budget=same)
    names = [group.name for group in graph.selectable]
    allowed = budget.amount
    best = -math.inf
    for picks in itertools.product((0, 1), repeat=len(names)):
        spent = sum(cost.fixed.values()) + sum(cost.rows[name][pick] for name, pick in zip(names, picks, strict=True))
        if spent <= allowed:
            best = max(best, sum(gains.rows[name][pick] for name, pick in zip(names, picks, strict=True)))
    assert plan.gain == best
    (limit,) = plan.limits
    assert limit.cost + limit.fixed <= allowed
    assert limit.capacity + limit.fixed == allowed
