"""The judge `shared`: one network for all plans, trained once, beside what each plan's own network says."""

from dataclasses import dataclass

import pytest
import torch
from killed_search import Held, quantized, searched

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.precision import parse_choices
from bitplan.gains.base import Context
from bitplan.gains.lowering import layers_of, lower
from bitplan.plugins.methods.searches.base import read_judge
from bitplan.tasks.base import draw, measure_
from bitplan.tune import resume

TASK = Held(samples=64)
CHOICES = parse_choices("w2a2,w3a3,w4a4")
JUDGE = "shared:steps=60,samples=16,batch_size=8,hold_out=0.25"
HARDLY = bitplan.Recipe(steps=1, batch_size=16, lr=1e-9)


@pytest.fixture(scope="module")
def start():
    torch.set_num_threads(1)
    return quantized(TASK, train=False)


def bench_of(start, recipe, judge=JUDGE, **more):
    return read_judge(judge).bench("judge", *start, CHOICES, Context(task=TASK, recipe=recipe, **more))


def some_plans(graph):
    groups = [group.name for group in graph.selectable]
    return [{}, dict.fromkeys(groups, CHOICES[0]), {groups[0]: CHOICES[1], groups[-1]: CHOICES[0]}]


def test_before_it_learns_a_plan_scores_what_its_own_network_does(start):
    """Hardly trained: what differs between plans is what their precisions make of it."""
    model, graph = start
    bench = bench_of(start, HARDLY, JUDGE.replace("steps=60", "steps=1"))
    batches = draw(model, TASK.hold_out(0.25)[1], 2, 8, 0, "test")
    own = [measure_(lower(model, layers_of(graph, plan)), TASK, batches)[0] for plan in some_plans(graph)]
    scores = [judged.score for judged in bench.judged(some_plans(graph))]
    assert scores == pytest.approx([-sum(losses) / 2 for losses in own], rel=0.02)
    assert len(set(scores)) == 3


def test_every_precision_of_every_layer_is_trained_and_what_it_learns_counts(start):
    recipe = bitplan.Recipe(steps=60, batch_size=16, lr=0.05)
    hardly, well = bench_of(start, HARDLY, JUDGE.replace("steps=60", "steps=1")), bench_of(start, recipe)
    before, after = ([one.score for one in bench.judged(some_plans(start[1]))] for bench in (hardly, well))
    assert all(later > earlier + 0.1 for earlier, later in zip(before, after, strict=True))
    grids = [blend.grids for blend in well.work.network.modules() if hasattr(blend, "grids")]
    begun = [blend.grids for blend in hardly.work.network.modules() if hasattr(blend, "grids")]
    pairs = [pair for one, other in zip(grids, begun, strict=True) for pair in zip(one, other, strict=True)]
    moved = [bool(mine.step != its.step) for mine, its in pairs]
    assert len(moved) == 3 * (5 + 4)  # weights of five layers, and what their four groups read
    assert all(moved)


def test_it_spends_a_training_once_and_a_look_for_each_plan():
    recipe_passes = 3 * 60 * 16
    told = {"judge": JUDGE, "task": TASK, "population": 2}
    gains = searched("evolution", **told, spend=recipe_passes + 5 * 16 + 3)
    assert gains.counts["evaluations"] == 5
    assert gains.counts["trainings"] == 1
    assert gains.counts["spend"] == recipe_passes + 5 * 16 == gains.spend.passes
    assert gains.spend.labels
    with pytest.raises(InputError, match=r"spend=2,880 is too little for one evaluation by shared.* takes 2,896"):
        searched("evolution", **told, spend=recipe_passes)


@dataclass(frozen=True)
class Dying(Held):
    """Its process dies after so many runs."""

    runs = iter(())

    def forward(self, model, batch):
        next(type(self).runs)
        return super().forward(model, batch)


@pytest.mark.parametrize("killed_after", [40, 65])
def test_killed_in_its_training_or_among_plans_it_goes_on(tmp_path, monkeypatch, killed_after):
    """A training of 60 steps, of which some are kept each second, then some plans."""
    monkeypatch.setattr(resume, "SAVE_SECONDS", 0.0)
    told = {"judge": JUDGE, "population": 2, "spend": 3 * 60 * 16 + 6 * 16}
    Dying.runs = iter(range(killed_after))
    with pytest.raises((RuntimeError, InputError, StopIteration)):
        searched("evolution", Dying(samples=64), tmp_path, **told)
    Dying.runs = iter(range(10_000))
    resumed = searched("evolution", Dying(samples=64), tmp_path, **told)
    used = next(Dying.runs)
    assert resumed.id == searched("evolution", Dying(samples=64), **told).id
    whole = next(Dying.runs) - used - 1
    assert used < whole  # what was kept is not run again
    assert len(list(tmp_path.glob("[!.]*.json"))) == 6 + 1


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        ("shared:hold_out=0", "hold_out is a share"),
        ("shared:steps=0", "shared: steps must be above 0"),
        ("shared:samples=0", "shared needs at least one sample"),
        ("shared:by=luck", "by loss or by score"),
    ],
)
def test_what_cannot_work_is_one_line(judge, said):
    with pytest.raises(InputError, match=said):
        read_judge(judge)
