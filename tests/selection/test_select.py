import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bitplan
from bitplan.core.errors import BudgetError, InputError, NothingToChoose, RecordError, UnknownName
from bitplan.core.precision import parse_choices
from bitplan.core.records import Costs, Gains, Graph, Layer, Link
from bitplan.selection.problem import Selection, to_integers
from bitplan.store.files import load, save

TWO = parse_choices("w2a2,w4a4")


def gains_of(graph, values, **more):
    names = [group.name for group in graph.selectable]
    rows = {name: (0.0, value) for name, value in zip(names, values, strict=True)}
    return Gains(method="mine", choices=TWO, rows=rows, graph=graph.id, **more)


def test_the_plan_holds_its_budget_and_its_provenance(graph):
    gains, costs = gains_of(graph, [1, 2, 3]), bitplan.price("bmac", graph)
    plan = bitplan.select(graph, gains, costs, budget="70%")
    whole = sum(row[-1] for row in costs.rows.values())
    (limit,) = plan.limits
    assert limit.capacity == whole * 70 // 100
    assert limit.cost == sum(4 * layer.macs if str(plan.precisions[layer.name]) == "w4a4" else 2 * layer.macs
                             for layer in graph.layers if not layer.fixed)  # fmt: skip
    assert limit.slack >= 0
    assert plan.gap == 0
    assert plan.sources == {"graph": graph.id, "gains": gains.id, "bmac": costs.id}
    assert plan.precisions["a"] == plan.precisions["side"]


def test_fixed_layers_do_not_count(graph):
    costs = bitplan.price("bmac", graph)
    assert set(costs.fixed) == {"stem", "head"}
    assert bitplan.select(graph, gains_of(graph, [1, 1, 1]), costs, budget="100%").limits[0].cost == 4 * (
        160 + 300 + 80
    )


def test_the_shadow_price_is_what_one_more_percent_gains(graph):
    gains, costs = gains_of(graph, [1, 2, 4]), bitplan.price("bmac", graph)
    for percent in range(50, 100):
        plan = bitplan.select(graph, gains, costs, budget=f"{percent}%")
        more = bitplan.select(graph, gains, costs, budget=f"{percent + 1}%")
        assert plan.limits[0].shadow_price >= more.gain - plan.gain - 1e-12
        assert plan.limits[0].shadow_price in {later - plan.gain for later in range(8)}


def test_several_budgets_hold_at_once(graph):
    gains = gains_of(graph, [5, 4, 3])
    costs = [bitplan.price("bmac", graph), bitplan.price("memory", graph)]
    plan = bitplan.select(graph, gains, costs, budget=["80%", "memory=70%"])
    assert [limit.cost_name for limit in plan.limits] == ["bmac", "memory"]
    assert all(limit.slack >= 0 for limit in plan.limits)
    alone = bitplan.select(graph, gains, costs, budget="80%")
    assert plan.gain <= alone.gain


def test_bits_per_weight_is_an_average_of_selectable_weights(graph):
    plan = bitplan.select(graph, gains_of(graph, [1, 1, 1]), bitplan.price("bmac", graph), budget="3bpw")
    weights = {layer.name: layer.weights for layer in graph.layers if not layer.fixed}
    spent = sum(count * plan.precisions[name].weight_bits for name, count in weights.items())
    assert spent <= 3 * sum(weights.values())
    assert plan.limits[0].cost == spent


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("45%", "budget 45% cannot be met: with every layer at its lowest precision (w2a2) the bmac is 50.0%. "
                "Raise the budget to at least 50.0%"),
        ("49.99%", "at least 50.0%"),
        ("100", "at least 1080"),
        ("1.5bpw", "is 2.00bpw. Raise the budget to at least 2.00bpw"),
        ("memory=10%", "was not priced"),
        ([], "no budget"),
    ],
)  # fmt: skip
def test_impossible_budgets_say_what_is_possible(graph, budget, words):
    with pytest.raises(InputError) as caught:
        bitplan.select(graph, gains_of(graph, [1, 1, 1]), bitplan.price("bmac", graph), budget=budget)
    assert words in str(caught.value)


def test_the_budget_that_the_error_names_can_be_met(graph):
    costs, gains = bitplan.price("memory", graph), gains_of(graph, [1, 1, 1])
    with pytest.raises(BudgetError) as caught:
        bitplan.select(graph, gains, costs, budget="1%")
    named = str(caught.value).split("at least ")[1].split(",")[0]
    assert bitplan.select(graph, gains, costs, budget=named).gain == 0


