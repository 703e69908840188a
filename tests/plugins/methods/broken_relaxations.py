"""Relaxations that break one clause each."""

import itertools
from dataclasses import dataclass, replace

import torch

from bitplan.gains.base import LayerGains
from bitplan.plugins.methods.relaxations.fracbits import FracBits
from bitplan.testing import check_relaxation

CALLS = itertools.count()


def saying(**methods):
    """FracBits with other methods."""
    kind = dataclass(frozen=True)(type("Mine", (FracBits,), methods))
    return kind()


def finding(change):
    """A relaxation whose gains are changed."""

    def layer_gains(self, model, graph, choices, context):
        found = FracBits.layer_gains(self, model, graph, choices, context)
        values, counts = change(dict(found.values), dict(found.counts), context)
        return LayerGains(values, counts=counts)

    return saying(layer_gains=layer_gains)


def shifting(self, model, graph, choices, context):
    with torch.no_grad():
        next(model.parameters()).add_(1)
    return FracBits.layer_gains(self, model, graph, choices, replace(context))


def failing(*given):
    raise ZeroDivisionError("no such luck")


def kept_apart(values, counts, context):
    return values, counts | {"stored": int(context.store is not None and next(CALLS) % 2)}


def lowest(values, counts, context):
    return {name: tuple(-float(place) for place in range(len(row))) for name, row in values.items()}, counts


BROKEN = [
    ("it is derived from Relaxation", lambda: check_relaxation(object())),
    ("it begins somewhere", lambda: check_relaxation(saying(start=failing))),
    (
        "shares of a group are not below 0, and 1 in all",
        lambda: check_relaxation(saying(shares=lambda self, theta, aim, progress: theta.expand(-1, 3))),
    ),
    (
        "shares follow from θ, by a gradient",
        lambda: check_relaxation(
            saying(shares=lambda self, theta, *given: FracBits.shares(self, theta.detach(), *given))
        ),
    ),
    (
        "every group has one finite value for each choice",
        lambda: check_relaxation(saying(values=lambda self, theta, aim: theta * torch.nan)),
    ),
    ("it learns", lambda: check_relaxation(saying(objective=failing))),
    (
        "the same seed learns the same",
        lambda: check_relaxation(finding(lambda values, counts, _: (values, counts | {"calls": next(CALLS)}))),
    ),
    ("what is in the store is taken", lambda: check_relaxation(finding(kept_apart))),
    (
        "no more is spent than is allowed",
        lambda: check_relaxation(finding(lambda values, counts, _: (values, counts | {"spend": 10**6}))),
    ),
    ("the best selection uses the budget up", lambda: check_relaxation(finding(lowest))),
    ("the model stays as it was", lambda: check_relaxation(saying(layer_gains=shifting))),
]


def right():
    check_relaxation(saying(confine_=lambda self, theta, aim: theta.clamp_(0, 1)))
