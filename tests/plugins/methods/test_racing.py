"""ALPS for less: the same selections as with all groups fine-tuned, at the budgets asked for, for fewer steps."""

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from toys import CHOICES, RECIPE, Stripes, quantized

import bitplan
from bitplan.core.errors import BudgetError, InputError
from bitplan.core.jobs import Outcome
from bitplan.core.precision import parse_choices
from bitplan.core.records import Graph, Layer
from bitplan.gains.base import Context
from bitplan.gains.drift import Drift
from bitplan.gains.drop import MeasuredBatches
from bitplan.plugins.methods.racing import AlpsRacing, LossTable, Scales

NARROW = (1, 12, 4, 12, 12, 2, 12, 12, 3, 12)  # channels of a network: where there are few, two bits hurt


def chosen(graph, gains, budget):
    plan = bitplan.select(graph, gains, bitplan.price("bmac", graph), budget=budget)
    return {group.name for group in graph.selectable if plan.precisions[group.name].weight_bits == 4}


def test_it_chooses_as_well_as_full_alps_on_digits(tmp_path):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task, layers = bitplan.load_task("digits"), []
    for number, (before, after) in enumerate(pairwise(NARROW)):
        stride = 2 if number == 0 else 1
        layers += [nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 10))
    bitplan.finetune_(model, task, bitplan.Recipe(epochs=4, batch_size=32, lr=0.1))
    graph = bitplan.trace(model, task.example(), rules=bitplan.Rules(narrow=0))
    start = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(start, [next(iter(task.batches("train", 64)))[0]])
    recipe = bitplan.Recipe(epochs=2, batch_size=16, lr=0.01)
    bitplan.finetune_(start, task, recipe)

    context = Context(task=task, recipe=recipe, store=tmp_path)
    full = bitplan.estimate("alps", start, graph, context=context, steps=88, lr_factor=0.25)
    raced = bitplan.estimate("alps_racing", start, graph, context=context, budgets="65%,80%", steps=88)
    for budget in ("65%", "80%"):
        mine, alps = chosen(graph, raced, budget), chosen(graph, full, budget)
        assert len(mine - alps) <= 1, "which of two that are nearly equal is a matter of the processor's last bits"
        worth = {group: row[-1] for group, row in full.rows.items()}
        assert sum(worth[group] for group in mine) >= 0.95 * sum(worth[group] for group in alps)
    assert full.counts["steps"] == 8 * 88
    assert raced.counts["steps"] < full.counts["steps"] * 3 / 4
    assert raced.counts["steps_of_alps"] == 8 * 89, "with one epoch per group"


def layer(name, macs=100):
    return Layer(name=name, kind="conv2d", macs=macs, weights=10, in_features=256)


def wide(groups, seed):
    """A graph of so many groups of very different cost, and how much each really hurts."""
    chance = np.random.default_rng(seed)
    layers = [layer(f"g{number:02}", int(macs)) for number, macs in enumerate(chance.integers(100, 1000, groups))]
    return Graph(model="wide", layers=tuple(layers)), np.exp(chance.normal(-3, 1.2, groups))


class Simulated:
    """Instead of a network: losses that recover with steps, and a screen that follows them by and large."""

    def __init__(self, monkeypatch, graph, hurt, *, noise, screen, seed):
        self.chance, self.hurt = np.random.default_rng(seed), hurt
        self.names = [group.name for group in graph.selectable]
        rough = 4 * hurt * np.exp(self.chance.normal(0, screen, len(hurt)))
        batches = np.stack([rough, np.zeros_like(rough)], axis=1)[:, :, None] + np.zeros(8)
        batches = batches + self.chance.normal(0, 1e-3, batches.shape)
        tuner = SimpleNamespace(graph=graph, run=self.run, job=self.job, work=SimpleNamespace(task=Stripes(39_000)))
        tuner.recipe = RECIPE.model_copy(update={"batch_size": 100})
        monkeypatch.setattr(AlpsRacing, "_tuner", lambda *_: tuner)
        monkeypatch.setattr(Drift, "measure", lambda *_: MeasuredBatches(-1 - batches, 1, 1, 0.0))
        self.noise = noise

    def job(self, lowered, *, seed, steps):
        (name,) = lowered
        return SimpleNamespace(id=f"{name} {steps} {seed}", groups=(name,), steps=steps)

    def run(self, jobs):
        return [self.tuned(job) for job in jobs]

    def tuned(self, job):
        left = 0.5 + 0.5 * math.exp(-job.steps / 100)
        loss = 1 + left * self.hurt[self.names.index(job.groups[0])] + self.chance.normal(0, self.noise)
        return Outcome(numbers={"mean_loss": (loss,), "steps": (job.steps,), "samples": (100 * job.steps,)})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budgets", [("70%",), ("60%", "80%")])