def test_records_of_another_graph_or_other_choices_are_refused(graph):
    gains, costs = gains_of(graph, [1, 1, 1]), bitplan.price("bmac", graph)
    other = graph.model_copy(update={"model": "other"})
    with pytest.raises(InputError, match="belong to graph"):
        bitplan.select(other, gains, costs, budget="70%")
    with pytest.raises(InputError, match="use the same choices"):
        bitplan.select(graph, gains, bitplan.price("bmac", graph, "w2a2,w8a8"), budget="70%")
    missing = Gains(method="mine", choices=TWO, rows={"a": (0, 1), "b": (0, 1)}, graph=graph.id)
    with pytest.raises(RecordError, match="lack group 'c'"):
        bitplan.select(graph, missing, costs, budget="70%")
    unknown = Costs(**(costs.model_dump() | {"rows": {**costs.rows, "bb": (1, 2)}}))
    with pytest.raises(RecordError, match="unknown group 'bb'"):
        bitplan.select(graph, gains, unknown, budget="70%")


def test_nothing_to_choose_says_which_rule_to_relax():
    narrow = Layer(
        name="a", kind="k", macs=1, weights=1, in_features=3, fixed=4, rule="narrow", why="3 inputs are not many"
    )
    with pytest.raises(
        NothingToChoose, match=r"all 1 layers are fixed, 1 by the rule on input features; .*--rules narrow=0"
    ):
        bitplan.estimate("uniform", None, Graph(model="m", layers=(narrow,)))


def test_a_selector_is_held_to_its_contract(graph):
    gains, costs = gains_of(graph, [1, 1, 1]), bitplan.price("bmac", graph)
    with pytest.raises(InputError, match="spends"):
        bitplan.select(graph, gains, costs, budget="60%", selector=lambda problem: Selection((1, 1, 1), 0))
    with pytest.raises(InputError, match="one choice for each"):
        bitplan.select(graph, gains, costs, budget="60%", selector=lambda problem: Selection((0,), 0))
    with pytest.raises(UnknownName, match="did you mean exact"):
        bitplan.select(graph, gains, costs, budget="60%", selector="exakt")


def test_the_frontier_has_the_plan_of_every_budget(graph):
    gains, costs = gains_of(graph, [0.1, 0.7, 0.3]), bitplan.price("bmac", graph)
    frontier = bitplan.select_all(graph, gains, costs)
    for percent in range(50, 101):
        assert frontier.plan(f"{percent}%") == bitplan.select(graph, gains, costs, budget=f"{percent}%")
    assert (frontier.costs[1:] > frontier.costs[:-1]).all()
    assert (frontier.values[1:] > frontier.values[:-1]).all()
    with pytest.raises(InputError, match="no point for a budget of 3bpw"):
        frontier.plan("3bpw")
    with pytest.raises(BudgetError, match="cannot be met"):
        frontier.plan("40%")


def test_a_point_of_the_frontier_is_its_plan_in_short(graph):
    gains, costs = gains_of(graph, [0.1, 0.7, 0.3]), bitplan.price("bmac", graph)
    frontier = bitplan.select_all(graph, gains, costs)
    for percent in range(50, 101):
        plan = frontier.plan(f"{percent}%")
        (limit,) = plan.limits
        point = frontier.point(limit.capacity)
        assert [TWO[pick] for pick in point.picks] == [plan.precisions[group.name] for group in graph.selectable]
        assert (point.cost, point.gain) == (limit.cost, plan.gain)
        assert point.shadow_price == pytest.approx(limit.shadow_price, abs=1e-12)
    with pytest.raises(BudgetError, match="the least is"):
        frontier.point(1)


@st.composite
def networks(draw):
    """Layers with links and fixed ones, gains with ties and zeros, two to four choices, one or two budgets."""
    choices = parse_choices(["w2a2", "w3a3", "w4a4", "w8a8"][: draw(st.integers(2, 4))])
    count = draw(st.integers(2, 6))
    names = [f"l{index}" for index in range(count)]
    fixed = draw(st.integers(0, count - 1))
    layers = [
        Layer(
            name=name, kind="linear", macs=draw(st.integers(1, 20)), weights=draw(st.integers(1, 20)), in_features=1,
            **({"fixed": "w8a8", "rule": "pattern", "why": "because"} if index == fixed else {}),
        )
        for index, name in enumerate(names)
    ]  # fmt: skip
    free = [name for index, name in enumerate(names) if index != fixed]
    links = (Link(layers=tuple(free[:2]), through="x"),) if len(free) > 2 and draw(st.booleans()) else ()
    graph = Graph(model="m", layers=tuple(layers), links=links)
    value = st.one_of(st.just(0.0), st.sampled_from([1.0, 0.5]), st.floats(0, 1))
    rows = {group.name: (0.0, *itertools.accumulate(draw(value) for _ in choices[1:])) for group in graph.selectable}
    gains = Gains(method="mine", choices=choices, rows=rows, graph=graph.id)
    least = math.ceil(100 * choices[0].weight_bits / choices[-1].weight_bits)
    budgets = [f"{draw(st.integers(least, 100))}%"]
    if draw(st.booleans()):
        budgets.append(f"memory={draw(st.integers(90, 100))}%")
    return graph, gains, budgets


