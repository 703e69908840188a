"""Drift: how far answers move, without labels, beside the same computed by hand."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from toys import Stripes, quantized

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.precision import Precision
from bitplan.gains.base import Context
from bitplan.gains.drift import Compare, Drift, use_batch_statistics_
from bitplan.gains.jobs import lowered_jobs

TASK = Stripes(samples=256)


@pytest.fixture(scope="module")
def start():
    torch.set_num_threads(1)
    return quantized(Stripes())


def drift(start, choices="w2a2,w4a4", seed=0, task=TASK, **options):
    return bitplan.estimate("drift", *start, choices=choices, context=Context(task=task, seed=seed), **options)


@torch.no_grad()
def by_hand(model, graph, lowered, temperature):
    """T²·KL from the answers of the network as it is, over the whole training split in one batch."""
    plan = bitplan.Plan.uniform(graph, "w4a4")
    changed = plan.precisions | {name: bitplan.Precision.parse(bits) for name, bits in lowered.items()}
    ((images, *_),) = TASK.batches("train", 256)
    answers = []
    for one in (plan, plan.model_copy(update={"precisions": changed})):
        network = bitplan.quantize(model, one).eval()
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.train()
        answers.append(torch.softmax(network(images) / temperature, dim=1).double())
    p, q = answers
    return temperature**2 * float((p * (p / q).log()).sum(dim=1).mean())


def test_it_is_how_far_the_answers_move(start):
    model, graph = start
    gains = drift(start, "w2a2,w3a3,w4a4", samples=256, batch_size=256, temperature=2.0)
    for group in graph.selectable:
        low, middle = (
            by_hand(model, graph, dict.fromkeys([layer.name for layer in group.layers], bits), 2.0)
            for bits in ("w2a2", "w3a3")
        )
        assert gains.rows[group.name] == pytest.approx((0, low - middle, low), rel=1e-3, abs=1e-6)
    assert gains.counts == {"passes": 1 + 8, "samples": (1 + 8) * 256, "batches": 1}


def test_no_label_and_no_loss_is_looked_at(start):
    class Unlabelled(Stripes):
        def loss(self, outputs, batch):
            raise AssertionError("looked at a label")

        batch_score = loss

    assert drift(start, task=Unlabelled(samples=256)).rows == drift(start).rows


def test_it_needs_fewer_samples_than_the_loss_for_the_same_errors(start):
    """In standard errors per gain, both on the same samples."""

    def noise(method):
        gains = bitplan.estimate(method, *start, context=Context(task=TASK), samples=256, batch_size=16)
        return np.median([gains.errors[name][1] / abs(row[1]) for name, row in gains.rows.items()])

    assert noise("drift") < noise("drop")


def test_it_repeats_and_leaves_the_model_alone(start):
    model, _ = start
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert drift(start, seed=3).id == drift(start, seed=3).id != drift(start, seed=4).id
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_is_done_is_not_done_again(start, tmp_path):
    context = Context(task=TASK, store=tmp_path)
    first = bitplan.estimate("drift", *start, context=context)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    assert len(kept) == len(first.rows)
    assert bitplan.estimate("drift", *start, context=context).id == first.id
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")} == kept


def test_only_batch_norm_takes_the_statistics_of_the_batch():
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Dropout(0.5)).train()
    assert [module.training for module in use_batch_statistics_(network, 8)] == [False, True, False]
    assert [module.training for module in use_batch_statistics_(network, 1)] == [False, False, False]


@pytest.mark.parametrize("options", [{"samples": 0}, {"batch_size": 0}, {"temperature": 0.0}])
def test_bad_options_are_one_line(options):
    with pytest.raises(InputError) as caught:
        Drift(**options)
    assert "\n" not in str(caught.value)


def test_a_task_without_answers_is_one_line(start):
    class Mute:
        name = "mute"

        def size(self, split):
            return 8

    with pytest.raises(InputError, match="task mute has no batches"):
        drift(start, task=Mute())
    with pytest.raises(InputError, match="give a task"):
        drift(start, task=None)


def test_what_was_kept_goes_with_the_work_that_kept_it(start):
    """Without waiting for Python's garbage collector, which does not know how large recordings are."""
    model, graph = start
    work, lowered = Compare(model, TASK), {graph.selectable[0].name: Precision.parse("w2a2")}
    options = {"temperature": 4.0}
    (job,) = lowered_jobs("drift", model, graph, Context(task=TASK), [lowered], 8, 4, options=options)
    gc.disable()
    try:
        work(job)
        kept = weakref.ref(work.rerun(job))
        assert kept() is not None
        del work
        assert kept() is None
    finally:
        gc.enable()
