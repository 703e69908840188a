"""Drop: the loss after lowering, on batches that all groups share, with an error that means something."""

import statistics

import numpy as np
import pytest
import torch
from toys import Stripes, quantized

import bitplan
from bitplan.core.errors import InputError
from bitplan.gains.base import Context
from bitplan.gains.drop import Drop

TASK = Stripes(samples=256)


@pytest.fixture(scope="module")
def start():
    torch.set_num_threads(1)
    return quantized(Stripes())


def drop(start, choices="w2a2,w4a4", seed=0, task=TASK, **options):
    return bitplan.estimate("drop", *start, choices=choices, context=Context(task=task, seed=seed), **options)


@torch.no_grad()
def losses_by_hand(model, graph, lowered, batch_size=256):
    """Mean loss over the whole training split, in inference mode, with some layers lowered."""
    plan = bitplan.Plan.uniform(graph, "w4a4")
    changed = plan.precisions | {name: bitplan.Precision.parse(bits) for name, bits in lowered.items()}
    network = bitplan.quantize(model, plan.model_copy(update={"precisions": changed})).eval()
    return [TASK.loss(network(batch[0]), batch).item() for batch in TASK.batches("train", batch_size)]


def test_it_is_the_rise_of_the_loss_over_the_whole_split(start):
    model, graph = start
    gains = drop(start, "w2a2,w3a3,w4a4", samples=10**6)
    (base,) = losses_by_hand(model, graph, {})
    for group in graph.selectable:
        low, middle = (
            losses_by_hand(model, graph, dict.fromkeys([layer.name for layer in group.layers], bits))[0]
            for bits in ("w2a2", "w3a3")
        )
        assert gains.rows[group.name] == pytest.approx((0, low - middle, low - base), abs=1e-5)
    assert gains.counts == {"passes": 9, "samples": 9 * 256, "batches": 4}


def test_errors_are_those_of_differences_between_batches(start):
    seeds = [drop(start, seed=seed, samples=64, batch_size=8) for seed in range(30)]
    for name in seeds[0].rows:
        spread = statistics.stdev(gains.rows[name][1] for gains in seeds)
        told = np.sqrt(np.mean([gains.errors[name][1] ** 2 for gains in seeds]))
        assert spread == pytest.approx(told, rel=0.5), "64 of 256 samples: the error is what a new draw changes"
    assert drop(start, samples=64, batch_size=64).errors is None
    assert seeds[0].id == drop(start, samples=64, batch_size=8).id != seeds[1].id


def test_by_score_it_is_the_fall_of_the_score(start):
    gains = drop(start, by="score", samples=256)
    losses = drop(start, samples=256)
    assert gains.rows != losses.rows
    assert all(-100 <= row[1] <= 100 and row[0] == 0 for row in gains.rows.values())
    lower = Stripes(samples=256)
    object.__setattr__(lower, "higher_is_better", False)
    assert drop(start, by="score", samples=256, task=lower).rows == {
        name: (0.0, -row[1]) for name, row in gains.rows.items()
    }


def test_a_small_split_is_enough(start):
    gains = drop(start, task=Stripes(samples=20))
    assert gains.counts == {"passes": 5, "samples": 100, "batches": 1}


@pytest.mark.parametrize("options", [{"samples": 0}, {"batch_size": 0}, {"by": "luck"}])
def test_bad_options_are_one_line(options):
    with pytest.raises(InputError) as caught:
        Drop(**options)
    assert "\n" not in str(caught.value)
