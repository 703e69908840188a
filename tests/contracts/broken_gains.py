"""Gains and costs that break one clause each."""

import itertools
import math
from dataclasses import dataclass, make_dataclass
from typing import Any

import torch

from bitplan.costs.base import measured_in
from bitplan.gains.base import Gain, LayerGains
from bitplan.testing import check_cost, check_gain

CALLS = itertools.count()


def made(find, **members):
    """A gain with this function as its `layer_gains`."""
    return dataclass(frozen=True)(type("Mine", (Gain,), {"layer_gains": find, "structural": True, **members}))()


def valued(row, leave_out=(), **more):
    """A gain with this row for each layer."""

    def find(self, model, graph, choices, context):
        layers = [layer.name for group in graph.selectable for layer in group.layers]
        values = {name: row(name, choices) for name in layers if name not in leave_out}
        return LayerGains(values, **{key: value(layers, choices) for key, value in more.items()})

    return made(find)


def steps(name, choices):
    return tuple(float(step) for step in range(len(choices)))


def touching(touch):
    """A gain that does something to the model."""

    def find(self, model, graph, choices, context):
        touch(model)
        return LayerGains({layer.name: steps("", choices) for group in graph.selectable for layer in group.layers})

    return made(find, structural=False)


def boundless(name, choices):
    return 0.0, *[math.inf] * (len(choices) - 1)


def differentiate(model):
    model(torch.ones(2, 1, 8, 8)).sum().backward()


def shift(model):
    with torch.no_grad():
        next(model.parameters()).add_(1)


def with_option(value):
    kind = make_dataclass("Mine", [("option", Any, value)], bases=(Gain,), frozen=True)
    kind.structural, kind.layer_gains = True, type(valued(steps)).layer_gains
    kind.__abstractmethods__ = frozenset()
    return kind()


class Bare:
    """Only the one function."""

    def layer_gains(self, model, graph, choices, context):
        return LayerGains({})


def in_unit(cost):
    return lambda: check_cost(measured_in("things")(cost))


def failing(*given):
    raise ZeroDivisionError("no such luck")


BROKEN = [
    ("it has all that a gain has", lambda: check_gain(Bare())),
    ("its selector is one that is registered", lambda: check_gain(made(failing, selector="dice"))),
    ("it estimates what it is asked for", lambda: check_gain(made(failing))),
    ("it gives LayerGains", lambda: check_gain(made(lambda *given: {}))),
    ("every selectable layer gets values", lambda: check_gain(valued(steps, leave_out=("side",)))),
    ("every layer gets one value for each choice", lambda: check_gain(valued(lambda *given: (0.0,)))),
    ("every value is a finite number", lambda: check_gain(valued(boundless))),
    ("the value at the lowest choice is 0", lambda: check_gain(valued(lambda _, choices: (1.0,) * len(choices)))),
    (
        "errors are finite and not below 0, one for each choice",
        lambda: check_gain(valued(steps, errors=lambda layers, choices: {layers[0]: (-1.0,) * len(choices)})),
    ),
    ("what it found, and its options, can be written down", lambda: check_gain(with_option(object()))),
    ("what it found, and its options, can be written down", lambda: check_gain(with_option(math.nan))),
    (
        "the same seed gives the same gains",
        lambda: check_gain(valued(steps, counts=lambda layers, choices: {"calls": next(CALLS)})),
    ),
    ("the model stays as it was", lambda: check_gain(touching(shift))),
    ("the model stays as it was", lambda: check_gain(touching(differentiate))),
    ("each module of the model stays in its mode", lambda: check_gain(touching(lambda model: model.norm.eval()))),
    ("it says its unit (@measured_in)", lambda: check_cost(lambda layer, precision: 1)),
    ("it prices every layer at every choice", in_unit(failing)),
    ("a cost is a whole number", in_unit(lambda layer, precision: 1.5)),
    ("a cost is a whole number", in_unit(lambda layer, precision: True)),
    ("a cost is not below 0", in_unit(lambda layer, precision: -1)),
    ("a cost repeats", in_unit(lambda layer, precision: next(CALLS))),
]  # fmt: skip


def right():
    check_gain(valued(steps))
    check_gain(with_option(1))
    check_gain(touching(lambda model: None))
    in_unit(lambda layer, precision: 0)()