@pytest.mark.parametrize(
    ("values", "options", "words"),
    [
        ([1, 2, 3], {}, "proven best"),
        ([0.1, 1e-30, 0.3], {}, r"proven best up to the rounding of gains \(\d(\.\d+)?e-\d\d\)"),
        ([0.1, 1e-30, 0.3], {"levels": 3}, r"proven best up to the rounding of gains \(0\.\d\)"),
        ([1, 2, 3], {"selector": lambda problem: Selection((0, 0, 0), 5)}, "at most 5 of gain below the best"),
        (
            [0.1, 1e-30, 0.3],
            {"selector": lambda problem: Selection((0, 0, 0), 2**58)},
            "at most 0.* of gain below the best",
        ),
        ([1, 2, 3], {"selector": "greedy"}, "not proven"),
    ],
)
def test_what_is_proven_is_said(graph, values, options, words, tmp_path):
    plan = bitplan.select(graph, gains_of(graph, values), bitplan.price("bmac", graph), budget="70%", **options)
    assert re.fullmatch(words, plan.proof)
    assert load(save(plan, tmp_path / "plan.json"), bitplan.Plan).proof == plan.proof


def test_rounding_is_no_part_of_a_plans_id(graph):
    plan = bitplan.select(graph, gains_of(graph, [0.1, 1e-30, 0.3]), bitplan.price("bmac", graph), budget="70%")
    assert plan.rounding > 0
    assert plan.id == plan.model_copy(update={"rounding": 0.0}).id


@settings(max_examples=400, deadline=None)
@given(networks())
def test_no_plan_within_the_budgets_is_better(network):
    graph, gains, budgets = network
    costs = [bitplan.price(name, graph, gains.choices) for name in ("bmac", "memory")]
    try:
        plan = bitplan.select(graph, gains, costs, budget=budgets)
    except BudgetError:
        assert "memory" in budgets[-1]  # steps make small layers dear; all-lowest is over 90 % there
        return
    names = [group.name for group in graph.selectable]
    best = 0.0
    for picks in itertools.product(range(len(gains.choices)), repeat=len(names)):
        spent = [sum(cost.rows[name][pick] for name, pick in zip(names, picks, strict=True)) for cost in costs]
        if all(used <= limit.capacity for used, limit in zip(spent, plan.limits, strict=False)):
            best = max(best, math.fsum(gains.rows[name][pick] for name, pick in zip(names, picks, strict=True)))
    assert plan.gain <= best <= plan.gain + plan.gap + 1e-12
    assert all(limit.slack >= 0 for limit in plan.limits)


@pytest.mark.parametrize(
    ("rows", "levels", "expected"),
    [
        ([(0.0, 1.0), (0.0, 0.5)], 10_000, [[0, 10_000], [0, 5_000]]),
        ([(0.0, 1.0), (0.0, 1e-9)], 10_000, [[0, 10_000], [0, 1]]),  # positive gains stay positive
        ([(0.0, 1.0), (0.0, 0.0)], 10_000, [[0, 10_000], [0, 0]]),
        ([(0.0, 2.0), (0.0, -1.0)], 10, [[0, 10], [0, -5]]),
        ([(0.0, 0.0)], 10, [[0, 0]]),
        ([(0.0, 0.75), (0.0, 0.5)], None, [[0, 3], [0, 2]]),
    ],
)
def test_levels_are_pure_scaling(rows, levels, expected):
    assert to_integers(rows, levels).values.tolist() == expected


@given(st.lists(st.floats(-1e300, 1e300, allow_subnormal=True), min_size=1, max_size=6))
def test_integers_are_the_gains_up_to_the_rounding_they_state(values):
    rows = [(0.0, value) for value in values]
    scaled = to_integers(rows)
    assert abs(int(scaled.values.sum())) < 2**62
    for (_, value), (_, whole) in zip(rows, scaled.values.tolist(), strict=True):
        assert abs(value - whole * scaled.unit) <= scaled.rounding + 1e-12 * abs(value)


def test_gains_whose_sums_are_inexact_in_floating_point_are_tied_exactly(graph):
    rows = {"a": (0.0, 0.25), "b": (0.0, 0.5), "c": (0.0, 0.25)}
    gains = Gains(method="mine", choices=TWO, rows=rows, graph=graph.id)
    # a + c gain what b does; b costs more, so a and c are chosen.
    plan = bitplan.select(graph, gains, bitplan.price("bmac", graph), budget=f"{2 * 540 + 600}")
    assert [name for name in "abc" if str(plan.precisions[name]) == "w4a4"] == ["a", "c"]