def test_it_is_right_at_the_budgets_and_cheap_where_the_screen_is_good(monkeypatch, seed, budgets):
    graph, hurt = wide(36, seed)
    Simulated(monkeypatch, graph, hurt, noise=1e-4, screen=0.1, seed=seed)
    raced = bitplan.estimate("alps_racing", None, graph, context=Context(), budgets=budgets)
    rows = {group.name: (0.0, value - hurt.min()) for group, value in zip(graph.selectable, hurt, strict=True)}
    true = raced.model_copy(update={"rows": rows})
    for budget in budgets:
        differing = chosen(graph, raced, budget) ^ chosen(graph, true, budget)
        best, found = (sum(rows[name][1] for name in chosen(graph, gains, budget)) for gains in (true, raced))
        assert len(differing) <= 2
        assert found >= 0.99 * best
    assert raced.counts["steps"] < raced.counts["steps_of_alps"] / (15 if len(budgets) == 1 else 8)


def test_made_by_hand_it_records_the_name_it_is_registered_under(monkeypatch):
    graph, hurt = wide(6, seed=0)
    Simulated(monkeypatch, graph, hurt, noise=1e-4, screen=0.1, seed=0)
    gains = bitplan.estimate(AlpsRacing(budgets="70%"), None, graph, context=Context())
    assert gains.method == "alps_racing"
    assert gains.options["budgets"] == "70%"


def test_a_poor_screen_costs_more_and_misleads_no_one(monkeypatch):
    graph, hurt = wide(30, seed=1)
    counts = []
    for screen in (0.05, 1.5):
        Simulated(monkeypatch, graph, hurt, noise=1e-4, screen=screen, seed=1)
        raced = bitplan.estimate("alps_racing", None, graph, context=Context(), budgets="70%", keep=1.0)
        rows = {group.name: (0.0, value - hurt.min()) for group, value in zip(graph.selectable, hurt, strict=True)}
        true = raced.model_copy(update={"rows": rows})
        best, found = (sum(rows[name][1] for name in chosen(graph, gains, "70%")) for gains in (true, raced))
        assert found >= 0.97 * best
        counts.append(raced.counts["raced_groups"])
    assert counts[0] < 15 < counts[1]


@pytest.mark.parametrize("spend", [0.015, 0.02, 0.05])
def test_it_spends_no_more_than_it_may(monkeypatch, spend):
    """And what it may spend goes where it matters: more finds no less."""
    graph, hurt = wide(36, seed=5)
    Simulated(monkeypatch, graph, hurt, noise=1e-4, screen=0.3, seed=5)
    raced = bitplan.estimate("alps_racing", None, graph, context=Context(), budgets="70%", spend=spend)
    assert raced.counts["steps"] <= spend * raced.counts["steps_of_alps"]
    rows = {group.name: (0.0, value) for group, value in zip(graph.selectable, hurt, strict=True)}
    true = raced.model_copy(update={"rows": rows})
    best, found = (sum(rows[name][1] for name in chosen(graph, gains, "70%")) for gains in (true, raced))
    assert found >= 0.95 * best


def test_a_race_too_short_to_tell_anything_is_refused(monkeypatch):
    graph, hurt = wide(6, seed=0)
    Simulated(monkeypatch, graph, hurt, noise=1e-4, screen=0.3, seed=0)
    with pytest.raises(InputError, match="too little to race 3 groups for 20 steps"):
        bitplan.estimate("alps_racing", None, graph, context=Context(), budgets="70%", spend=0.01)


def test_losses_are_carried_by_a_line():
    before = LossTable(np.array([[1.0], [2.0], [3.0], [5.0]]), np.full((4, 1), 0.1))
    raced = np.array([True, True, True, False])
    measured = LossTable(np.array([[11.0], [12.0], [13.0], [np.nan]]), np.full((4, 1), np.nan))
    after = before.carried(measured, raced, alike=False)
    assert after.losses.ravel().tolist() == pytest.approx([11, 12, 13, 15])
    assert after.errors.ravel().tolist() == pytest.approx([0, 0, 0, 0.1], abs=1e-9)
    falling = LossTable(measured.losses[[2, 1, 0, 3]], measured.errors)
    assert before.carried(falling, raced, alike=False).losses[3, 0] == pytest.approx(12), "never falling"
    equal = LossTable(np.array([[1.0], [1.001], [1.0], [5.0]]), np.full((4, 1), 0.1))
    noisy = LossTable(np.array([[1.0], [1.3], [1.0], [np.nan]]), np.full((4, 1), np.nan))
    assert equal.carried(noisy, raced, alike=True).losses[3, 0] == pytest.approx(5.1, abs=0.3), "noise draws no line"


