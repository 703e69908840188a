"""Labelled images: kept as bytes in memory, made into batches, and what all tasks on them share."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.adapters.torch import as_floats_of, device_of, inference
from bitplan.core.errors import FileError, InputError, UnknownName
from bitplan.tasks.base import Split, Task

OnCorrupt = Literal["stop", "skip"]


@dataclass(frozen=True)
class Scale:
    """Bytes to floats: value / `top`, then mean 0 and standard deviation 1 per channel."""

    top: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 (B, C, H, W) → float (B, C, H, W)."""
        mean = torch.tensor(self.mean).view(-1, 1, 1)  # (C, 1, 1)
        std = torch.tensor(self.std).view(-1, 1, 1)
        return pixels.float().div_(self.top).sub_(mean).div_(std)


# Those of ImageNet; the public CIFAR-10 weights were trained with them too.
IMAGENET_SCALE = Scale(255, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Images:
    """uint8 (N, C, H, W) and classes (N,)."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, rows: Sequence[int]) -> Images:
        """Return the images of these rows."""
        return Images(self.pixels[rows], self.labels[rows])


@dataclass(frozen=True)
class Shifts:
    """Shift each image by up to `most` pixels, filled with black; with `mirror`, mirror about half of them."""

    most: int
    mirror: bool

    def __call__(self, pixels: Tensor, generator: torch.Generator) -> Tensor:
        """uint8 (B, C, H, W) → the same shape."""
        count, windows = len(pixels), self._windows(pixels)
        top, left = torch.randint(0, 2 * self.most + 1, (2, count), generator=generator)
        shifted = windows[torch.arange(count), :, top, left]
        if not self.mirror:
            return shifted
        mirrored = torch.rand(count, generator=generator) < 0.5
        return torch.where(mirrored.view(-1, 1, 1, 1), shifted.flip(3), shifted)

    def everywhere(self, images: Images) -> Images:
        """Return each image in all places that it can be shifted to, side by side; none is mirrored."""
        windows = self._windows(images.pixels).permute(0, 2, 3, 1, 4, 5)  # (N, places down, places right, C, H, W)
        places = windows.shape[1] * windows.shape[2]
        return Images(windows.flatten(0, 2), images.labels.repeat_interleave(places))

    def _windows(self, pixels: Tensor) -> Tensor:
        """Return all shifts: (B, C, H, W) → (B, C, 2 most + 1, 2 most + 1, H, W), a view."""
        height, width = pixels.shape[2:]
        return F.pad(pixels, [self.most] * 4).unfold(2, height, 1).unfold(3, width, 1)


def batches_of(
    images: Images, scale: Scale, batch_size: int, seed: int | None = None, augment: Shifts | None = None
) -> Iterator[Labelled]:
    """Yield one pass, the last batch smaller; without a seed in order and not augmented."""
    generator = generator_of(seed)
    for rows in order(len(images), batch_size, generator):
        pixels = images.pixels[rows]
        if augment is not None and generator is not None:
            pixels = augment(pixels, generator)
        yield scale(pixels), images.labels[rows]


def generator_of(seed: int | None) -> torch.Generator | None:
    """Return the generator that shuffles and augments a pass; None without a seed."""
    return None if seed is None else torch.Generator().manual_seed(seed)


def seeds_of(count: int, generator: torch.Generator) -> list[int]:
    """Return one seed per sample; drawn at once, so that the order of reading does not matter."""
    seeds: list[int] = torch.randint(0, 2**62, (count,), generator=generator).tolist()
    return seeds


def order(count: int, batch_size: int, generator: torch.Generator | None) -> tuple[Tensor, ...]:
    """Return the rows of each batch, shuffled if there is a generator."""
    if count == 0:
        return ()  # `split` would make one empty batch of it
    rows = torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
    return rows.split(batch_size)


def check_request(split: str, batch_size: int) -> None:
    """Refuse a split that does not exist, and a batch of nothing."""
    if split not in get_args(Split):
        raise UnknownName("split", split, get_args(Split))
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}: it must be at least 1")


def check_on_corrupt(value: str) -> None:
    """Refuse a word other than stop and skip."""
    if value not in get_args(OnCorrupt):
        raise UnknownName("on_corrupt", value, get_args(OnCorrupt))


def check_counts(task: object, options: tuple[str, ...]) -> None:
    """Refuse an option that is not a whole number of at least 1."""
    for option in options:
        value = getattr(task, option)
        if type(value) is not int or value < 1:
            raise InputError(f"{option} is {value!r}: it must be a whole number of at least 1")


def checked_labels(labels: list[Any], classes: int, source: Path) -> Tensor:
    """Return classes as a tensor; one that is out of range is refused with its place."""
    for row, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < classes:
            raise FileError(
                f"{source}, row {row}: label {label!r} is not one of the {classes} classes 0 … {classes - 1}; "
                "correct the file, or remove the row"
            )
    return torch.tensor(labels, dtype=torch.int64)


# Tasks on labelled images: how a model is run and measured.

T = TypeVar("T")
Labelled = tuple[Tensor, Tensor]
"""Images (B, C, H, W) and their classes (B,), or those of their pixels (B, H, W)."""


class LabelledImages(Task):
    """A task on labelled images: a frozen dataclass, of which only the options travel to another process."""

    higher_is_better = True
    scored_at_once: int

    @abstractmethod
    def example(self) -> Tensor:
        """Return an input for `trace`."""

    @abstractmethod
    def size(self, split: Split) -> int:
        """Return how many samples a split has."""

    @abstractmethod
    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterable[Labelled]:
        """Yield one pass over a split."""

    def forward(self, model: nn.Module, batch: Labelled) -> Any:
        """Run a model on the images of a batch, in the model's own type."""
        return model(as_floats_of(model, batch[0]))

    def logits(self, outputs: Any) -> tuple[Tensor, ...]:
        """Return class scores, (B, classes, …): the outputs, or the first of several."""
        return (outputs[0] if isinstance(outputs, tuple) else outputs,)

    def _measure_batches(self, model: nn.Module, measure: Callable[[Tensor, Tensor], T]) -> list[T]:
        """Return `measure(logits, labels)` for each batch of the test split."""
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
        """Return the options alone; the data is read again in another process."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


Piece = TypeVar("Piece", bound=Sized)
_DRAW = 0  # which samples are held out


class Splits(ABC, Generic[Piece]):
    """The data of both splits, each read once on demand; `_read` returns a list, or an object that has `part`."""

    def size(self, split: Split) -> int:
        """Return how many samples a split has."""
        return len(self._data(split))

    def hold_out(self, share: float) -> tuple[Self, Self]:
        """Return the task without a share of its training samples, and one whose test split is that share."""
        whole: Any = self._data("train")
        parts: list[Any] = [
            [whole[row] for row in rows] if isinstance(whole, list) else whole.part(rows)
            for rows in held_out(len(whole), share)
        ]
        return self._with("train", parts[0]), self._with("test", parts[1])

    @abstractmethod
    def _read(self, split: Split) -> Piece:
        """Read a split from its files."""

    def _data(self, split: Split) -> Piece:
        check_request(split, 1)
        if split not in self._by_split:
            self._by_split[split] = self._read(split)
        return self._by_split[split]

    def _with(self, split: Split, data: Piece) -> Self:
        """Return a copy in which a split holds this data; the other is read on demand."""
        made = copy.copy(self)
        made._by_split[split] = data
        return made

    @cached_property
    def _by_split(self) -> dict[Split, Piece]:
        return {}


def held_out(count: int, share: float) -> tuple[Sequence[int], Sequence[int]]:
    """Return the rows that stay and the rows held out, both in order: at least one of each, drawn once for all."""
    held = max(1, round(share * count))
    if held >= count:
        raise InputError(f"of {count} training samples {held} cannot be held out (held_out = {share:g}): lower it")
    ticket = np.random.RandomState(_DRAW).permutation(count)  # numpy keeps this stream for ever
    return sorted(ticket[held:].tolist()), sorted(ticket[:held].tolist())


def other_split(split: Split) -> Split:
    """Return the other split."""
    return "test" if split == "train" else "train"


class Classification(LabelledImages):
    """An image classification task but its data: a dataclass derived from it brings `example`, `size` and `batches`.

    A model may return its class scores (B, classes), or a tuple that begins with them: torchvision's GoogLeNet and
    Inception do so in training, and their auxiliary scores are left alone.
    """

    metric = "top-1"
    tops: tuple[int, ...] = (1,)
    scored_at_once = 250

    def loss(self, outputs: Any, batch: Labelled) -> Tensor:
        """Return cross-entropy, a mean over the samples."""
        return F.cross_entropy(self.logits(outputs)[0], batch[1])

    def batch_score(self, outputs: Any, batch: Labelled) -> float:
        """Return the percentage of a batch classified right."""
        return 100 * _hits(self.logits(outputs)[0], batch[1], 1) / len(batch[1])

    def score(self, model: nn.Module) -> float:
        """Return the percentage of the test split classified right."""
        return self.scores(model)["top-1"]

    def scores(self, model: nn.Module) -> dict[str, float]:
        """Return the percentage of the test split whose class is among the k best, for each `top-k` of the task."""

        def counts(logits: Tensor, labels: Tensor) -> Tensor:
            return torch.tensor([len(labels), *(_hits(logits, labels, k) for k in self.tops)])

        seen, *hits = torch.stack(self._measure_batches(model, counts)).sum(0).tolist()
        return {f"top-{k}": 100 * count / seen for k, count in zip(self.tops, hits, strict=True)}


def _hits(logits: Tensor, labels: Tensor, k: int) -> int:
    best = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return int((best == labels[:, None]).sum())
