"""A small task that a small network learns in a second: which half of an image is bright?"""

from dataclasses import dataclass

import torch

from bitplan.tasks.images import Classification
from nets import classifier


@dataclass(frozen=True)
class Halves(Classification):
    """Noise of 1×6×6, brighter on one side; `promised` is a size that is not kept."""

    samples: int = 64
    tests: int = 32
    promised: int | None = None
    name = "halves"
    version = 1

    def example(self):
        return torch.zeros(1, 1, 6, 6)

    def size(self, split):
        return (self.promised or self.samples) if split == "train" else self.tests

    def data(self, split):
        count = self.samples if split == "train" else self.tests
        generator = torch.Generator().manual_seed(int(split == "train"))
        labels = torch.arange(count) % 2
        images = torch.randn(count, 1, 6, 6, generator=generator)
        images[labels == 0, :, :, :3] += 1.0
        images[labels == 1, :, :, 3:] += 1.0
        return images, labels

    def batches(self, split, batch_size, seed=None):
        images, labels = self.data(split)
        order = torch.arange(len(labels))
        if seed is not None:
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        for rows in order.split(batch_size):
            yield images[rows], labels[rows]


def network(*, norm=True, dropout=0.0, classes=2):
    """Two convolutions and a head, always the same weights; the caller's random numbers are left alone."""
    with torch.random.fork_rng([]):
        torch.manual_seed(7)
        return classifier(1, (4, 6), classes, norm=norm, dropout=dropout)


def quantized(middle="w4a4", **options):
    """The same network with LSQ."""
    from bitplan.core.records import Plan
    from bitplan.quant.convert import quantize

    plan = Plan(model="test", precisions={"0": "w8a8", "3": middle, "8": "w8a8"}, method="by hand", selector="none")
    return quantize(network(**options), plan)
