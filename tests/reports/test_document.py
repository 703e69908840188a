"""What the page holds, without a browser."""

import html
import json
import re
import shlex
import sys

import pytest
from report_runs import BUDGETS, digits_graph, digits_run, result_of, study_of, trial_of, write_run

import bitplan
from bitplan.cli import main
from bitplan.core.errors import FileError, InputError
from bitplan.core.records import Graph, Layer, Link, Plan
from bitplan.costs.standard import total
from bitplan.reports.contents import contents
from bitplan.reports.document import escape_json, render, report, report_plan
from bitplan.reports.subject import plan_subject, run_subject
from bitplan.reports.tables import frontier
from bitplan.store.files import save
from bitplan.store.run_folder import RunFolder

NASTY = "</script><script>alert('x')</script><!-- &amp; \u2028\u2029 @STYLE@ 'quoted' \"double\""


def data_of(page):
    """The data that the page's own script reads."""
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    return json.loads(block)


def filled(folder, scores, **fields):
    """A small run with the given scores: {(method, budget): [score per seed]}."""
    folder = digits_run(folder, results=False, **fields)
    study = RunFolder(folder).study
    options = {method.title: method.options for method in study.methods}
    for (method, budget), values in scores.items():
        for seed, score in enumerate(values):
            trial = trial_of(study, method, budget, seed, options.get(method))
            RunFolder(folder).trials.keep(trial.id, result_of(trial, score))
    return folder


def page_data(folder, **options):
    return contents(run_subject(RunFolder(folder), **options), RunFolder(folder).plans)


def test_names_cannot_leave_their_script_element(tmp_path):
    layers = [Layer(name=f"{i} {NASTY}", kind=NASTY, macs=10, weights=10, in_features=256) for i in range(4)]
    link = Link(layers=(layers[0].name, layers[1].name), through=NASTY)
    graph = Graph(model=NASTY, layers=tuple(layers), links=(link,))
    gains, cost = bitplan.estimate("uniform", None, graph), bitplan.price("bmac", graph)
    plan = bitplan.select(graph, gains, cost, budget="75%")
    page = report_plan(plan, graph, gains, (cost,), tmp_path / "page.html", f"bitplan plan {NASTY}").read_text()
    assert page.count("<script") == 2  # the data and the page's own
    assert page.count("</script>") == 2
    assert "<!-- &amp;" not in page
    data = data_of(page)
    assert data["network"]["groups"][0]["layers"][1][0] == f"1 {NASTY}"
    assert data["network"]["groups"][0]["through"] == NASTY
    assert NASTY in html.unescape(re.search("<title>(.*?)</title>", page, re.DOTALL)[1])


def test_escaped_json_reads_back_equal():
    content = {NASTY: [NASTY, 1.5, None, "\ud800"]}
    assert json.loads(escape_json(content)) == content
    assert not set("<>&\u2028\u2029") & set(escape_json(content))
    with pytest.raises(ValueError, match="JSON compliant"):
        escape_json({"x": float("nan")})


def test_only_the_pages_own_script_and_style_may_run(run, tmp_path):
    page = report(run, tmp_path / "page.html").read_text()
    policy = re.search('Content-Security-Policy" content="(.*?)"', page)[1]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert len(page) < 300_000


def test_the_answer_is_the_best_by_mean_and_names_its_rivals(run):
    data = page_data(run.path)["answer"]
    assert (data["method"], data["budget"]) == ("eagl", "80%")  # the middle of four is the upper one
    assert "Significantly better than" in data["sentences"][0]
    assert "first_to_last (p = 0.0079)" in data["sentences"][0]
    assert [row["title"] for row in data["rows"]] == ["eagl", "w2a2", "w4a4", "float"]
    plan = bitplan.select(run.graph, run.gains["eagl"], run.costs, budget="80%")
    figures = total(plan, run.graph)
    assert (data["bits"], data["bops"], data["bmacs"]) == (figures.bits, figures.bops, figures.bmacs)
    assert data["cost"] == plan.limits[0].cost
    assert page_data(run.path, budget="60%")["answer"]["budget"] == "60%"


