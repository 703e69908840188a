"""Choosing with samples held out: what methods train on and measure on do not meet, and nobody sees the test split."""

import pickle
from dataclasses import dataclass, replace

import pytest
import torch
from toys import Stripes, quantized

import bitplan
from bitplan.core.errors import RecordError
from bitplan.core.registry import CHOOSERS, RELAXATIONS
from bitplan.core.studies import Choosing
from bitplan.core.trials import Recipe
from bitplan.gains.base import Context, is_bound
from bitplan.gains.finetuning import held_out_measures
from bitplan.tasks.base import ChoosingTask, choosing_task, measuring_split, samples_per_epoch
from bitplan.tasks.images import held_out

SHORT = Recipe(steps=2, batch_size=16, lr=0.01)
CHOICES = bitplan.core.precision.parse_choices("w2a2,w4a4")
SHARE = 0.25
SEEN = {"trained": set(), "measured": set()}


@dataclass(frozen=True)
class Marked(Stripes):
    """Every image tells which sample of which split it is; who runs it, with or without gradients, is written down."""

    rows: tuple[int, ...] | None = None
    tested: tuple[int, ...] | None = None
    name = "marked"

    def data(self, split):
        images, labels = super().data(split)
        images[:, 0, 5, 5] = torch.arange(len(images)) + (1000 if split == "test" else 0)
        if split == "test" and self.tested is not None:
            images, labels = self.part("train", self.tested)
        elif split == "train" and self.rows is not None:
            images, labels = images[list(self.rows)], labels[list(self.rows)]
        return images, labels

    def part(self, split, rows):
        images, labels = replace(self, rows=None, tested=None).data(split)
        return images[list(rows)], labels[list(rows)]

    def size(self, split):
        return len(self.data(split)[1])

    def hold_out(self, share):
        own = self.rows or range(self.size("train"))
        stay, held = held_out(len(own), share)
        stay, held = (tuple(own[row] for row in rows) for rows in (stay, held))
        return replace(self, rows=stay), replace(self, tested=held)

    def forward(self, model, batch):
        kind = "trained" if model.training and torch.is_grad_enabled() else "measured"
        SEEN[kind] |= {int(mark) for mark in batch[0][:, 0, 5, 5]}
        return super().forward(model, batch)


HELD = set(held_out(128, SHARE)[1])
OPTIONS = {  # six steps of 16 see all that is trained on, at some of which training itself takes a look
    "alps_racing": {"budgets": "80%", "steps": 6, "rounds": 1, "samples": 32},
    "alps": {"steps": 6}, "regression": {"steps": 6, "networks": 3, "per_level": 1, "held_out": 0.0},
    "hawq": {"probes": 2, "min_probes": 2}, "hawq_v2": {"probes": 2, "min_probes": 2}, "hawq_v1": {"iterations": 1},
    "adaptive": {"levels": 2},
}  # fmt: skip
WITH_DATA = [name for name in CHOOSERS if name != "table" and CHOOSERS.get(name).about.data]


@pytest.fixture(scope="module")
def start():
    torch.set_num_threads(1)
    return quantized(Stripes(), train=False)


@pytest.mark.parametrize("name", WITH_DATA)
def test_every_method_measures_on_what_it_does_not_train_on(start, name):
    SEEN.update(trained=set(), measured=set())
    context = Context(task=choosing_task(Marked(), SHARE), recipe=SHORT)
    bound = {"budget": "80%"} if is_bound(CHOOSERS.get(name)) else {}
    bound |= {"spend": 300} if hasattr(CHOOSERS.get(name), "spend") else {}
    gains = bitplan.estimate(name, *start, choices=CHOICES, context=context, **OPTIONS.get(name, {}), **bound)
    looks = SEEN["measured"] - SEEN["trained"]
    assert looks <= HELD, "no sample of the test split, whose marks are above 1000"
    assert looks or name in RELAXATIONS, "something was measured, but by those that only train"
    assert not SEEN["trained"] & HELD
    assert bool(SEEN["trained"]) == bool(gains.spend.trainings)
    assert not gains.spend.tested
    assert gains.samples_per_epoch == 128


def test_without_a_split_the_oracle_sees_test_scores(start):
    SEEN.update(trained=set(), measured=set())
    gains = bitplan.estimate("regression", *start, choices=CHOICES, context=Context(task=Marked(), recipe=SHORT),
                             **OPTIONS["regression"])  # fmt: skip
    assert gains.spend.tested
    assert {mark for mark in SEEN["measured"] if mark >= 1000} == set(range(1000, 1128))


def test_the_parts_are_the_training_split_and_travel():
    task = choosing_task(Marked(), SHARE)
    assert (task.size("train"), task.size("test"), samples_per_epoch(task)) == (96, 32, 128)
    assert (measuring_split(task), measuring_split(Marked())) == ("test", "train")
    sent = pickle.loads(pickle.dumps(task))
    assert sent == task
    for split in ("train", "test"):
        ours, theirs = (torch.cat([batch[0] for batch in one.batches(split, 16)]) for one in (task, sent))
        assert torch.equal(ours, theirs)
    assert choosing_task(Marked(), 0.0) == Marked()
    assert isinstance(task, ChoosingTask)
    inner, judging = task.hold_out(0.5)
    assert (inner.size("train"), judging.size("test")) == (48, 48)


def test_fine_tuned_networks_are_judged_by_all_that_is_held_out(start):
    model, _ = start
    task = choosing_task(Marked(), SHARE)
    loss, score = held_out_measures(model, task, batch_size=20)  # 20 and 12
    whole = next(iter(task.batches("test", 32)))
    with torch.no_grad():
        outputs = task.forward(model.eval(), whole)
    assert loss == pytest.approx(float(task.loss(outputs, whole)), abs=1e-6)
    assert score == pytest.approx(task.batch_score(outputs, whole))
    assert task.score(model) == pytest.approx(score)


def test_jobs_with_and_without_the_split_are_others(start, tmp_path):
    found = {}
    for share in (0.0, SHARE, 0.5):
        context = Context(task=choosing_task(Marked(), share), recipe=SHORT, store=tmp_path)
        found[share] = bitplan.estimate("alps", *start, choices=CHOICES, context=context, steps=2).rows
    assert len(list(tmp_path.rglob("*.json"))) == 3 * 4
    assert found[0.0] != found[SHARE] != found[0.5]


@pytest.mark.parametrize("share", [1.0, -0.1])
def test_a_share_is_below_one(share):
    with pytest.raises(RecordError, match="hold_out"):
        Choosing(hold_out=share)
