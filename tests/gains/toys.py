"""Small tasks and networks that learn in a second: a class per image, a class per pixel, the span of an answer."""

import multiprocessing
import pickle
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import bitplan
from bitplan.tasks.images import Classification

RULES = bitplan.Rules(narrow=0)
RECIPE = bitplan.Recipe(steps=60, batch_size=16, lr=0.05)
CHOICES = "w2a2,w4a4"


@dataclass(frozen=True)
class Stripes(Classification):
    """1×6×6 noise with a bright row: which of three? `slow` seconds per forward."""

    samples: int = 128
    slow: float = 0.0
    name = "stripes"
    version = 1

    def example(self):
        return torch.zeros(1, 1, 6, 6)

    def size(self, split):
        return self.samples

    def data(self, split):
        generator = torch.Generator().manual_seed(int(split == "train"))
        labels = torch.arange(self.samples) % 3
        images = torch.randn(self.samples, 1, 6, 6, generator=generator)
        for label in range(3):
            images[labels == label, :, 2 * label] += 1.5
        return images, labels

    def batches(self, split, batch_size, seed=None):
        images, labels = self.data(split)
        order = torch.arange(len(labels))
        if seed is not None:
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        for rows in order.split(batch_size):
            yield images[rows], labels[rows]

    def forward(self, model, batch):
        time.sleep(self.slow)
        return super().forward(model, batch)


@dataclass(frozen=True)
class Pixels(Stripes):
    """Segmentation: the class of every pixel is whether its row is the bright one; 9 marks borders to be ignored."""

    name = "pixels"
    metric = "mIoU"

    def target(self, batch):
        rows = torch.arange(6) == 2 * batch[1][:, None]
        target = rows[:, :, None].expand(-1, -1, 6).long().clone()
        target[:, :, 0] = 9
        return target

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, self.target(batch), ignore_index=9)

    def batch_score(self, outputs, batch):
        return 100 * (outputs.argmax(1) == self.target(batch))[:, :, 1:].float().mean().item()

    def score(self, model):
        raise NotImplementedError


@dataclass(frozen=True)
class Spans(Stripes):
    """Question answering: start and end of the bright row among six tokens; a batch alone has no score."""

    name = "spans"
    metric = "F1"

    def forward(self, model, batch):
        return model(batch[0].squeeze(1)).unbind(-1)

    def loss(self, outputs, batch):
        start, end = outputs
        return (F.cross_entropy(start, 2 * batch[1]) + F.cross_entropy(end, 2 * batch[1])) / 2

    def logits(self, outputs):
        return tuple(outputs)

    def batch_score(self, outputs, batch):
        return float("nan")


class Net(nn.Module):
    """Five convolutions, two of them linked; `middle` has a large share of what the class depends on."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.middle, self.wide = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 12, 3, padding=1)
        self.last, self.head = nn.Conv2d(12, 8, 1), nn.Linear(8 * 6, 3)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = self.middle((self.left(x) + self.right(x)).relu()).relu()
        x = self.last(self.wide(x).relu()).relu()
        return self.head(x.mean(3).flatten(1))


class Segmenter(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1),
        )  # fmt: skip


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.up, self.down, self.span = (nn.Linear(a, b) for a, b in ((6, 16), (16, 32), (32, 16), (16, 2)))

    def forward(self, x):
        x = self.rows(x)
        return self.span(x + self.down(self.up(x).relu()))


def quantized(task, model=None, *, train=True, top="w4a4"):
    """A network of the task at the highest choice, trained, and its graph; always the same."""
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        example = torch.zeros(1, 6, 6) if isinstance(task, Spans) else task.example()
        model = {"stripes": Net, "pixels": Segmenter, "spans": Reader}[task.name]() if model is None else model
    if train:
        bitplan.finetune_(model, task, RECIPE)
    graph = bitplan.trace(model, example, rules=RULES, name="toy")
    start = bitplan.quantize(model, bitplan.Plan.uniform(graph, top))
    images = next(iter(task.batches("train", 32)))[0]
    bitplan.calibrate_(start, [images.squeeze(1) if isinstance(task, Spans) else images])
    if train:
        bitplan.finetune_(start, task, RECIPE)
    return start, graph


@dataclass(frozen=True)
class Spawned:
    """An engine with one other process, which gets everything by pickle."""

    def run(self, work, items):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            yield from [(item, pool.submit(work, item).result()) for item in items]


@dataclass(frozen=True)
class Pickled:
    """An engine that sends everything by pickle, but stays here."""

    def run(self, work, items):
        return ((item, pickle.loads(pickle.dumps(work))(item)) for item in items)


@dataclass(frozen=True)
class Refusing:
    """An engine that is never to be asked."""

    def run(self, work, items):
        raise AssertionError(f"{len(list(items))} jobs are done again")