def test_the_command_makes_the_recommended_plan_again(run, tmp_path, monkeypatch):
    command = page_data(run.path, budget="70%")["answer"]["command"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    made = Plan.from_json((tmp_path / "plan.json").read_text())
    assert made.id in run.plans
    assert made.method == "eagl"


def test_every_stop_has_the_best_plan_and_its_figures(run):
    data = page_data(run.path)
    stops = data["track"]["stops"]
    assert len(stops) <= 200
    assert data["track"]["complete"]
    assert {"60%", "70%", "80%", "90%"} <= {label for label, *_ in stops}
    for place, method in enumerate(["eagl", "uniform", "first_to_last"]):
        ride = data["rides"][place]
        for index in range(0, len(stops), 7):
            plan = bitplan.select(run.graph, run.gains[method], run.costs, budget=stops[index][0])
            at = ride["at"][index]
            shown = [data["choices"][int(pick)]["name"] for pick in ride["picks"][at]]
            assert shown == [str(plan.precisions[group.name]) for group in run.graph.selectable]
            assert ride["cost"][at] == plan.limits[0].cost
            assert ride["gain"][at] == pytest.approx(plan.gain)
            assert ride["price"][index] == pytest.approx(plan.limits[0].shadow_price, abs=1e-9)
            figures = total(plan, run.graph)
            assert (ride["bops"][at], ride["bits"][at]) == (figures.bops, figures.bits)
            assert ride["smaller"][at] == pytest.approx(figures.compression)


@pytest.mark.parametrize(
    ("scores", "fields", "said"),
    [
        ({}, {}, "No trial is done yet"),
        ({("eagl", "60%"): [90.0, 91.0]}, {"seeds": 2}, "No trial is done at 80%"),
        ({("eagl", "80%"): [90.0], ("uniform", "80%"): [89.0]}, {"seeds": 1}, "a single seed"),
        ({("eagl", "80%"): [90.0, 91.0]}, {"seeds": 2, "methods": ("eagl",)}, "nothing to compare"),
        ({("eagl", "80%"): [9, 9.1, 9.2], ("uniform", "80%"): [8, 8.1, 8.2]}, {"seeds": 3}, "p cannot be below 0.1"),
        ({("uniform", "80%"): [9, 9.1, 9.2, 9.3, 9.4], ("eagl", "80%"): [8, 8.1, 8.2, 8.3, 8.4]}, {},
         "Significantly better than eagl (p = 0.0079) by the exact rank-sum test."),
        ({("eagl", b): [9.0, 9.1, 9.2, 9.3] for b in BUDGETS} | {("uniform", b): [8, 8.1, 8.2, 8.3] for b in BUDGETS},
         {"seeds": 4}, "Better than uniform (p = 0.029) by the exact rank-sum test, not after Holm's correction"),
        ({("uniform", "80%"): [9 + seed / 100 for seed in range(31)],
          ("eagl", "80%"): [8 + seed / 100 for seed in range(31)]},
         {"seeds": 31}, "by the rank-sum test (normal approximation)."),
        ({("eagl", "80%"): [9.0] * 5, ("uniform", "80%"): [9.0] * 5}, {}, "exactly the same mean"),
        ({("eagl", "80%"): [9.0, 8.0, 9.5, 8.5, 9.2], ("uniform", "80%"): [8.9, 8.1, 9.4, 8.6, 9.1]}, {},
         "Not distinguishable from uniform"),
    ],
)  # fmt: skip
def test_what_is_missing_or_unsure_is_said_in_words(tmp_path, scores, fields, said):
    answer = page_data(filled(tmp_path, scores, **fields))["answer"]
    assert said in " ".join(answer["sentences"])


def test_the_frontier_says_what_is_thin(tmp_path, run):
    notes = page_data(filled(tmp_path, {("eagl", "80%"): [90.0]}, seeds=1))["scores"]["notes"]
    text = " ".join(notes)
    for part in (
        "1 of 12 trials are done",
        "One seed only",
        "Only one method",
        "No float network and none at one precision",
    ):
        assert part in text
    assert "1 failed" in " ".join(page_data(run.path)["scores"]["notes"])
    assert [row[-1] for row in page_data(run.path)["trials"] if row[-1]] == ["Diverged: the loss is NaN at step 120"]


def test_the_score_is_called_as_the_task_calls_it(tmp_path):
    folder = filled(tmp_path, {("eagl", "80%"): [90.0, 91.0]})
    assert page_data(folder)["scores"]["metric"] == "top-1"
    assert "top-1 by" in frontier(RunFolder(folder)).title
    trials = RunFolder(folder).trials
    for name, result in trials.read_all().items():
        trials.keep(name, result.model_copy(update={"metric": ""}))
    assert page_data(folder)["scores"]["metric"] == "score"
    assert "score by" in frontier(RunFolder(folder)).title


def test_a_lower_score_can_be_the_better_one(tmp_path):
    folder = digits_run(tmp_path, results=False, seeds=2)
    study = RunFolder(folder).study
    for method, score in (("eagl", 3.0), ("uniform", 1.0)):
        options = next(one.options for one in study.methods if one.name == method)
        for seed in range(2):
            trial = trial_of(study, method, "80%", seed, options)
            lower = result_of(trial, score + seed).model_copy(update={"higher_is_better": False})
            RunFolder(folder).trials.keep(trial.id, lower)
    assert page_data(folder)["answer"]["method"] == "uniform"


def test_a_plan_alone_has_no_parts_that_need_results(tmp_path):
    model, graph = digits_graph()
    gains = bitplan.estimate("eagl", model, graph, steps="mse")
    costs = (bitplan.price("bmac", graph), bitplan.price("memory", graph))
    plan = bitplan.select(graph, gains, costs, budget=["70%", "memory=70%"])
    data = contents(plan_subject(plan, graph, gains, costs, "bitplan plan x {brace}"), {})
    assert data["scores"] is data["trials"] is data["additivity"] is None
    assert data["answer"]["command"] == "bitplan plan x {brace}"
    assert data["answer"]["others"] == ["memory=70%"]
    ride, start = data["rides"][0], data["track"]["start"]
    assert ride["gain"][ride["at"][start]] == plan.gain
    assert None in ride["at"] or min(ride["cost"]) < plan.limits[0].cost
    assert data["histograms"]["bits"] == 4
    counts, bits = data["histograms"]["layers"]["blocks.2.conv1"]["4"]
    assert sum(counts) == sum(data["histograms"]["layers"]["blocks.2.conv1"]["2"][0]) == 128 * 128
    assert bits == pytest.approx(gains.rows["blocks.2.conv1"][-1], rel=1e-6)
    assert render(data).startswith("<!doctype html>")


def test_bits_per_weight_and_three_choices(tmp_path):
    _, graph = digits_graph()
    choices = "w2a16,w4a16,w8a16"
    gains, cost = bitplan.estimate("uniform", None, graph, choices=choices), bitplan.price("memory", graph, choices)
    plan = bitplan.select(graph, gains, cost, budget="3.5bpw")
    data = contents(plan_subject(plan, graph, gains, (cost,), "x"), {})
    assert data["track"]["stops"][data["track"]["start"]][0] == "3.5bpw"
    assert all(label.endswith("bpw") for label, *_ in data["track"]["stops"])
    assert set("".join(data["rides"][0]["picks"])) == set("012")
    assert data["answer"]["bmacs"] is None


def test_wide_histograms_become_narrow_ones(tmp_path, run):
    gains = run.gains["eagl"]
    wide = gains.model_copy(update={"histograms": {"blocks.2.conv1": tuple(range(1024))}})
    subject = plan_subject(bitplan.select(run.graph, wide, run.costs, budget="80%"), run.graph, wide, (run.costs,), "x")
    counts, bits = contents(subject, {})["histograms"]["layers"]["blocks.2.conv1"]["4"]
    assert len(counts) == 256
    assert sum(counts) == sum(range(1024))
    assert 9 < bits < 10  # of all 1,024 codes


def test_a_folder_that_cannot_be_shown_says_why(tmp_path, run):
    with pytest.raises(FileError, match="not the folder of a run"):
        report(tmp_path, tmp_path / "page.html")
    save(study_of(), tmp_path / "study.json")
    with pytest.raises(FileError, match=r"no graph yet.*bitplan sweep"):
        report(tmp_path, tmp_path / "page.html")
    write_run(tmp_path, study_of(), run.graph, {}, run.costs)
    with pytest.raises(FileError, match="no gains of any method yet"):
        report(tmp_path, tmp_path / "page.html")
    with pytest.raises(InputError, match="cannot be met"):
        report(run, tmp_path / "page.html", budget="20%")
    with pytest.raises(InputError, match="another kind"):
        report(run, tmp_path / "page.html", budget="3bpw")
