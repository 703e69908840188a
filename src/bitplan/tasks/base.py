"""The contract of a task: data, a loss, a score, and whether higher scores are better."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bitplan.adapters.torch import device_of
from bitplan.core.errors import InputError
from bitplan.core.parsing import first_line
from bitplan.core.registry import TASKS, check_is
from bitplan.core.spend import Spend, charge
from bitplan.core.trust import import_factory, names_code

Split = Literal["train", "test"]
Batch = Any
"""Whatever the task's own functions understand; tensors in it can be moved to a device as a tree."""


@runtime_checkable
class WithData(Protocol):
    """Data that a network can be run on."""

    name: str

    @abstractmethod
    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterable[Batch]:
        """Yield one pass over a split: in its own order, or shuffled and (for training) augmented by a seed."""

    @abstractmethod
    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Run a model on a batch."""

    @abstractmethod
    def size(self, split: Split) -> int:
        """Return how many samples a split has."""


class WithAnswers(WithData, Protocol):
    """Data on which the logits of two networks can be compared; no label is looked at."""

    @abstractmethod
    def logits(self, outputs: Any) -> tuple[Tensor, ...]:
        """Return class scores, classes in dimension 1; distillation compares them with the teacher's."""


class WithLoss(WithData, Protocol):
    """Labelled data, on which a network can be trained."""

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the training loss of the outputs of `forward`, a mean over the samples."""

    @abstractmethod
    def batch_score(self, outputs: Any, batch: Batch) -> float:
        """Return the score on one batch, for progress and for ALPS's mean training score."""


@runtime_checkable
class WithWindows(Protocol):
    """A test split of windows, whose losses say which of two networks is better on the same ones."""

    @abstractmethod
    def each(self, model: nn.Module) -> list[float]:
        """Return the loss of each window of the test split, in order."""

    @abstractmethod
    def scores_of(self, losses: list[float]) -> Mapping[str, float]:
        """Return the figures of `scores` from these losses."""


class Task(WithAnswers, WithLoss, Protocol):
    """A frozen dataclass derived from this class, whose fields are its options; splits are disjoint, scores repeat.

    `version` changes whenever a score would: results of different versions are not compared. A task may give methods
    their default options on it, `usual = {"drift": {"samples": 4}}`.
    """

    metric: str
    higher_is_better: bool
    version: int

    @abstractmethod
    def example(self) -> Any:
        """Return an input for `trace`: shapes matter, values do not."""

    @abstractmethod
    def score(self, model: nn.Module) -> float:
        """Return the score on the whole test split, in percent; the model's mode is restored."""

    def scores(self, model: nn.Module) -> Mapping[str, float]:
        """Return all figures of the test split by name, `metric` first, such as F1 and exact match."""
        return {self.metric: self.score(model)}

    def hold_out(self, share: float) -> tuple[Self, Self]:
        """Return the task without a share of its training samples, and one whose test split is that share."""
        raise InputError(
            f"task {self.name} cannot hold out a part of its training samples: train without held_out, or give the "
            "task a method hold_out (docs/extend.md)"
        )


def samples_in(batch: Batch) -> int:
    """Return how many samples a batch has: the rows of its first tensor."""
    rows = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), None)
    return 1 if rows is None else len(rows)


def title_of(task: Task) -> str:
    """Return a task's title in records: its name, its version and its number of training samples."""
    return f"{task.name} version {task.version} with {task.size('train')} samples"


def load_task(name: str, **options: Any) -> Task:
    """Return the task of a name with its options, such as the folder of its data.

    `package.module:factory` is imported: a function that returns a task, such as one that `bitplan.task` makes.
    """
    task: Task = _make_task(name, options) if names_code(name) else TASKS.make(name, options)
    check_is(task, Task, "task")
    return task


def _make_task(name: str, options: Mapping[str, Any]) -> Any:
    try:
        return import_factory(name)(**options)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"task {name} cannot be made, {type(error).__name__}: {first_line(error)}") from error


# A task as choosing may see it: its training split cut in two, to train on and to be judged by.


