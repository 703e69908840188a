"""A network on a few training batches as it is: the loss and the score of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bitplan.adapters.torch import device_of
from bitplan.core.errors import InputError
from bitplan.tasks.base import Batch, Split, Task


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
        outputs = task.forward(model, batch)
        losses.append(float(task.loss(outputs, batch)))
        scores.append(float(task.batch_score(outputs, batch)))
    return losses, scores if all(map(math.isfinite, scores)) else None
