"""A task as choosing may see it: its training split cut in two, one part to train on and one to be judged by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from torch import Tensor, nn

from bitplan.tasks.base import Batch, Split, Task


@dataclass(frozen=True)
class ChoosingTask(Task):
    """`whole` with a share of its training samples held out, the same for all: they are its test split.

    What methods train they train on the rest, and what they measure they measure on what is held out; the test split of
    `whole` is out of reach.
    """

    name: str
    metric: str
    higher_is_better: bool
    version: int
    whole: Task
    share: float

    def example(self) -> Any:
        """An input for `trace`."""
        return self.whole.example()

    def size(self, split: Split) -> int:
        """How many samples a split has."""
        return self._of(split).size(split)

    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterable[Batch]:
        """One pass over a split."""
        return self._of(split).batches(split, batch_size, seed)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Run a model on a batch."""
        return self.whole.forward(model, batch)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """The training loss."""
        return self.whole.loss(outputs, batch)

    def logits(self, outputs: Any) -> tuple[Tensor, ...]:
        """Class scores."""
        return self.whole.logits(outputs)

    def batch_score(self, outputs: Any, batch: Batch) -> float:
        """The score on one batch."""
        return self.whole.batch_score(outputs, batch)

    def score(self, model: nn.Module) -> float:
        """The score on what is held out."""
        return self._of("test").score(model)

    def scores(self, model: nn.Module) -> Mapping[str, float]:
        """All figures of what is held out."""
        return self._of("test").scores(model)

    def hold_out(self, share: float) -> tuple[Self, Self]:
        """A share of what is trained on, for a recipe that keeps the best weights."""
        stay, held = self._of("train").hold_out(share)
        return stay, held  # type: ignore[return-value]

    def _of(self, split: Split) -> Task:
        return self._parts[split != "train"]

    @cached_property
    def _parts(self) -> tuple[Task, Task]:
        return self.whole.hold_out(self.share)

    def __getstate__(self) -> dict[str, Any]:
        """The parts are cut again in another process: tasks need not carry their data there."""
        return {name: value for name, value in vars(self).items() if name != "_parts"}


def choosing_task(task: Task, share: float) -> Task:
    """The task with this share of its training samples held out to judge by; the task itself where it is 0."""
    if not share:
        return task
    return ChoosingTask(task.name, task.metric, task.higher_is_better, task.version, task, share)


def judged_by(task: Any) -> Split:
    """The split that methods measure on: the training split, unless a part of it was held out for that."""
    return "test" if isinstance(task, ChoosingTask) else "train"


def samples_per_epoch(task: Any) -> int:
    """How many samples an epoch of training has, whatever part of them choosing sees."""
    return int((task.whole if isinstance(task, ChoosingTask) else task).size("train"))
