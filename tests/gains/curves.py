"""Tiny tasks and networks with curvature: classes, an answer's two ends, an auxiliary output."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import bitplan

RULES = bitplan.Rules(narrow=0)


@dataclass(frozen=True)
class Points:
    """Which of three classes a point with four coordinates belongs to."""

    samples: int = 24
    name = "points"
    metric = "top-1"
    higher_is_better = True
    version = 1

    def size(self, split):
        return self.samples

    def batches(self, split, batch_size, seed=None):
        generator = torch.Generator().manual_seed(5)
        points = torch.randn(self.samples, 4, generator=generator)
        labels = (points[:, 0] > 0).long() + (points[:, 1] > 0.5).long()
        order = torch.arange(self.samples)
        if seed is not None:
            order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(seed))
        for rows in order.split(batch_size) if self.samples else ():
            yield {"x": points[rows], "y": labels[rows], "note": "not a tensor"}

    def forward(self, model, batch):
        return model(batch["x"])

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch["y"])


@dataclass(frozen=True)
class Ends(Points):
    """Question answering: the start and the end among four tokens, as two sets of scores."""

    name = "ends"

    def loss(self, outputs, batch):
        start, end = outputs
        return (F.cross_entropy(start, batch["y"]) + F.cross_entropy(end, batch["y"])) / 2


@dataclass(frozen=True)
class Auxiliary(Points):
    """The model answers with a tuple while it trains, and with scores alone otherwise."""

    name = "auxiliary"

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs[0] if isinstance(outputs, tuple) else outputs, batch["y"])


@dataclass(frozen=True)
class Summed(Points):
    """A loss without any curvature."""

    def loss(self, outputs, batch):
        return outputs.mean()


class Net(nn.Module):
    """Smooth, with a norm whose buffers must not move; 4 → 5 → 4 → 3."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.middle, self.more, self.head = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.drop(torch.tanh(self.norm(self.stem(x))))
        return self.head(torch.tanh(self.more(torch.tanh(self.middle(x)))))


class Reader(Net):
    """Two sets of scores."""

    def forward(self, x):
        scores = super().forward(x)
        return scores, scores.flip(1)


class Assisted(Net):
    """Scores and auxiliary scores in training, scores otherwise."""

    def forward(self, x):
        scores = super().forward(x)
        return (scores, scores * 0.5) if self.training else scores


def made(kind=Net, task=None, quantized=False):
    """A network that has been trained a little, and its graph."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = kind()
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        task = task or Points()
        for _ in range(40):
            for batch in task.batches("train", 24, 0):
                optimizer.zero_grad()
                task.loss(task.forward(model, batch), batch).backward()
                optimizer.step()
    model.zero_grad()
    graph = bitplan.trace(model, torch.zeros(2, 4), rules=RULES, name="tiny")
    if quantized:
        model = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
        bitplan.calibrate_(model, [next(iter(task.batches("train", 24)))["x"]])
    return model, graph
