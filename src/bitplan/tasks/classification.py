"""What all image classification tasks share: the loss, and the share of images classified right."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.core.errors import InputError
from bitplan.tasks.base import Split

Labelled = tuple[Tensor, Tensor]
"""Images (B, C, H, W) and their classes (B,)."""


class Classification(ABC):
    """Everything of a task but its data: a frozen dataclass below it brings `example`, `size` and `batches`.

    A model may return its class scores (B, classes), or a tuple that begins with them: torchvision's GoogLeNet and
    Inception do so in training, and their auxiliary scores are left alone.
    """

    metric = "top-1"
    higher_is_better = True
    tops: tuple[int, ...] = (1,)
    scored_at_once = 250

    @abstractmethod
    def example(self) -> Tensor:
        """An input for `trace`."""

    @abstractmethod
    def size(self, split: Split) -> int:
        """How many samples a split has."""

    @abstractmethod
    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterable[Labelled]:
        """One pass over a split."""

    def forward(self, model: nn.Module, batch: Labelled) -> Any:
        """Run a model on the images of a batch."""
        return model(batch[0])

    def loss(self, outputs: Any, batch: Labelled) -> Tensor:
        """Cross-entropy, a mean over the samples."""
        return F.cross_entropy(self.logits(outputs)[0], batch[1])

    def logits(self, outputs: Any) -> tuple[Tensor, ...]:
        """Class scores, (B, classes)."""
        return (outputs[0] if isinstance(outputs, tuple) else outputs,)

    def batch_score(self, outputs: Any, batch: Labelled) -> float:
        """Percent of a batch classified right."""
        return 100 * _hits(self.logits(outputs)[0], batch[1], 1) / len(batch[1])

    def score(self, model: nn.Module) -> float:
        """Percent of the test split classified right."""
        return self.scores(model)["top-1"]

    def scores(self, model: nn.Module) -> dict[str, float]:
        """Percent of the test split whose class is among the k best, for each `top-k` of the task."""
        hits, seen = dict.fromkeys(self.tops, 0), 0
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        with evaluating(model), torch.no_grad():
            for images, labels in self.batches("test", self.scored_at_once):
                batch = images.to(device), labels.to(device)
                logits = self.logits(self.forward(model, batch))[0]
                hits = {k: count + _hits(logits, batch[1], k) for k, count in hits.items()}
                seen += len(labels)
        if not seen:
            raise InputError("the test split has no image that can be read, so there is no score: look at the data")
        return {f"top-{k}": 100 * count / seen for k, count in hits.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Only the options travel to another process; the data is read again there."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and every module back into its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _hits(logits: Tensor, labels: Tensor, k: int) -> int:
    best = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return int((best == labels[:, None]).sum())