def test_margins_are_distances_to_the_next_best_selection():
    """Three equal costs, room for two of three at the top: c stays out by what a or b would have to lose."""
    graph = Graph(model="three", layers=tuple(layer(name) for name in "abc"))
    choices = parse_choices(CHOICES)
    scales = Scales.of(graph, choices, [bitplan.Budget.parse("84%")], "bmac")
    values = np.array([[0, 5.0], [0, 3.0], [0, 2.0]])
    weighed = scales.weigh(values, np.array([[0, 0.5]] * 3))
    assert weighed.picks.tolist() == [[1, 1, 0]]
    assert weighed.margins == pytest.approx(
        [3 / math.hypot(0.5, 0.5), 1 / math.hypot(0.5, 0.5), 1 / math.hypot(0.5, 0.5)]
    )
    assert not weighed.moving.any()
    both = Scales.of(graph, choices, [bitplan.Budget.parse(one) for one in ("84%", "100%")], "bmac")
    assert both.weigh(values, np.array([[0, 0.5]] * 3)).moving.tolist() == [False, False, True]
    (bits,) = Scales.of(graph, choices, [bitplan.Budget.parse("3bpw")], "bmac").aims
    assert bits.capacities.tolist() == [3 * sum(layer.weights for layer in graph.layers)]


def test_budgets_may_be_times_of_a_measured_table(monkeypatch, tmp_path):
    graph, hurt = wide(12, seed=2)
    rows = [f"{group.name},{group.layers[0].macs * 2},{group.layers[0].macs * 4}" for group in graph.selectable]
    table = tmp_path / "latency.csv"
    table.write_text("\n".join(["# unit: us", "layer,w2a2,w4a4", *rows]))
    whole = sum(4 * layer.macs for layer in graph.layers)
    raced = []
    for options in ({"budgets": "70%"}, {"budgets": f"{0.0007 * whole:.4f}ms", "cost": str(table)},
                    {"budgets": [f"latency={0.7 * whole:.1f}us"], "cost": str(table)}):  # fmt: skip
        Simulated(monkeypatch, graph, hurt, noise=1e-4, screen=0.1, seed=2)
        raced.append(bitplan.estimate("alps_racing", None, graph, context=Context(), **options).rows)
    assert raced[0] == raced[1] == raced[2]
    with pytest.raises(BudgetError, match="12ms is an amount of time, and no cost counts that"):
        bitplan.estimate("alps_racing", None, graph, context=Context(), budgets="12ms")


def test_it_tells_the_most_that_it_will_take():
    task = Stripes()
    model, graph = quantized(task, train=False)
    context = Context(task=task, recipe=RECIPE)
    trainings = AlpsRacing(budgets="70%", steps=8).trainings(model, graph, parse_choices(CHOICES), context)
    expected = trainings.estimate_time()
    assert (expected.jobs, expected.steps) == (4 + 2 + 1, 4 * 2 + 2 * 4 + 8)
    assert expected.seconds > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budgets": "lots"}, "budget 'lots' cannot be read"),
        ({"budgets": "70%", "rounds": 0}, "at least one round"),
        ({"budgets": "70%", "rounds": 9}, "at least one step in the first"),
        ({"budgets": "70%", "seeds": 0}, "at least one seed"),
        ({"budgets": "70%", "keep": 0}, "share to keep"),
        ({"budgets": "70%", "samples": 0}, "at least one sample"),
        ({"budgets": "70%", "steps": 0}, "steps must be above 0"),
    ],
)
def test_bad_options_are_one_line(options, message):
    with pytest.raises(InputError, match=message) as caught:
        AlpsRacing(**options)
    assert "\n" not in str(caught.value)


def test_without_budgets_it_races_for_the_one_that_is_asked_for(monkeypatch):
    graph, hurt = wide(12, seed=0)
    found = []
    for asked in ({"budgets": "70%"}, {"budget": "70%"}):
        Simulated(monkeypatch, graph, hurt, noise=0.1, screen=0.1, seed=0)
        found.append(bitplan.estimate("alps_racing", None, graph, context=Context(), **asked))
    assert found[0].rows == found[1].rows
    assert [gains.notes for gains in found] == [(), ("gains: alps_racing raced for 70%",)]
    with pytest.raises(InputError, match="say which you will ask for, --budget 70%"):
        bitplan.estimate("alps_racing", None, graph, context=Context())


def test_a_budget_that_cannot_be_met_is_said_before_anything_is_trained(monkeypatch):
    graph, hurt = wide(5, seed=0)
    Simulated(monkeypatch, graph, hurt, noise=0, screen=0, seed=0)
    with pytest.raises(BudgetError, match="budget 40% cannot be met"):
        bitplan.estimate("alps_racing", None, graph, context=Context(), budgets="70%,40%")
