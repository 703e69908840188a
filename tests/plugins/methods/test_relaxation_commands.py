"""Relaxations from the command line."""

import json

from typer.testing import CliRunner

import bitplan
from bitplan.cli.app import app
from bitplan.core.records import Plan
from bitplan.core.registry import RELAXATIONS
from bitplan.models.zoo import load_model
from bitplan.store.files import load


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_list_says_what_they_need():
    told = json.loads(run("list", "relaxations", "--json").output)
    assert set(told) == set(RELAXATIONS)
    assert told["fracbits"] == {"data": True, "labels": True, "trains": True, "passes": "3·T·epochs, per budget",
                                "source": "Yang and Jin 2020"}  # fmt: skip


def test_plan_trains_within_its_budget(tmp_path):
    model, example = load_model("digits_resnet")
    graph = bitplan.trace(model, example, rules=bitplan.Rules(narrow=0), name="digits_resnet")
    quantized = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(quantized, [batch[0] for batch in bitplan.load_task("digits").batches("test", 64)][:1])
    bitplan.save_checkpoint(quantized, tmp_path / "w4a4", spec="digits_resnet")
    words = ("--gain", "fracbits:spend=400", "--budget", "70%", "--rules", "narrow=0", "--task", "digits")
    done = run("plan", tmp_path / "w4a4", *words, "-o", tmp_path / "plan.json")
    assert done.exit_code == 0, done.output
    plan = load(tmp_path / "plan.json", Plan)
    assert (plan.method, plan.limits[0].budget) == ("fracbits", "70%")
    assert plan.limits[0].cost <= plan.limits[0].capacity
    assert "fracbits trained for 2 steps, 384 passes, for 70% alone" in done.output