@dataclass(frozen=True)
class ChoosingTask(Task):
    """`whole` with a share of its training samples held out as the test split, the same for all methods.

    Methods train on the rest and measure on the held-out samples; the test split of `whole` is out of reach.
    """

    name: str
    metric: str
    higher_is_better: bool
    version: int
    whole: Task
    share: float

    def example(self) -> Any:
        """Return an input for `trace`."""
        return self.whole.example()

    def size(self, split: Split) -> int:
        """Return how many samples a split has."""
        return self._of(split).size(split)

    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterable[Batch]:
        """Yield one pass over a split."""
        return self._of(split).batches(split, batch_size, seed)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Run a model on a batch."""
        return self.whole.forward(model, batch)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the training loss."""
        return self.whole.loss(outputs, batch)

    def logits(self, outputs: Any) -> tuple[Tensor, ...]:
        """Return class scores."""
        return self.whole.logits(outputs)

    def batch_score(self, outputs: Any, batch: Batch) -> float:
        """Return the score on one batch."""
        return self.whole.batch_score(outputs, batch)

    def score(self, model: nn.Module) -> float:
        """Return the score on the held-out samples."""
        return self._of("test").score(model)

    def scores(self, model: nn.Module) -> Mapping[str, float]:
        """Return all figures of the held-out samples."""
        return self._of("test").scores(model)

    def hold_out(self, share: float) -> tuple[Self, Self]:
        """Hold out a share of the rest, for a recipe that keeps the best weights."""
        stay, held = self._of("train").hold_out(share)
        return stay, held  # type: ignore[return-value]

    def _of(self, split: Split) -> Task:
        return self._parts[split != "train"]

    @cached_property
    def _parts(self) -> tuple[Task, Task]:
        return self.whole.hold_out(self.share)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the parts: they are cut again in another process, so that data need not travel."""
        return {name: value for name, value in vars(self).items() if name != "_parts"}


def choosing_task(task: Task, share: float) -> Task:
    """Return the task with a share of its training samples held out to judge by, or the task itself if it is 0."""
    if not share:
        return task
    return ChoosingTask(task.name, task.metric, task.higher_is_better, task.version, task, share)


def measuring_split(task: Any) -> Split:
    """Return the split that methods measure on: the training split, unless a part of it was held out."""
    return "test" if isinstance(task, ChoosingTask) else "train"


def samples_per_epoch(task: Any) -> int:
    """Return how many samples an epoch of training has, including those held out for choosing."""
    return int((task.whole if isinstance(task, ChoosingTask) else task).size("train"))


# Loss and score of a network on a few training batches.


def draw(
    model: nn.Module, task: Task, count: int, batch_size: int, seed: int | None, split: Split = "train"
) -> list[Batch]:  # fmt: skip
    """Return the first batches of a split in the order of a seed, on the model's device."""
    device = device_of(model)
    batches = list(itertools.islice(task.batches(split, batch_size, seed=seed), count))
    if len(batches) < count:
        raise InputError(f"task {task.name} ran out of batches after {len(batches)} of {count}: check its data")
    return [tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch) for batch in batches]


@torch.no_grad()
def measure_(model: nn.Module, task: Task, batches: Sequence[Batch]) -> tuple[list[float], list[float] | None]:
    """Return loss and score of each batch, and leave the model in inference mode; no scores if a batch has none."""
    model.eval()
    losses, scores = [], []
    for batch in batches:
        loss, score = measure_batch(task, task.forward(model, batch), batch)
        losses.append(loss)
        scores.append(score)
        charge(Spend(forwards=samples_in(batch), labels=True))
    return losses, scores if all(map(math.isfinite, scores)) else None


@torch.no_grad()
def scores_apart_(model: nn.Module, task: Task, batch: Batch, parts: int) -> list[float] | None:
    """Return the score of each of `parts` equal parts of a batch by one pass, and leave the model in inference mode.

    Return None if batch or outputs hold anything but tensors with a row for each sample.
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


def measure_batch(task: Task, outputs: Any, batch: Batch) -> tuple[float, float]:
    """Return the loss and the score of a batch; a score that is not finite means that the batch has none."""
    return float(task.loss(outputs, batch)), float(task.batch_score(outputs, batch))
