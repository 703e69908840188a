"""What all image classification tasks share: the loss, and the share of images classified right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.tasks.labelled import Labelled as Labelled
from bitplan.tasks.labelled import LabelledImages


class Classification(LabelledImages):
    """Everything of a task but its data: a frozen dataclass below it brings `example`, `size` and `batches`.

    A model may return its class scores (B, classes), or a tuple that begins with them: torchvision's GoogLeNet and
    Inception do so in training, and their auxiliary scores are left alone.
    """

    metric = "top-1"
    tops: tuple[int, ...] = (1,)
    scored_at_once = 250

    def loss(self, outputs: Any, batch: Labelled) -> Tensor:
        """Cross-entropy, a mean over the samples."""
        return F.cross_entropy(self.logits(outputs)[0], batch[1])

    def batch_score(self, outputs: Any, batch: Labelled) -> float:
        """Percent of a batch classified right."""
        return 100 * _hits(self.logits(outputs)[0], batch[1], 1) / len(batch[1])

    def score(self, model: nn.Module) -> float:
        """Percent of the test split classified right."""
        return self.scores(model)["top-1"]

    def scores(self, model: nn.Module) -> dict[str, float]:
        """Percent of the test split whose class is among the k best, for each `top-k` of the task."""

        def counts(logits: Tensor, labels: Tensor) -> Tensor:
            return torch.tensor([len(labels), *(_hits(logits, labels, k) for k in self.tops)])

        seen, *hits = torch.stack(self._measured(model, counts)).sum(0).tolist()
        return {f"top-{k}": 100 * count / seen for k, count in zip(self.tops, hits, strict=True)}


def _hits(logits: Tensor, labels: Tensor, k: int) -> int:
    best = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return int((best == labels[:, None]).sum())
