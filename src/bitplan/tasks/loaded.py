"""task: a task of what users have, in one line: loaders or datasets, a loss, a score.

Batches are read as in `forward/batches.py`, unless `forward` says otherwise.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from bitplan.adapters.torch import device_of, inference
from bitplan.core.errors import InputError
from bitplan.forward.batches import LABELS, run_batch, split_batch
from bitplan.tasks.base import Batch, Split, Task, samples_in
from bitplan.tasks.samples import Samples, check_disjoint, samples_of
from bitplan.tasks.splits import held_out

_SCORED_AT_ONCE = 64


@dataclass(frozen=True, eq=False, repr=False)
class UserFunction:
    """A function that the user gave; it is told from others by its name and its code."""

    function: Callable[..., Any]

    def __call__(self, *given: Any) -> Any:
        """What it says."""
        return self.function(*given)

    def __repr__(self) -> str:
        code = getattr(self.function, "__code__", None)
        if code is None:
            return repr(self.function) if isinstance(self.function, nn.Module) else type(self.function).__qualname__
        digest = hashlib.sha256(code.co_code + repr(code.co_names).encode()).hexdigest()[:8]
        return f"{self.function.__module__}.{self.function.__qualname__} {digest}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UserFunction) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


@dataclass(frozen=True)
class Loaded(Task):
    """Samples with a loss and a score; `task` makes it, and says what is what."""

    name: str
    metric: str
    higher_is_better: bool
    train: Samples
    test: Samples | None = None
    of_loss: UserFunction | None = None
    of_score: UserFunction | None = None
    run: UserFunction | None = None
    of_answers: UserFunction | None = None
    version = 1

    def example(self) -> Any:
        """The input of one sample."""
        batch = next(iter((self.test or self.train).batches(1, None)))
        positional, keyword, _ = split_batch(batch)
        if keyword:
            return {key: value for key, value in keyword.items() if isinstance(value, Tensor) and key != LABELS}
        return positional[0] if len(positional) == 1 else positional

    def size(self, split: Split) -> int:
        """How many samples a split has."""
        samples = self._of(split)
        return 0 if samples is None else len(samples)

    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterable[Batch]:
        """One pass over a split."""
        if batch_size < 1:
            raise InputError(f"a batch has at least one sample, not {batch_size}")
        samples = self._of(split)
        return () if samples is None else samples.batches(batch_size, seed)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Run a model on a batch, by the user's `forward` if there is one."""
        return run_batch(model, batch) if self.run is None else self.run(model, batch)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """The user's, or the one that the model gives with its outputs."""
        if self.of_loss is None:
            return _own_loss(outputs)
        loss: Any = self.of_loss(outputs, _labels(batch))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"the loss is one number for a batch, a mean over its samples, not {shown}")
        return loss

    def logits(self, outputs: Any) -> tuple[Tensor, ...]:
        """Class scores, classes in dimension 1."""
        return answers_of(outputs) if self.of_answers is None else _as_tuple(self.of_answers(outputs))

    def batch_score(self, outputs: Any, batch: Batch) -> float:
        """The user's score of a batch; without one there is none."""
        return math.nan if self.of_score is None else float(self.of_score(outputs, _labels(batch)))

    def score(self, model: nn.Module) -> float:
        """The mean over the samples of the test split; without a score, of the loss."""
        device, total = device_of(model), 0.0
        with inference(model), torch.no_grad():
            for batch in self.batches("test", _SCORED_AT_ONCE):
                here = tree_map_only(Tensor, lambda leaf: leaf.to(device), batch)
                outputs = self.forward(model, here)
                measured = self.loss(outputs, here) if self.of_score is None else self.batch_score(outputs, here)
                total += float(measured) * samples_in(batch)
        return total / max(1, self.size("test"))

    def hold_out(self, share: float) -> tuple[Self, Self]:
        """The task with a share of its training samples left out, and one whose test split they are."""
        stay, held = held_out(len(self.train), share)
        return replace(self, train=self.train.part(stay)), replace(self, test=self.train.part(held))

    def _of(self, split: Split) -> Samples | None:
        if split not in ("train", "test"):
            raise InputError(f"a task has the splits train and test, not {split!r}")
        return self.train if split == "train" else self.test


