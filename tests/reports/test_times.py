"""Runs whose budgets are times: the page, its slider, the figures and the tables are in milliseconds."""

import matplotlib.pyplot as plt
import pytest
from report_runs import digits_graph, result_of, study_of, trial_of, write_run

import bitplan
from bitplan.core.errors import InputError
from bitplan.reports.contents import axis_label, contents
from bitplan.reports.figures import draw_frontier, write_figures
from bitplan.reports.scores import choose, gather
from bitplan.reports.subject import run_subject
from bitplan.reports.tables import frontier, make
from bitplan.store.run_folder import RunFolder


def written(folder, costs, graph, model, budgets, **fields):
    """A small run: two methods at these budgets, three seeds each."""
    study = study_of(methods=("eagl", "uniform"), budgets=budgets, seeds=3, **fields)
    gains = {one.title: bitplan.estimate(one.name, model, graph, **one.options) for one in study.methods}
    write_run(folder, study, graph, gains, costs)
    run = RunFolder(folder)
    for method in study.methods:
        for place, budget in enumerate(budgets):
            for seed in study.seeds:
                trial = trial_of(study, method.name, budget, seed, method.options)
                score = 90 + place + seed / 10 + (method.name == "eagl")
                run.trials.keep(trial.id, result_of(trial, score).model_copy(update={"training": "t"}))
    return run


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """Nanoseconds as many as bit-MACs, and three budgets between the least and the most, one of them in us."""
    model, graph = digits_graph()
    bmac = bitplan.price("bmac", graph)
    costs = bmac.model_copy(update={"name": "latency", "unit": "ns"})
    fixed, most = sum(costs.fixed.values()), sum(row[-1] for row in costs.rows.values())
    amounts = [fixed + most * share // 100 for share in (60, 75, 90)]
    budgets = (f"{amounts[0] / 1e6:g}ms", f"{amounts[1] / 1e3:g}us", f"{amounts[2] / 1e6:g}ms")
    return written(tmp_path_factory.mktemp("timed"), costs, graph, model, budgets, cost="latency.csv")


def test_the_page_of_a_run_is_in_its_unit(timed):
    subject = run_subject(timed, timed.study.budgets[0])
    data = contents(subject, timed.plans)
    assert data["scores"]["unit"] == data["track"]["axis"] == "budget, ms of latency, whole network"
    amounts = [amount for _, amount in data["scores"]["budgets"]]
    assert amounts == sorted(amounts)
    assert amounts[1] == pytest.approx(float(timed.study.budgets[1].removesuffix("us")) / 1000)
    assert data["answer"]["under"].endswith("ms of latency, whole network")
    for index, (label, place, capacity) in enumerate(data["track"]["stops"]):
        for ride, title in zip(data["rides"], ("eagl", "uniform"), strict=True):
            plan = bitplan.select(timed.graph, timed.gains[title], timed.costs, budget=label)
            assert ride["cost"][ride["at"][index]] == plan.limits[0].cost
            assert plan.limits[0].capacity >= capacity
        assert place * 1e6 == pytest.approx(capacity + sum(timed.costs.fixed.values()))


def test_the_middle_of_the_budgets_is_found_across_units(timed):
    assert run_subject(timed).budget == timed.study.budgets[1]
    with pytest.raises(InputError, match="another kind"):
        run_subject(timed, "70%")
    assert choose(timed, budget=timed.study.budgets[2]).trial.budgets == (timed.study.budgets[2],)


def test_figures_and_tables_have_the_unit(timed, tmp_path):
    made = write_figures(timed, tmp_path)
    assert {path.stem for path in made.paths} >= {"frontier", "selections"}
    subject = run_subject(timed, timed.study.budgets[0])
    figure, axes = plt.subplots()
    draw_frontier(axes, subject, gather(subject, timed.plans), ["eagl"])
    assert axes.get_xlabel() == axis_label(subject) == "budget, ms of latency, whole network"
    assert min(axes.get_xticks()) == pytest.approx(float(timed.study.budgets[0].removesuffix("ms")))
    plt.close(figure)
    assert frontier(timed).rows[0][-1] is not None  # there is an area: all budgets lie on one axis
    assert make("differences", timed, plain=True, budgets=[timed.study.budgets[0]]).rows


def test_budgets_that_name_another_cost_are_shown_too(tmp_path):
    model, graph = digits_graph()
    run = written(tmp_path, bitplan.price("bmac", graph), graph, model, ("memory=0.9MB", "memory=700kB"))
    data = contents(run_subject(run), run.plans)
    assert data["cost"] == {"name": "memory", "unit": "bits"}
    assert data["answer"]["under"] == "0.9MB of memory, whole network"
    assert make("layers", run, plain=False, budgets=["memory=60%"]).rows
