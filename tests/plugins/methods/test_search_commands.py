"""Searches from the command line: plan, estimate, and what cannot be asked of them."""

import json

import pytest
from typer.testing import CliRunner

import bitplan
from bitplan.cli.app import app
from bitplan.core.records import Gains, Graph, Plan
from bitplan.models.zoo import load_model
from bitplan.store.files import load


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The digits network at w4a4, calibrated, as a checkpoint; and the file of its graph."""
    home = tmp_path_factory.mktemp("start")
    model, example = load_model("digits_resnet")
    graph = bitplan.trace(model, example, rules=bitplan.Rules(narrow=0), name="digits_resnet")
    quantized = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(quantized, [batch[0] for batch in bitplan.load_task("digits").batches("test", 64)][:1])
    bitplan.save_checkpoint(quantized, home / "w4a4", spec="digits_resnet")
    bitplan.save(graph, home / "graph.json")
    return home


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


OPTIONS = "judge=drift:samples=32,spend=256"


def test_plan_searches_within_its_budget(start, tmp_path):
    words = ("--gain", f"evolution:{OPTIONS}", "--budget", "70%", "--rules", "narrow=0", "--task", "digits")
    done = run("plan", start / "w4a4", *words, "-o", tmp_path / "plan.json", "-o", tmp_path / "plan.html")
    assert done.exit_code == 0, done.output
    plan = load(tmp_path / "plan.json", Plan)
    assert (plan.method, plan.limits[0].budget) == ("evolution", "70%")
    assert "evolution gives the best of 7 plans, 256 passes, for 70% alone" in done.output
    assert "evolution" in (tmp_path / "plan.html").read_text()


def test_estimate_takes_a_budget(start, tmp_path):
    words = [
        "steps",
        "estimate",
        f"random_search:{OPTIONS}",
        start / "graph.json",
        "--model",
        start / "w4a4",
        "--task",
        "digits",
    ]
    done = run(*words, "--budget", "memory=75%", "--json")
    assert done.exit_code == 0, done.output
    gains = Gains.from_json(json.dumps(json.loads(done.stdout)))
    assert gains.budgets == ("memory=75%",)
    graph = load(start / "graph.json", Graph)
    plan = bitplan.select(graph, gains, bitplan.price("memory", graph), budget="memory=75%")
    assert plan.limits[0].cost <= plan.limits[0].capacity
    said = run(*words)
    assert "random_search chooses within a budget: say which, --budget 70%" in str(said.exception)


def test_a_frontier_is_refused(start):
    said = run("show", "frontier", start / "w4a4", "--gain", f"evolution:{OPTIONS}")
    assert "evolution chooses within one budget, and a frontier asks for many" in str(said.exception)
