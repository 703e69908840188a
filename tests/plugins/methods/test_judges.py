"""Searches on a network: what judges say beside the gains of the same name, kills, spends, and what is refused."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from killed_search import Held, Stripes, quantized, searched

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.precision import parse_choices
from bitplan.core.registry import SEARCHES
from bitplan.gains.base import Context
from bitplan.plugins.methods.searches.base import read_judge

TASK = Stripes(samples=64)
RECIPE = bitplan.Recipe(steps=4, batch_size=16, lr=0.01)
CHOICES = parse_choices("w2a2,w3a3,w4a4")
METHODS = list(SEARCHES)


@pytest.fixture(scope="module")
def start():
    torch.set_num_threads(1)
    return quantized(TASK, train=False)


def judged(start, judge, plans):
    bench = read_judge(judge).bench("judge", *start, CHOICES, Context(task=TASK, recipe=RECIPE))
    return [one.score for one in bench.judged(plans)], bench.price


@pytest.mark.parametrize(
    ("judge", "gain", "options", "passes"),
    [
        ("drift:samples=64,batch_size=32", "drift", {"samples": 64, "batch_size": 32}, 64),
        ("drop:samples=64,batch_size=64", "drop", {"samples": 64}, 64),
        ("drop:samples=64,by=score", "drop", {"samples": 64, "by": "score"}, 64),
        ("finetuned:steps=3", "alps", {"steps": 3}, 3 * 3 * 16),
    ],
)
def test_with_one_group_lowered_a_judge_says_what_the_gain_says(start, judge, gain, options, passes):
    model, graph = start
    groups = [group.name for group in graph.selectable]
    lowest, middle = ([{name: choice} for name in groups] for choice in CHOICES[:2])
    (low, price), (mid, _) = judged(start, judge, lowest), judged(start, judge, middle)
    context = Context(task=TASK, recipe=RECIPE)
    rows = bitplan.estimate(gain, model, graph, choices=CHOICES, context=context, **options).rows
    assert [b - a for a, b in zip(low, mid, strict=True)] == pytest.approx([rows[name][1] for name in groups], abs=1e-6)
    assert price.passes == passes


def test_a_judge_sees_whole_plans(start):
    """Lowering all is not lowering any one alone, and the network as it is does not drift at all."""
    groups = [group.name for group in start[1].selectable]
    plans = [{}, dict.fromkeys(groups, CHOICES[0]), *({name: CHOICES[0]} for name in groups)]
    (best, worst, *single), _ = judged(start, "drift:samples=64", plans)
    assert best == 0 > max(worst, *single)
    assert worst not in single


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("judge", ["drop:samples=64", "finetuned:steps=2"])
def test_every_search_takes_every_judge(method, judge):
    gains = searched(method, TASK, judge=judge, spend=3 * 64 if judge.startswith("drop") else 3 * 2 * 16 * 3)
    assert gains.counts["evaluations"] == 3
    assert gains.counts["trainings"] == (0 if judge.startswith("drop") else 3)
    assert gains.budgets == ("80%",)


def test_looks_at_what_a_recipe_holds_out_are_paid_for():
    """As much as is charged where samples are run, and not a pass above the limit."""
    recipe = bitplan.Recipe(steps=4, batch_size=16, lr=0.01, held_out=0.25)
    gains = searched("evolution", Held(samples=64), recipe=recipe, judge="finetuned:steps=2", spend=500, population=2)
    once = 2 * 16 * 3 + 3 * 16  # two steps, and looks at 16 samples before, between and after
    assert gains.counts["spend"] == gains.spend.passes == 500 // once * once


def test_what_it_trains_is_told_beforehand(start):
    method = SEARCHES.make("evolution", {"judge": "finetuned:steps=2", "spend": 5 * 2 * 16 * 3})
    told = method.trainings(*start, CHOICES, Context(task=TASK, recipe=RECIPE)).estimate_time()
    assert (told.jobs, told.steps, told.samples) == (5, 10, 160)
    assert told.seconds > 0
    assert SEARCHES.make("evolution", {}).trainings(*start, CHOICES, Context(task=TASK)) is None


def test_killed_in_the_middle_it_goes_on(tmp_path):
    script = str(Path(__file__).parent / "killed_search.py")
    with subprocess.Popen([sys.executable, script, str(tmp_path)], stdout=subprocess.PIPE) as process:
        for line in process.stdout:
            if int(line) >= 4:
                os.kill(process.pid, signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("[!.]*.json")}
    assert 4 <= len(before) <= 6
    task, options = Stripes(slow=0.05), {"population": 2}
    resumed = searched("evolution", task, tmp_path, **options)
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in before} == before
    assert resumed.id == searched("evolution", task, **options).id
    assert resumed.counts["evaluations"] == len(list(tmp_path.glob("[!.]*.json"))) > len(before)


def test_a_plan_is_what_was_found_and_says_so(start):
    model, _ = start
    plan = bitplan.choose(model, budget="80%", gain=SEARCHES.make("evolution", {"spend": 4 * 128}), batches=TASK,
                          example=TASK.example(), rules=bitplan.Rules(narrow=0), choices=CHOICES)  # fmt: skip
    assert plan.method == "evolution"
    assert "gives the best of" in plan.notes[-1]
    assert "for 80% alone" in plan.notes[-1]


def test_gains_for_one_budget_say_so_at_another(start):
    model, graph = start
    gains = bitplan.estimate("random_search", model, graph, choices=CHOICES, context=Context(task=TASK), budget="80%",
                             spend=300)  # fmt: skip
    cost = bitplan.price("bmac", graph, CHOICES)
    assert not [note for note in bitplan.select(graph, gains, cost, budget=0.8).notes if "leaves of" in note]
    note = bitplan.select(graph, gains, cost, budget="60%").notes[-1]
    assert note == "gains: random_search chose for 80%, and this plan is what 60% leaves of that: estimate again"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"budget": None}, r"evolution chooses within a budget: say which, --budget 70%"),
        ({"spend": 10}, r"spend=10 is too little for one evaluation by drift, which takes 128 passes: spend at least"),
        ({"spend": -1}, r"evolution: spend is a number of passes above 0, not -1"),
        ({"spend": "much"}, r"evolution: spend is 'much', and must be a number"),
        ({"judge": "drfit"}, r"unknown judge 'drfit'; did you mean drift\?"),
        ({"judge": "drift:sample=1"}, r"unknown option of drift 'sample'; did you mean samples\?"),
        ({"judge": "drift:samples"}, r"judge 'samples' is not KEY=VALUE"),
        ({"judge": "drift:samples=0"}, r"drift needs at least one sample"),
        ({"task": None}, r"evolution \(judge drift\) runs the network on data: give a task, --task"),
        ({"judge": "finetuned:steps=1"}, r"evolution \(judge finetuned:steps=1\) fine-tunes by the recipe that"),
        ({"population": 0}, r"evolution: population must be at least 1, not 0"),
        ({"budget": "10%"}, r"budget 10% cannot be met"),
    ],
)
def test_what_cannot_work_is_one_line(start, told, said):
    options = {"budget": "80%", "task": TASK} | told
    context = Context(task=options.pop("task"))
    with pytest.raises(InputError, match=said) as caught:
        bitplan.estimate("evolution", *start, choices=CHOICES, context=context, **options)
    assert "\n" not in str(caught.value)