def task(
    *,
    train: Any,
    test: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    score: Callable[[Any, Any], Any] | None = None,
    higher_is_better: bool = True,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    answers: Callable[[Any], Any] | None = None,
    name: str = "yours",
) -> Task:
    """A task of data, a loss and a score: what `finetune_`, `evaluate`, `Context(task=…)` and studies take.

    `train` and `test` are each a DataLoader, a Dataset, or batches. Of a loader its dataset, `collate_fn` and workers
    are used; order and size of batches are asked for anew, by seed and recipe. A plain iterable of batches is read
    once and kept in memory, so augmentation stays as it was drawn then, and its batches must be alike in shape.

    `loss(outputs, labels)` is a mean over samples; without it a model's own is taken (`outputs.loss`, as Hugging Face
    models give it for batches with labels). `score(outputs, labels)` is a mean over samples too, better where it is
    higher unless said; without it the loss is the score. `answers(outputs)` gives class scores, classes in dimension 1,
    where `answers_of` would not find them; `forward(model, batch)` runs a model where a batch is read otherwise.
    Functions must be importable (no lambdas) to travel to other processes.
    """
    samples = samples_of(train)
    tested = None if test is None else samples_of(test)
    if tested is not None:
        check_disjoint(samples, tested)
    metric = "loss" if score is None else getattr(score, "__name__", type(score).__name__).replace("<lambda>", "score")
    return Loaded(
        name=name,
        metric=metric,
        higher_is_better=higher_is_better and score is not None,
        train=samples,
        test=tested,
        of_loss=_called(loss),
        of_score=_called(score),
        run=_called(forward),
        of_answers=_called(answers),
    )


def _called(function: Callable[..., Any] | None) -> UserFunction | None:
    return None if function is None else UserFunction(function)


def answers_of(outputs: Any) -> tuple[Tensor, ...]:
    """The class scores among a model's outputs, classes in dimension 1: what distillation and `drift` compare.

    They are the outputs, their first part, or what is called `logits` (or `start_logits` and `end_logits`) there; of
    three dimensions the last one holds the classes, as in language models. One column is the score of yes against no.
    """
    read = outputs.get if isinstance(outputs, Mapping) else lambda key: getattr(outputs, key, None)
    start, end = read("start_logits"), read("end_logits")
    if isinstance(start, Tensor) and isinstance(end, Tensor):
        return start, end
    found = outputs if isinstance(outputs, Tensor) else read("logits")
    if found is None:
        found = next((leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.dim()), None)
    if found is None:
        raise InputError(
            f"no class scores are found in what the model returns ({type(outputs).__name__}): say where they are, "
            "answers=… of bitplan.task"
        )
    scores = found[:, None] if found.dim() == 1 else found.movedim(-1, 1) if found.dim() == 3 else found
    return (torch.cat([scores, torch.zeros_like(scores)], 1) if scores.shape[1] == 1 else scores,)


def _own_loss(outputs: Any) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor):
        raise InputError(
            "the loss of these batches is not known: give loss=…, a function of outputs and labels "
            "(torch.nn.functional.cross_entropy, say), or batches with labels for a model that returns its own loss; "
            "on the command line --task package.module:task, a function that returns bitplan.task(…)"
        )
    return loss.mean()


def _labels(batch: Batch) -> Any:
    labels = split_batch(batch)[2]
    if labels is None:
        raise InputError(
            "the batches have no labels, which the loss and the score are computed with: give pairs of inputs and "
            f"labels, or mappings with {LABELS!r}"
        )
    return labels


def _as_tuple(answers: Any) -> tuple[Tensor, ...]:
    return tuple(answers) if isinstance(answers, tuple | list) else (answers,)
