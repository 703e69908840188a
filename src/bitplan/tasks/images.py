"""Images in memory as bytes, made into batches: chosen, augmented, and only then turned into floats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from bitplan.core.errors import FileError, InputError, UnknownName
from bitplan.tasks.base import Split
from bitplan.tasks.labelled import Labelled

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
        """Some of them."""
        return Images(self.pixels[rows], self.labels[rows])


@dataclass(frozen=True)
class Shifts:
    """Shift each image by up to `most` pixels, filled with black, and, where `mirror` says so, mirror about half."""

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
        """Each image in all places that it can be shifted to, next to each other; none is mirrored."""
        windows = self._windows(images.pixels).permute(0, 2, 3, 1, 4, 5)  # (N, places down, places right, C, H, W)
        places = windows.shape[1] * windows.shape[2]
        return Images(windows.flatten(0, 2), images.labels.repeat_interleave(places))

    def _windows(self, pixels: Tensor) -> Tensor:
        """(B, C, H, W) → (B, C, 2 most + 1, 2 most + 1, H, W), a view."""
        height, width = pixels.shape[2:]
        return F.pad(pixels, [self.most] * 4).unfold(2, height, 1).unfold(3, width, 1)


def batches_of(
    images: Images, scale: Scale, batch_size: int, seed: int | None = None, augment: Shifts | None = None
) -> Iterator[Labelled]:
    """One pass, the last batch smaller; without a seed in order and not augmented."""
    generator = generator_of(seed)
    for rows in order(len(images), batch_size, generator):
        pixels = images.pixels[rows]
        if augment is not None and generator is not None:
            pixels = augment(pixels, generator)
        yield scale(pixels), images.labels[rows]


def generator_of(seed: int | None) -> torch.Generator | None:
    """What shuffles and augments a pass; without a seed nothing does."""
    return None if seed is None else torch.Generator().manual_seed(seed)


def seeds_of(count: int, generator: torch.Generator) -> list[int]:
    """One seed per sample; drawn at once, so that the order in which they are read does not matter."""
    seeds: list[int] = torch.randint(0, 2**62, (count,), generator=generator).tolist()
    return seeds


def order(count: int, batch_size: int, generator: torch.Generator | None) -> tuple[Tensor, ...]:
    """The rows of each batch, shuffled where there is a generator."""
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
    """Classes as a tensor; one that is out of range is refused with its place."""
    for row, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < classes:
            raise FileError(
                f"{source}, row {row}: label {label!r} is not one of the {classes} classes 0 … {classes - 1}; "
                "correct the file, or remove the row"
            )
    return torch.tensor(labels, dtype=torch.int64)
