"""Tasks that break one clause each: all of them are the right one with one part exchanged."""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from bitplan.adapters.torch import inference
from bitplan.tasks.base import Task
from bitplan.testing import check_task

CALLS = itertools.count()


@dataclass(frozen=True)
class Sides(Task):
    """Points in a plane: left or right?"""

    samples: int = 20
    name = "sides"
    metric = "top-1"
    higher_is_better = True
    version = 1

    def example(self):
        return torch.empty(1, 2)

    def size(self, split):
        return self.samples

    def data(self, split):
        points = torch.randn(self.samples, 2, generator=torch.Generator().manual_seed(int(split == "train")))
        return points, (points[:, 0] > 0).long()

    def batches(self, split, batch_size, seed=None):
        order = torch.arange(self.samples)
        if seed is not None:
            order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(seed))
        points, sides = self.data(split)
        for rows in order.split(batch_size):
            yield points[rows], sides[rows]

    def forward(self, model, batch):
        return model(batch[0])

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1])

    def logits(self, outputs):
        return (outputs,)

    def batch_score(self, outputs, batch):
        return 100 * float((outputs.argmax(1) == batch[1]).float().mean())

    def score(self, model):
        with inference(model), torch.no_grad():
            batch = self.data("test")
            return self.batch_score(self.forward(model, batch), batch)


class Pairs(Sides):
    """What a network gets are two tensors."""

    def forward(self, model, batch):
        return model(batch[0], batch[0])


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, one, other):
        return self.layer(one + other)


def both():
    return Both()


def broken(**parts):
    """The task with other parts, in a class that pickle finds here."""
    name = f"Sides{next(CALLS)}"
    globals()[name] = kind = type(name, (Sides,), {"__module__": __name__, **parts})
    return lambda: check_task(kind())


def in_order(self, split, batch_size, seed=None):
    return Sides.batches(self, split, batch_size)


def of_one_seed(self, split, batch_size, seed=None):
    return Sides.batches(self, split, batch_size, None if seed is None else 1)


def by_chance(self, split, batch_size, seed=None):
    return Sides.batches(self, split, batch_size, None if seed is None else next(CALLS))


def never_the_same(self, split, batch_size, seed=None):
    return Sides.batches(self, split, batch_size, next(CALLS))


def all_at_once(self, split, batch_size, seed=None):
    return Sides.batches(self, split, self.samples, seed)


def short(self, split, batch_size, seed=None):
    return itertools.islice(Sides.batches(self, split, batch_size, seed), 1)


def of_words(self, split, batch_size, seed=None):
    return iter(["words"])


def nothing_held_out(self, share):
    return self, self


def failing(self, *given):
    raise ZeroDivisionError("no such luck")


def unrestored(self, model):
    model.eval()
    return 50.0


def training(self, model):
    with torch.no_grad():
        next(model.parameters()).add_(1)
    return 50.0


class Bare:
    name = "bare"


class Local(Sides):
    """Never equal to another."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Elsewhere(Sides):
    """Its data is that of this process."""

    def __setstate__(self, state):
        object.__setattr__(self, "samples", 5)

    def __eq__(self, other):
        return True

    __hash__ = object.__hash__


BROKEN = [
    ("it has all that a task has", lambda: check_task(Bare())),
    ("its version is a whole number from 1", broken(version=0)),
    ("higher_is_better is True or False", broken(higher_is_better="yes")),
    ("a pass over the train split works", broken(batches=failing)),
    ("a batch is made of tensors", broken(batches=of_words)),
    ("a pass gives every sample once", broken(batches=short)),
    ("a batch has at most batch_size samples", broken(batches=all_at_once)),
    ("without a seed the order is its own", broken(batches=never_the_same)),
    ("a seed gives the same batches", broken(batches=by_chance)),
    ("a seed shuffles", broken(batches=in_order)),
    ("another seed gives another order", broken(batches=of_one_seed)),
    ("the splits are disjoint", broken(data=lambda self, split: Sides.data(self, "test"))),
    ("it can be sent to another process", lambda: check_task(Local())),
    ("it can be sent to another process", lambda: check_task(Elsewhere())),
    ("it can be sent to another process", broken(__reduce__=failing)),
    ("what is held out of the training split, and what stays, make it up", broken(hold_out=nothing_held_out)),
    ("a network can be run on a batch", lambda: check_task(Sides(), model=nn.Linear(3, 2))),
    ("the loss is one number", broken(loss=lambda self, outputs, batch: outputs)),
    ("the loss is finite", broken(loss=lambda self, outputs, batch: outputs.sum() / 0)),
    ("the loss can be differentiated", broken(loss=lambda self, outputs, batch: outputs.sum().detach())),
    ("logits are a tuple of tensors, classes in dimension 1", broken(logits=lambda self, outputs: outputs)),
    ("the score of a batch is a number", broken(batch_score=lambda *_: "good", score=lambda *_: 50.0)),
    ("it scores a network", broken(score=failing)),
    ("the model stays as it was", broken(score=training)),
    ("each module of the model stays in its mode", broken(score=unrestored)),
    ("the score is a finite number", broken(score=lambda self, model: float("nan"))),
    ("the score repeats", broken(score=lambda self, model: float(next(CALLS)))),
    ("scores has the metric, and it is the score", broken(scores=lambda self, model: {"other": 1.0})),
]  # fmt: skip


def right():
    check_task(Sides())
