"""Defaults that do no harm: a short fine-tuning makes a trained network no worse, whatever the size of its weights."""

import copy
import itertools

import pytest
import torch
from torch import nn

import bitplan

DIGITS = bitplan.load_task("digits")
HELD = DIGITS.hold_out(0.2)[1]


def vgg():
    """As plain as they come: convolutions with batch norm, then dropout."""
    torch.manual_seed(0)
    parts = []
    for inputs, outputs in ((1, 16), (16, 16), (16, 32)):
        parts += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, 10))


def shrink_(model, factor):
    """Make the convolutions smaller by a factor, as weight decay does in time: behind batch norm nothing changes."""
    with torch.no_grad():
        for layer, norm in itertools.pairwise(model):
            if isinstance(norm, nn.BatchNorm2d):
                layer.weight *= factor
                layer.bias *= factor
                norm.running_mean *= factor
                norm.running_var *= factor**2


@pytest.fixture(scope="module")
def trained():
    model = vgg()
    bitplan.finetune_(model, DIGITS, bitplan.Recipe(epochs=12, batch_size=64, lr=0.05, held_out=0.2))
    return model


def starts(trained, factor):
    """The float network and its 4-bit copy, calibrated."""
    model = copy.deepcopy(trained)
    shrink_(model, factor)
    four = bitplan.quantize(model, bitplan.Plan.uniform(bitplan.trace(model, DIGITS.example()), "w4a4"))
    bitplan.calibrate_(four, [images for images, _ in DIGITS.batches("train", 128, seed=0)][:4])
    return model, four


@pytest.mark.parametrize("factor", [1.0, 0.1])
def test_a_recipe_without_a_rate_does_no_harm(factor, trained, caplog):
    for start in starts(trained, factor):
        model = copy.deepcopy(start)
        bitplan.finetune_(model, DIGITS, bitplan.Recipe(steps=40, batch_size=64))
        assert HELD.score(model) > HELD.score(start) - 1.5
    assert not caplog.records


def test_a_rate_that_is_fixed_destroys_what_has_small_weights_and_it_is_told(trained, caplog):
    for start in starts(trained, 0.1):
        model = copy.deepcopy(start)
        bitplan.finetune_(model, DIGITS, bitplan.Recipe(steps=40, batch_size=64, lr=0.01))
        assert HELD.score(model) < HELD.score(start) - 5
    assert caplog.text.count("it began with, on the same training samples; lower lr (0.01)") == 2
