"""What all segmentation tasks share: the loss, and the mean IoU; void pixels have no part in either."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.core.errors import InputError
from bitplan.tasks.labelled import Labelled, LabelledImages
from bitplan.tasks.scenes import VOID

AUXILIARY = 0.4  # the share of the auxiliary head's loss, as for PSPNet


class Segmentation(LabelledImages):
    """Everything of a task but its data: a frozen dataclass below it brings `example`, `size` and `batches`.

    Labels are the classes of the pixels, (B, H, W), and 255 where void. A model returns scores (B, classes, H, W), in
    training also a tuple of them and those of auxiliary heads. Distillation compares the first scores, at void pixels
    too: there is no truth, but the teacher has an opinion there as elsewhere.
    """

    name: str
    metric = "mean IoU"
    class_names: tuple[str, ...]

    def loss(self, outputs: Any, batch: Labelled) -> Tensor:
        """Cross-entropy, a mean over the pixels that are not void; plus 0.4 of that of each auxiliary head."""
        _, labels = batch
        main, *auxiliary = [_cross_entropy(self._checked(scores, labels), labels) for scores in _tuple(outputs)]
        return main + AUXILIARY * sum(auxiliary)

    def batch_score(self, outputs: Any, batch: Labelled) -> float:
        """Mean IoU of a batch, in percent; NaN where all is void."""
        return _mean(intersection_over_union(self._confusion(self.logits(outputs)[0], batch[1])))

    def score(self, model: nn.Module) -> float:
        """Mean IoU over the pixels of the whole test split, in percent."""
        return _mean(self._ious(model))

    def scores(self, model: nn.Module) -> dict[str, float]:
        """Mean IoU, and the IoU of each class that occurs, in percent."""
        ious = self._ious(model)
        named = zip(self.class_names, ious.tolist(), strict=True)
        return {self.metric: _mean(ious)} | {name: value for name, value in named if not math.isnan(value)}

    def _ious(self, model: nn.Module) -> Tensor:
        matrix = torch.stack(self._measured(model, self._confusion)).sum(0)
        if not matrix.any():
            raise InputError("every pixel of the test split is void, so there is no score: look at the labels")
        return intersection_over_union(matrix)

    def _confusion(self, scores: Tensor, labels: Tensor) -> Tensor:
        return confusion(self._checked(scores, labels).argmax(1), labels, len(self.class_names))

    def _checked(self, scores: Tensor, labels: Tensor) -> Tensor:
        expected = (labels.shape[0], len(self.class_names), *labels.shape[1:])
        if scores.shape == expected:
            return scores
        if scores.dim() == 4 and scores.shape[1] != expected[1]:
            raise InputError(
                f"the model gives scores for {scores.shape[1]} classes, task {self.name} has {expected[1]}: "
                "take a model that was made for this task"
            )
        raise InputError(f"the model's scores are {tuple(scores.shape)}, task {self.name} needs {expected}")


def confusion(guesses: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(classes, classes): how many pixels of each class (rows) were taken for which (columns); void left out."""
    known = labels != VOID
    pairs = labels[known] * classes + guesses[known]
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def intersection_over_union(matrix: Tensor) -> Tensor:
    """(classes,), in percent, of a confusion matrix; NaN for a class that is neither there nor guessed."""
    counts = matrix.double()
    both = counts.diagonal()
    return 100 * both / (counts.sum(0) + counts.sum(1) - both)


def _mean(ious: Tensor) -> float:
    return float(ious.nanmean())


def _cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """0 where all is void, since a mean over nothing is not a number."""
    total = F.cross_entropy(scores, labels, ignore_index=VOID, reduction="sum")
    return total / (labels != VOID).sum().clamp(min=1)


def _tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
