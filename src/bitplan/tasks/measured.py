"""A network on a few training batches as it is: the loss and the score of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bitplan.adapters.torch import device_of
from bitplan.core.errors import InputError
from bitplan.core.spend import Spend, charge
from bitplan.tasks.base import Batch, Split, Task, samples_in


def draw(
    model: nn.Module, task: Task, count: int, batch_size: int, seed: int | None, split: Split = "train"
) -> list[Batch]:  # fmt: skip
    """The first batches of a split in the order of a seed, where the model is."""
    device = device_of(model)
    batches = list(itertools.islice(task.batches(split, batch_size, seed=seed), count))
    if len(batches) < count:
        raise InputError(f"task {task.name} ran out of batches after {len(batches)} of {count}: check its data")
    return [tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch) for batch in batches]


@torch.no_grad()
def measure_(model: nn.Module, task: Task, batches: Sequence[Batch]) -> tuple[list[float], list[float] | None]:
    """Loss and score of each batch in inference mode, in which the model is left; no scores where a batch has none."""
    model.eval()
    losses, scores = [], []
    for batch in batches:
        loss, score = measures(task, task.forward(model, batch), batch)
        losses.append(loss)
        scores.append(score)
        charge(Spend(forwards=samples_in(batch), labels=True))
    return losses, scores if all(map(math.isfinite, scores)) else None


@torch.no_grad()
def scores_apart_(model: nn.Module, task: Task, batch: Batch, parts: int) -> list[float] | None:
    """The score of each of so many equal parts of a batch by one pass in inference mode, in which the model is left.

    None where the batch or the outputs hold something else than tensors with a row for each sample.
    """
    model.eval()
    outputs, rows = task.forward(model, batch), samples_in(batch)
    charge(Spend(forwards=rows, labels=True))
    leaves = tree_leaves((batch, outputs))
    if rows % parts or not all(isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows for leaf in leaves):
        return None
    scores = []
    for start in range(0, rows, rows // parts):
        part, answers = tree_map(lambda leaf: leaf[start : start + rows // parts], (batch, outputs))  # noqa: B023
        scores.append(float(task.batch_score(answers, part)))
    return scores


def measures(task: Task, outputs: Any, batch: Batch) -> tuple[float, float]:
    """The loss and the score of a batch; a score that is not finite says that a batch has none."""
    return float(task.loss(outputs, batch)), float(task.batch_score(outputs, batch))
