"""Racing plans: of what cheap methods select, the plan that trains best, for a part of what ALPS takes."""

import numpy as np
import pytest
import torch
from toys import RECIPE, Stripes, quantized

import bitplan
from bitplan.core.errors import Diverged, InputError, Unfinished, WriteError
from bitplan.core.jobs import Outcome
from bitplan.core.precision import parse_choices
from bitplan.gains.base import Context, LayerGains, make_constraint
from bitplan.gains.baselines import Uniform
from bitplan.gains.drift import Compare, Drift
from bitplan.gains.eagl import Eagl
from bitplan.gains.finetuning import Tuner
from bitplan.gains.fisher import Fisher
from bitplan.gains.lowering import layers_of, rows_by_layer
from bitplan.plugins.methods.plan_racing import PlanRacing

TASK = Stripes(samples=256)
SHORT = RECIPE.model_copy(update={"steps": 4})
CHOICES = "w2a2,w3a3,w4a4"
LARGE = RECIPE.model_copy(update={"batch_size": 256})
BUDGET = "80%"
PLANS = "drift,eagl,uniform,fisher"


@pytest.fixture(scope="module")
def start():
    torch.set_num_threads(1)
    return quantized(Stripes())


def raced(start, seed=0, store=None, budget=BUDGET, task=TASK, recipe=SHORT, plans=PLANS, **options):
    context = Context(task=task, seed=seed, store=store, recipe=recipe)
    return bitplan.estimate(
        "plan_racing", *start, choices=CHOICES, context=context, budget=budget, plans=plans, **{"spend": 2, **options}
    )


def picks_of(graph, gains):
    plan = bitplan.select(graph, gains, bitplan.price("bmac", graph, CHOICES), budget=BUDGET)
    return tuple(parse_choices(CHOICES).index(plan.precisions[group.name]) for group in graph.selectable)


def selected(start, name):
    context = Context(task=TASK, recipe=SHORT)
    return picks_of(start[1], bitplan.estimate(name, *start, choices=CHOICES, context=context))


class Pretended:
    """Instead of trainings: a loss for each plan in each round, and a list of what was asked for."""

    def __init__(self, graph, aim, losses):
        self.losses = {str(layers_of(graph, aim.lowered_groups(picks))): row for picks, row in losses.items()}
        self.rounds = []

    def run(self, jobs):
        self.rounds.append(jobs)
        means = [self.losses[str(job.layers)][len(self.rounds) - 1] for job in jobs]
        return [Outcome(numbers={"mean_loss": (mean,), "steps": (1,), "samples": (16,)}) for mean in means]


def four_plans(graph, monkeypatch):
    """The aim, and methods whose plans are given."""
    aim = make_constraint(graph, parse_choices(CHOICES), BUDGET)
    within = [picks for picks in np.ndindex(*(len(aim.choices),) * len(aim.groups)) if aim.fits(picks)]
    plans = [picks for picks in within if aim.raised(picks, range(len(picks))) == picks][:4]
    assert len(plans) == 4
    for method, picks in zip((Drift, Eagl, Uniform, Fisher), plans, strict=True):
        found = LayerGains(rows_by_layer(graph, aim.rows(picks)))
        monkeypatch.setattr(method, "layer_gains", lambda *_, found=found: found)
    return aim, *plans


def test_the_plan_that_trains_best_over_all_rounds_is_taken(start, monkeypatch):
    aim, first, second, third, fourth = four_plans(start[1], monkeypatch)
    losses = {first: (3.0,), second: (1.0, 2.5), third: (2.0, 1.0), fourth: (4.0,)}
    pretended = Pretended(start[1], aim, losses)
    monkeypatch.setattr(Tuner, "run", lambda tuner, jobs: pretended.run(jobs))
    gains = raced(start, spend=0.5)
    assert [len(jobs) for jobs in pretended.rounds] == [4, 2]
    assert picks_of(start[1], gains) == third, "second was ahead by 1 for so many steps, then behind by 1.5 for more"
    assert "takes the plan of uniform, of 4 plans, for 80% alone" in gains.notes[-1]
    assert gains.counts["plans"] == 4
    short, long = (jobs[0].recipe.steps for jobs in pretended.rounds)
    assert long == pytest.approx(2 * short, abs=1), "rounds are given the same, and half as many share it"
    assert {job.seed for jobs in pretended.rounds for job in jobs} == {0, 1}, "other batches in each round"


def test_of_equals_the_method_named_first_is_taken_and_one_round_is_enough_for_two(start, monkeypatch):
    aim, first, second, *_ = four_plans(start[1], monkeypatch)
    pretended = Pretended(start[1], aim, {first: (1.0, 1.0), second: (1.0, 1.0)})
    monkeypatch.setattr(Tuner, "run", lambda tuner, jobs: pretended.run(jobs))
    assert picks_of(start[1], raced(start, plans="eagl,drift")) == second
    assert [len(jobs) for jobs in pretended.rounds] == [2]
    assert picks_of(start[1], raced(start, plans=("drift", "eagl"))) == first


