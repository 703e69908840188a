"""ImageNet (ILSVRC 2012): 1,000 classes, decoded batch by batch in threads."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from bitplan.core.errors import FileError, InputError
from bitplan.plugins.data import pillow
from bitplan.plugins.data.encoded_images import (
    Encoded,
    class_folders,
    from_folders,
    from_parquet,
    parquet_files,
    read_ahead,
)
from bitplan.tasks.base import Split
from bitplan.tasks.images import (
    IMAGENET_SCALE,
    Classification,
    Labelled,
    OnCorrupt,
    Splits,
    check_counts,
    check_on_corrupt,
    check_request,
    generator_of,
    order,
    other_split,
    seeds_of,
)

_FOLDERS = {"train": "train", "test": "val"}
# Without training images, those for calibration take their place.
_PARQUET = {"train": ("train", "calib"), "test": ("val",)}
View = Callable[["pillow.Image"], np.ndarray]


@final
@dataclass(frozen=True)
class ImageNet(Splits[Encoded], Classification):
    """From class folders `train/` and `val/`, or from parquet files `*train*`, `*calib*` and `*val*.parquet`.

    Test images: the shorter side to `resize`, then the `test_size` square in the middle; one that is such a square
    already is taken as it is. Training images, with a seed: a random part, mirrored half the time, at `train_size`
    (the crop of Szegedy et al. 2015); without one, as test images. `size` counts also the images that `on_corrupt=skip`
    leaves out. Parquet files are kept in memory as they are, encoded: for the whole of ImageNet use the folders.
    """

    data: str | Path = "data/imagenet"
    train_size: int = 160
    test_size: int = 224
    resize: int = 256
    classes: int = 1000
    on_corrupt: OnCorrupt = "stop"
    workers: int = 4

    name = "imagenet"
    version = 1
    tops = (1, 5)
    scored_at_once = 50

    def __post_init__(self) -> None:
        check_on_corrupt(self.on_corrupt)
        check_counts(self, ("train_size", "test_size", "resize", "classes", "workers"))
        if self.resize < self.test_size:
            raise InputError(f"resize is {self.resize}, smaller than test_size, {self.test_size}: raise resize")

    def example(self) -> Tensor:
        """Return one image of the size for testing."""
        return torch.empty(1, 3, self.test_size, self.test_size, device="meta")

    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterator[Labelled]:
        """Yield one pass over a split."""
        check_request(split, batch_size)
        return self._decode(self._data(split), batch_size, seed, augmented=split == "train" and seed is not None)

    def _read(self, split: Split) -> Encoded:
        folder, part = Path(self.data), _FOLDERS[split]
        if (folder / part).is_dir():
            return from_folders(folder / part, _class_names(folder, split, self.classes))
        for word in _PARQUET[split]:
            paths = parquet_files(folder, word, _FOLDERS[other_split(split)])
            if paths:
                return from_parquet(paths, self.classes)
        raise FileError(
            f"there is no ImageNet {part} data in {folder}: download ILSVRC2012_img_{part}.tar from "
            f"https://image-net.org (after signing in) and unpack it into one folder per class below {folder / part}, "
            f"or put parquet files (*{part}*.parquet) into {folder}; another folder is given as the option data"
        )

    def _decode(self, encoded: Encoded, batch_size: int, seed: int | None, *, augmented: bool) -> Iterator[Labelled]:
        generator = generator_of(seed)
        batches = order(len(encoded), batch_size, generator)
        draws = generator if augmented else None
        jobs = (self._jobs(encoded, rows.tolist(), draws) for rows in batches)
        for rows, decoded in zip(batches, read_ahead(jobs, self.workers), strict=True):
            images = {row: pixels for row, pixels in zip(rows.tolist(), decoded, strict=True) if pixels is not None}
            if images:
                yield _batch(images, encoded.labels)

    def _jobs(
        self, encoded: Encoded, rows: list[int], generator: torch.Generator | None
    ) -> list[Callable[[], np.ndarray | None]]:
        views = self._views(len(rows), generator)
        return [partial(encoded.read, row, view, self.on_corrupt) for row, view in zip(rows, views, strict=True)]

    def _views(self, count: int, generator: torch.Generator | None) -> list[View]:
        """Return the view of each image of a batch; drawn here, so that the order of the threads does not matter."""
        if generator is None:
            return [partial(_middle, resize=self.resize, size=self.test_size)] * count
        seeds = seeds_of(count, generator)
        return [partial(_random_part, size=self.train_size, seed=seed) for seed in seeds]


def _batch(decoded: dict[int, np.ndarray], labels: Tensor) -> Labelled:
    """Return a batch of images (H, W, 3) by their rows, with their labels."""
    pixels = torch.from_numpy(np.stack(list(decoded.values()))).permute(0, 3, 1, 2)  # (B, 3, H, W)
    return IMAGENET_SCALE(pixels.contiguous()), labels[list(decoded)]


def _class_names(folder: Path, split: Split, classes: int) -> list[str]:
    """Return the sorted folders of a split: as many as there are classes, and the same in both splits."""
    root = folder / _FOLDERS[split]
    names = class_folders(root)
    if len(names) != classes:
        raise FileError(
            f"{root} has {len(names)} class folders, not {classes}: the images must lie in one folder per class "
            "(n01440764 …; the published val images are not sorted: use valprep.sh), or give the option classes"
        )
    other = folder / _FOLDERS[other_split(split)]
    in_one_only = set(class_folders(other)) ^ set(names) if other.is_dir() else set()
    if in_one_only:
        raise FileError(f"{root} and {other} do not have the same classes: only one of them has {min(in_one_only)}")
    return names


def _middle(image: pillow.Image, resize: int, size: int) -> np.ndarray:
    """Return (size, size, 3): the shorter side resized, then the middle, rounded as torchvision does."""
    width, height = image.size
    if (width, height) == (size, size):
        return pillow.pixels(image)
    short = min(width, height)
    width, height = int(resize * width / short), int(resize * height / short)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return pillow.pixels(pillow.resized(image, (width, height)))[top : top + size, left : left + size]


def _random_part(image: pillow.Image, size: int, seed: int) -> np.ndarray:
    """Return (size, size, 3): 8 to 100 % of the area, sides 3:4 to 4:3, mirrored half the time."""
    draw = random.Random(seed)
    width, height = image.size
    box = (0, 0, width, height)  # where ten draws do not fit
    for _ in range(10):
        area = width * height * draw.uniform(0.08, 1)
        ratio = math.exp(draw.uniform(-math.log(4 / 3), math.log(4 / 3)))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = draw.randint(0, width - across), draw.randint(0, height - down)
            box = (left, top, left + across, top + down)
            break
    part = pillow.pixels(pillow.resized(image, (size, size), box))
    return part[:, ::-1] if draw.random() < 0.5 else part
