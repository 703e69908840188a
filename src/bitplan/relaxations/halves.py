"""The training data in two halves, batches from each in turn: weights learn from one, shares from the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.tasks.base import Batch, Split, Task


@dataclass(frozen=True)
class InTurn(Task):
    """A task whose training batches come from two halves of another's: `batch` samples from one, then from the other.

    An epoch has as many steps on one half as on the other. What the second half's task calls its test split is that
    half: as samples of its own they are not augmented.
    """

    whole: Task
    first: Task
    second: Task
    batch: int

    @classmethod
    def of(cls, task: Task, batch: int) -> Self:
        """The halves are the same for all seeds."""
        return cls(task, *task.hold_out(0.5), batch)

    @property
    def name(self) -> str:  # type: ignore[override]
        """That of the task."""
        return self.whole.name

    @property
    def version(self) -> int:  # type: ignore[override]
        """That of the task."""
        return self.whole.version

    @property
    def metric(self) -> str:  # type: ignore[override]
        """That of the task."""
        return self.whole.metric

    @property
    def higher_is_better(self) -> bool:  # type: ignore[override]
        """As of the task."""
        return self.whole.higher_is_better

    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterator[Batch]:
        """Pieces of a batch from one half, then as many from the other."""
        if split != "train":
            yield from self.whole.batches(split, batch_size, seed)
            return
        halves = [
            iter(self.first.batches("train", batch_size, seed)),
            iter(self.second.batches("test", batch_size, seed)),
        ]
        for _ in range(self.size("train") // (2 * self.batch)):
            for half in halves:
                yield from islice(half, self.batch // batch_size)

    def size(self, split: Split) -> int:
        """As many as make whole batches, of both halves alike."""
        if split != "train":
            return self.whole.size(split)
        return 2 * self.batch * (min(self.first.size("train"), self.second.size("test")) // self.batch)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """As the task does."""
        return self.whole.forward(model, batch)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """As the task does."""
        return self.whole.loss(outputs, batch)

    def batch_score(self, outputs: Any, batch: Batch) -> float:
        """As the task does."""
        return self.whole.batch_score(outputs, batch)

    def logits(self, outputs: Any) -> tuple[Tensor, ...]:
        """As the task does."""
        return self.whole.logits(outputs)

    def example(self) -> Any:
        """That of the task."""
        return self.whole.example()

    def score(self, model: nn.Module) -> float:
        """As the task does."""
        return self.whole.score(model)


def check_halves(task: Task, batch: int, method: str) -> None:
    """Refuse a task that cannot be cut, and batches that a half does not have samples for."""
    try:
        halves = InTurn.of(task, batch)
    except (InputError, AttributeError) as error:
        raise InputError(
            f"{method} trains weights and shares on different halves of the data ({error}); or halves=false"
        ) from None
    if not halves.size("train"):
        raise InputError(
            f"batch_size {batch} is more than half of the {task.size('train')} training samples of task {task.name}, "
            f"and {method} trains weights and shares on different halves: lower it, or halves=false"
        )
