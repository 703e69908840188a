"""Drift in context: plans that are moved one group at a time, until nothing changes."""

import numpy as np
import pytest
import torch
from toys import Stripes, quantized

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.precision import parse_choices
from bitplan.gains.base import Context, make_constraint
from bitplan.plugins.methods.drift_in_context import DriftInContext, _Around

TASK = Stripes(samples=256)
CHOICES = "w2a2,w4a4"


@pytest.fixture(scope="module")
def start():
    torch.set_num_threads(1)
    return quantized(Stripes())


def settled(start, choices=CHOICES, budget="70%", seed=0, store=None, **options):
    context = Context(task=TASK, seed=seed, store=store)
    options = {"samples": 128, "decide": 256, **options}
    return bitplan.estimate("drift_in_context", *start, choices=choices, context=context, budget=budget, **options)


def bench_of(start, budget="70%", choices=CHOICES):
    model, graph = start
    aim = make_constraint(graph, parse_choices(choices), budget)
    return aim, _Around(DriftInContext(samples=128), model, graph, Context(task=TASK, aim=aim), aim)


def test_a_group_is_worth_what_moving_it_alone_changes(start):
    aim, bench = bench_of(start, choices="w2a2,w3a3,w4a4")
    plan = aim.repair(aim.top)
    table = bench.around(plan, part=1)
    for group in range(len(plan)):
        moved = [(*plan[:group], choice, *plan[group + 1 :]) for choice in range(3)]
        low, middle, high = bench.divergences(moved, 1, 128).mean(axis=1)
        assert table[group] == pytest.approx((0, low - middle, low - high), abs=1e-12)


def test_the_plan_is_within_the_budget_and_no_farther_than_that_of_drift_where_it_was_decided(start):
    _, graph = start
    gains = settled(start, rounds=4)
    plan = bitplan.select(graph, gains, bitplan.price("bmac", graph), budget="70%")
    aim, bench = bench_of(start)
    first = aim.best(bench.around(aim.top, part=0))
    chosen = tuple(int(plan.precisions[name] == aim.choices[1]) for name in aim.groups)
    assert aim.fits(chosen)
    of_chosen, of_first = bench.divergences([chosen, first], 5, 256).mean(axis=1)
    assert of_chosen <= of_first
    assert "for 70% alone" in gains.notes[-1]


def test_it_counts_what_it_runs(start):
    groups = len(start[1].selectable)
    gains = settled(start, rounds=1)
    plans = gains.counts["plans"]
    assert plans in (1, 2)
    assert gains.spend.forwards == 128 * (1 + groups) + 128 * (2 + groups) + 256 * (1 + plans)
    assert gains.spend.evaluations == groups + (1 + groups) + plans
    assert gains.spend.labels is False


def test_it_repeats_and_goes_on_from_its_store(start, tmp_path):
    whole = settled(start)
    assert settled(start, store=tmp_path).id == whole.id
    kept = sorted(tmp_path.iterdir())
    for path in kept[::2]:
        path.unlink()
    assert settled(start, store=tmp_path).id == whole.id
    assert sorted(tmp_path.iterdir()) == kept
    assert settled(start, seed=1).id != whole.id


def test_with_room_for_all_everything_is_at_the_highest(start):
    _, graph = start
    plan = bitplan.select(graph, settled(start, budget="100%"), bitplan.price("bmac", graph), budget="100%")
    assert {plan.precisions[group.name] for group in graph.selectable} == {bitplan.Precision.parse("w4a4")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"decide": 0}, "at least one sample"),
        ({"budget": None}, "drift_in_context chooses within a budget"),
    ],
)
def test_what_cannot_work_is_one_line(start, options, message):
    with pytest.raises(InputError, match=message):
        settled(start, **options)


def test_means_are_over_rounds_in_context_alone(start, monkeypatch):
    """The first table, of groups lowered alone, leads to a first plan and no further."""
    seen = []
    best = type(bench_of(start)[0]).best
    monkeypatch.setattr(
        "bitplan.selection.budget_constraint.BudgetConstraint.best",
        lambda aim, gains: seen.append(gains) or best(aim, gains),
    )
    settled(start, rounds=2)
    aim, bench = bench_of(start)
    assert np.array_equal(seen[0], bench.around(aim.top, 0))
    assert np.array_equal(seen[1], bench.around(best(aim, seen[0]), 1))
