"""What a task is: data, a loss, a score, and which way the score is better."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, Self, runtime_checkable

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitplan.core.errors import InputError
from bitplan.core.parsing import first_line
from bitplan.core.protocols import check_is
from bitplan.core.registry import TASKS
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
        """One pass over a split: in its own order without a seed, else shuffled (for training also augmented) by it."""

    @abstractmethod
    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Run a model on a batch."""

    @abstractmethod
    def size(self, split: Split) -> int:
        """How many samples a split has."""


class WithAnswers(WithData, Protocol):
    """Data on which the answers of two networks can be compared; no label is looked at."""

    @abstractmethod
    def logits(self, outputs: Any) -> tuple[Tensor, ...]:
        """Class scores, classes in dimension 1: what distillation compares with the teacher's."""


class WithLoss(WithData, Protocol):
    """Labelled data, on which a network can be trained."""

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """The training loss of what `forward` returned, a mean over the samples."""

    @abstractmethod
    def batch_score(self, outputs: Any, batch: Batch) -> float:
        """The score on one batch, for progress and for ALPS's mean training score."""


@runtime_checkable
class WithWindows(Protocol):
    """A test split of windows, whose losses say which of two networks is better on the same ones."""

    @abstractmethod
    def each(self, model: nn.Module) -> list[float]:
        """The loss of each window of the test split, in order."""

    @abstractmethod
    def scores_of(self, losses: list[float]) -> Mapping[str, float]:
        """What `scores` gives, of these losses."""


class Task(WithAnswers, WithLoss, Protocol):
    """A frozen dataclass derived from this class, whose fields are its options; splits are disjoint, scores repeat.

    `version` changes whenever a score would: results of different versions are not compared. One may say which options
    methods have on it unless they are given, `usual = {"drift": {"samples": 4}}`.
    """

    metric: str
    higher_is_better: bool
    version: int

    @abstractmethod
    def example(self) -> Any:
        """An input for `trace`: shapes matter, values do not."""

    @abstractmethod
    def score(self, model: nn.Module) -> float:
        """The score on the whole test split, in percent; the model's mode is restored."""

    def scores(self, model: nn.Module) -> Mapping[str, float]:
        """All figures of the test split by name, `metric` first, such as F1 and exact match."""
        return {self.metric: self.score(model)}

    def hold_out(self, share: float) -> tuple[Self, Self]:
        """The task with a share of its training samples left out, and one whose test split they are."""
        raise InputError(
            f"task {self.name} cannot hold out a part of its training samples: train without held_out, or give the "
            "task a method hold_out (docs/extend.md)"
        )


def samples_in(batch: Batch) -> int:
    """How many samples a batch has: as many as its first tensor has rows."""
    rows = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), None)
    return 1 if rows is None else len(rows)


def title_of(task: Task) -> str:
    """A task as records call it: its name, its version and how much there is to train on."""
    return f"{task.name} version {task.version} with {task.size('train')} samples"


def load_task(name: str, **options: Any) -> Task:
    """The task of that name with its options, such as the folder of its data.

    `package.module:factory` is imported: a function that returns a task, such as one that `bitplan.task` makes.
    """
    task: Task = _made(name, options) if names_code(name) else TASKS.make(name, options)
    check_is(task, Task, "task")
    return task


def _made(name: str, options: Mapping[str, Any]) -> Any:
    try:
        return import_factory(name)(**options)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"task {name} cannot be made, {type(error).__name__}: {first_line(error)}") from error