def test_plans_that_are_the_same_are_not_trained(start):
    gains = raced(start, plans="uniform,uniform")
    assert picks_of(start[1], gains) == selected(start, "uniform")
    assert (gains.counts["plans"], gains.counts["trainings"]) == (1, 0)
    assert "takes the plan of uniform and uniform, of 1 plans" in gains.notes[-1]


def test_it_spends_most_of_what_it_may_and_no_more(start):
    gains = raced(start, spend=1.5)
    assert make_constraint(start[1], parse_choices(CHOICES), BUDGET).fits(picks_of(start[1], gains))
    groups = len(start[1].selectable)
    allowed = 1.5 * 3 * 256 * groups * 2
    assert 0.4 * allowed < gains.spend.passes <= allowed
    assert gains.spend.labels
    assert gains.spend.trainings == gains.counts["trainings"]
    less = raced(start, spend=0.75)
    assert less.spend.passes <= allowed / 2


def test_it_repeats_goes_on_from_its_store_and_depends_on_the_seed(start, tmp_path):
    whole = raced(start)
    assert raced(start, store=tmp_path).id == whole.id
    kept = sorted(tmp_path.glob("*.json"))
    for path in kept[::2]:
        path.unlink()
    again = raced(start, store=tmp_path)
    assert (again.id, again.spend) == (whole.id, whole.spend)
    assert sorted(tmp_path.glob("*.json")) == kept
    raced(start, seed=1, store=tmp_path)
    assert len(sorted(tmp_path.glob("*.json"))) >= 2 * len(kept) - 2, "other samples and other batches"


def test_a_method_that_cannot_be_run_is_left_out_and_named(start, monkeypatch):
    def refuse(*_):
        raise InputError("task stripes has no logits")

    monkeypatch.setattr(Drift, "layer_gains", refuse)
    gains = raced(start, plans="drift,eagl,uniform")
    assert gains.notes[0] == "gains: plan_racing goes on without drift (task stripes has no logits)"
    with pytest.raises(InputError, match=r"there is no plan to race: drift \(task stripes"):
        raced(start, plans="drift")


@pytest.mark.parametrize(("plans", "spend"), [(PLANS, 2), ("eagl,uniform", 0.5), (PLANS, 0.4), ("eagl", 0.5)])
def test_what_it_expects_is_the_most_that_it_trains(start, plans, spend):
    model, graph = start
    aim = make_constraint(graph, parse_choices(CHOICES), BUDGET)
    context = Context(task=TASK, recipe=SHORT, aim=aim)
    told = PlanRacing(spend=spend, plans=plans).trainings(model, graph, aim.choices, context).estimate_time()
    found = raced(start, plans=plans, spend=spend)
    assert found.counts["samples"] <= told.samples
    assert 3 * told.samples <= spend * 3 * 256 * len(aim.groups) * 2


def test_a_fault_of_today_ends_it_and_leaves_no_method_out(start, monkeypatch, tmp_path):
    for error in (WriteError("cannot write x.json: No space left on device"), Diverged("the loss is nan")):

        def fail(*_, error=error):
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(Drift, "layer_gains", fail)
            with pytest.raises(type(error)):
                raced(start, plans="drift,eagl,uniform")
    monkeypatch.setattr(Compare, "__call__", lambda *_: 1 / 0)
    with pytest.raises(Unfinished, match="drift failed with"):
        raced(start, plans="drift,eagl,uniform", store=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": None}, "plan_racing chooses within a budget"),
        ({"spend": 0}, "a share of what ALPS takes"),
        ({"rounds": 0}, "at least one round"),
        ({"lr_factor": 0}, "lr_factor must be above 0"),
        ({"plans": ""}, "name the methods"),
        ({"plans": "first_to_last"}, "first_to_last is not defined by exact selection"),
        ({"plans": "alps,uniform"}, "alps trains, which would leave nothing for the race"),
        ({"plans": "nothing"}, "nothing"),
        ({"spend": 0.01}, "lets methods look at 1 samples"),
        ({"recipe": None}, "--recipe"),
        (
            {"spend": 0.1, "plans": "uniform,eagl", "recipe": LARGE},
            "spend=0.1 of what ALPS takes is too little to train 2 plans for a step of 256 samples",
        ),
    ],
)
def test_what_cannot_work_is_one_line(start, options, message):
    with pytest.raises((InputError, KeyError), match=message):
        raced(start, **{"spend": 0.5, **options})
