"""Factories of models that break one clause each."""

import itertools

import torch
from torch import nn

from bitplan.testing import check_model

EXAMPLE = torch.empty(1, 200)
CALLS = itertools.count()


class Fickle(nn.Module):
    """Another layer each time."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(200, 200), nn.Linear(200, 200)

    def forward(self, x):
        return self.one(x) if next(CALLS) % 2 else self.other(x)


class Weightless(nn.Module):
    def forward(self, x):
        return x @ x.T


def alone():
    return nn.Linear(200, 200)


BROKEN = [
    ("it is built without arguments", lambda: check_model(nn.Linear)),
    ("it gives a model, or a model and its example", lambda: check_model(lambda: (42, EXAMPLE))),
    ("it is traced with its example", lambda: check_model(lambda: (alone(), torch.empty(1, 3)))),
    ("tracing it again gives the same graph", lambda: check_model(lambda: (Fickle(), EXAMPLE))),
    ("it has a layer with weights", lambda: check_model(lambda: (Weightless(), EXAMPLE))),
]


def right():
    check_model(lambda: (alone(), EXAMPLE))
