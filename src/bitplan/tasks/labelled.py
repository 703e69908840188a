"""What all tasks on labelled images share: how a model is run on them, and how it is measured."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bitplan.adapters.torch import as_floats_of, device_of, inference
from bitplan.core.errors import InputError
from bitplan.tasks.base import Split, Task

T = TypeVar("T")
Labelled = tuple[Tensor, Tensor]
"""Images (B, C, H, W) and their classes (B,), or those of their pixels (B, H, W)."""


class LabelledImages(Task):
    """A frozen dataclass below it has its options as fields; only they travel to another process."""

    higher_is_better = True
    scored_at_once: int

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
        """Run a model on the images of a batch, in the model's own type."""
        return model(as_floats_of(model, batch[0]))

    def logits(self, outputs: Any) -> tuple[Tensor, ...]:
        """Class scores, (B, classes, …): the outputs, or the first of several."""
        return (outputs[0] if isinstance(outputs, tuple) else outputs,)

    def _measured(self, model: nn.Module, measure: Callable[[Tensor, Tensor], T]) -> list[T]:
        """What `measure` makes of class scores and labels, for each batch of the test split."""
        device = device_of(model)
        measured = []
        with inference(model), torch.no_grad():
            for images, labels in self.batches("test", self.scored_at_once):
                batch = images.to(device), labels.to(device)
                measured.append(measure(self.logits(self.forward(model, batch))[0], batch[1]))
        if not measured:
            raise InputError("the test split has no image that can be read, so there is no score: look at the data")
        return measured

    def __getstate__(self) -> dict[str, Any]:
        """Only the options travel to another process; the data is read again there."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
