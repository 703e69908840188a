"""The search for the demonstration: its criterion measures what it says, and its plans are as it says."""

import importlib
import statistics
from pathlib import Path

import pytest

from bitplan.gains.base import Context, estimate
from bitplan.selection.base import select
from bitplan.store.run_folder import RunFolder
from bitplan.study.context import RunContext

STUDIES = Path(__file__).parents[2] / "studies"


@pytest.fixture
def search(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDIES))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the script sets for good
    return importlib.import_module("demo_search")


def test_the_spread_of_plans_is_what_seeds_do_not_explain(search):
    means = [70.0 + 0.5 * place for place in range(20)]
    found = search.spread([[mean - 1, mean, mean, mean, mean + 1] for mean in means])
    assert found.within == pytest.approx(0.5**0.5)  # (1 + 1) / (5 − 1)
    assert found.between == pytest.approx((statistics.variance(means) - 0.5 / 5) ** 0.5)
    assert found.ratio == pytest.approx(found.between / found.within)
    assert found.low < found.ratio < found.high


def test_plans_that_differ_by_their_seeds_alone_do_not_differ(search):
    seeds = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert search.spread([seeds] * 20).ratio == 0
    turned = [[seed + (place + number) % 2 for number, seed in enumerate(seeds)] for place in range(20)]
    assert search.spread(turned).ratio == 0


def test_random_plans_differ_and_fill_the_budget(search, tmp_path):
    study = search.CANDIDATES["before"]
    setting = RunContext(study, RunFolder(tmp_path), trust=True)
    graph = setting.trace()
    costs = setting.costs(graph)
    drawn = search.random_studies(study, tmp_path, search.PLANS)
    plans = []
    for one in drawn:
        gains = estimate("random", None, graph, choices=one.choices, context=Context(seed=one.gain_seed))
        plans.append(select(graph, gains, costs, budget=search.BUDGET))
    assert len({str(plan.precisions) for plan in plans}) == len(plans) == search.PLANS
    for plan in plans:
        room = plan.limits[0].capacity - plan.limits[0].cost
        lowered = [group for group in graph.selectable if plan.precisions[group.layers[0].name] == study.choices[0]]
        rises = [costs[0].rows[group.name][1] - costs[0].rows[group.name][0] for group in lowered]
        assert 0 <= room < min(rises), "none of them could be raised"
