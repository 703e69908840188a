"""CIFAR-10: 32×32 images of ten classes, decoded once and kept as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from bitplan.adapters import pillow
from bitplan.core.errors import FileError
from bitplan.tasks.base import Split
from bitplan.tasks.batchfile import read_batch
from bitplan.tasks.classification import Classification, Labelled
from bitplan.tasks.encoded import from_parquet, parquet_files
from bitplan.tasks.images import (
    IMAGENET_SCALE,
    Images,
    OnCorrupt,
    Shifts,
    batches_of,
    check_on_corrupt,
    check_request,
)
from bitplan.tasks.splits import Splits, other_split

_CLASSES = 10
_FOLDER = "cifar-10-batches-py"
_BATCHES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}


@final
@dataclass(frozen=True)
class Cifar10(Splits[Images], Classification):
    """From `cifar-10-batches-py` as published, or from parquet files `*train*.parquet` and `*test*.parquet`.

    Training images are shifted by up to 4 pixels and mirrored, each on its own.
    """

    data: str | Path = "data/cifar10"
    on_corrupt: OnCorrupt = "stop"

    name = "cifar10"
    version = 1

    def __post_init__(self) -> None:
        check_on_corrupt(self.on_corrupt)

    def example(self) -> Tensor:
        """One image."""
        return torch.empty(1, 3, 32, 32, device="meta")

    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterator[Labelled]:
        """One pass over a split."""
        check_request(split, batch_size)
        augment = Shifts(4, mirror=True) if split == "train" else None
        return batches_of(self._data(split), IMAGENET_SCALE, batch_size, seed, augment)

    def _read(self, split: Split) -> Images:
        folder = Path(self.data)
        every_batch = [*_BATCHES["train"], *_BATCHES["test"]]
        for place in (folder, folder / _FOLDER):
            if any((place / name).is_file() for name in every_batch):
                return _joined([read_batch(place / name, _CLASSES) for name in _BATCHES[split]])
        paths = parquet_files(folder, split, other_split(split))
        if not paths:
            raise FileError(
                f"there is no CIFAR-10 {split} data in {folder}: download "
                f"https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz and unpack it, so that {folder / _FOLDER} "
                f"exists, or put parquet files (*{split}*.parquet) there; another folder is given as the option data"
            )
        return _decoded(paths, self.on_corrupt)


def _joined(parts: list[Images]) -> Images:
    return Images(torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts]))


def _decoded(paths: list[Path], on_corrupt: OnCorrupt) -> Images:
    encoded = from_parquet(paths, _CLASSES)
    decoded: dict[int, np.ndarray] = {}  # by row; damaged ones are left out
    for row in range(len(encoded)):
        pixels = encoded.read(row, _pixels, on_corrupt)
        if pixels is not None:
            decoded[row] = pixels
    if not decoded:
        raise FileError(f"none of the {len(encoded)} images in {paths[0].parent} can be read: fetch them again")
    stacked = torch.from_numpy(np.stack(list(decoded.values())))  # (N, 32, 32, 3)
    return Images(stacked.permute(0, 3, 1, 2).contiguous(), encoded.labels[list(decoded)])


def _pixels(image: pillow.Image) -> np.ndarray:
    if image.size != (32, 32):
        raise FileError(f"it has {image.size[0]}×{image.size[1]} pixels, not 32×32")
    return pillow.pixels(image)
