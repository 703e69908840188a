"""Cityscapes: street scenes of 50 cities, 19 of its 34 classes; decoded batch by batch in threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from bitplan.core.errors import FileError
from bitplan.plugins.data.encoded_images import class_folders, read_ahead
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
    seeds_of,
)

_PARTS = {"train": "train", "test": "val"}
_IMAGE = "_leftImg8bit.png"
_CLASSES = {
    "road": 7, "sidewalk": 8, "building": 11, "wall": 12, "fence": 13, "pole": 17, "traffic light": 19,
    "traffic sign": 20, "vegetation": 21, "terrain": 22, "sky": 23, "person": 24, "rider": 25, "car": 26, "truck": 27,
    "bus": 28, "train": 31, "motorcycle": 32, "bicycle": 33,
}  # fmt: skip
"""The classes that count, in the order of their training ids, and their ids (cityscapesScripts, labels.py)."""
_OF_TRAIN_IDS = {**{number: number for number in range(len(_CLASSES))}, VOID: VOID}
_OF_IDS = {**dict.fromkeys(range(34), VOID), **{number: train_id for train_id, number in enumerate(_CLASSES.values())}}
# By the ending of a label, best first: what its values mean.
_LABELS = {
    "_gtFine_labelTrainIds.png": label_table(_OF_TRAIN_IDS),
    "_gtFine_labelIds.png": label_table(_OF_IDS),
}


@final
@dataclass(frozen=True)
class Cityscapes(Splits[list[SceneFiles]], Segmentation):
    """From `leftImg8bit/{train,val}/CITY/*_leftImg8bit.png` and `gtFine/{train,val}/CITY/*_gtFine_labelIds.png`.

    `*_labelTrainIds.png`, where they have been made, are read instead of `*_labelIds.png`. Training scenes, with a
    seed: scaled by `min_scale` to `max_scale`, of that a random `crop` × `crop` square, mirrored half the time; without
    one, and for testing, whole. `size` counts also the scenes that `on_corrupt=skip` leaves out.
    """

    data: str | Path = "data/cityscapes"
    crop: int = 713
    min_scale: float = 0.5
    max_scale: float = 2.0
    height: int = 1024
    width: int = 2048
    on_corrupt: OnCorrupt = "stop"
    workers: int = 4

    name = "cityscapes"
    version = 1
    scored_at_once = 1
    class_names = tuple(_CLASSES)

    def __post_init__(self) -> None:
        check_on_corrupt(self.on_corrupt)
        check_counts(self, ("crop", "height", "width", "workers"))
        self._crops()

    def example(self) -> Tensor:
        """Return one whole scene."""
        return torch.empty(1, 3, self.height, self.width, device="meta")

    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterator[Labelled]:
        """Yield one pass over a split."""
        check_request(split, batch_size)
        crops = self._crops() if split == "train" and seed is not None else None
        return self._decode(self._data(split), batch_size, seed, crops)

    def _crops(self) -> Crops:
        return Crops(self.crop, self.min_scale, self.max_scale)

    def _read(self, split: Split) -> list[SceneFiles]:
        return _find(Path(self.data), _PARTS[split])

    def _decode(
        self, sources: list[SceneFiles], batch_size: int, seed: int | None, crops: Crops | None
    ) -> Iterator[Labelled]:
        generator = generator_of(seed)

        def jobs(rows: list[int]) -> list[partial[Scene | None]]:
            if crops is None or generator is None:
                return [partial(self._scene, sources[row]) for row in rows]
            seeds = seeds_of(len(rows), generator)
            return [partial(self._part, sources[row], crops, own) for row, own in zip(rows, seeds, strict=True)]

        batches = (jobs(rows.tolist()) for rows in order(len(sources), batch_size, generator))
        for read in read_ahead(batches, self.workers):
            scenes = [scene for scene in read if scene is not None]
            if scenes:
                yield batch_of(scenes)

    def _scene(self, source: SceneFiles) -> Scene | None:
        return source.read((self.height, self.width), self.on_corrupt)

    def _part(self, source: SceneFiles, crops: Crops, seed: int) -> Scene | None:
        scene = self._scene(source)
        return None if scene is None else crops(scene, seed)


def _find(folder: Path, part: str) -> list[SceneFiles]:
    """Return every image of a split with its label, by city and name."""
    images, labels = folder / "leftImg8bit" / part, folder / "gtFine" / part
    for root, archive in ((images, "leftImg8bit_trainvaltest.zip"), (labels, "gtFine_trainvaltest.zip")):
        if not root.is_dir():
            raise FileError(
                f"there is no Cityscapes {part} data in {folder}: download {archive} from "
                f"https://www.cityscapes-dataset.com/downloads (after signing in) and unpack it, so that {root} "
                "exists; another folder is given as the option data"
            )
    scenes: list[SceneFiles] = []
    for city in class_folders(images):
        scenes += _of_city(images / city, labels / city)
    if not scenes:
        raise FileError(f"{images} has no image CITY/*{_IMAGE}: unpack leftImg8bit_trainvaltest.zip again")
    return scenes


def _of_city(images: Path, labels: Path) -> Iterator[SceneFiles]:
    there = set(os.listdir(labels)) if labels.is_dir() else set()
    for file in sorted(os.listdir(images)):
        if not file.endswith(_IMAGE):
            continue
        stem = file.removesuffix(_IMAGE)
        ending = next((ending for ending in _LABELS if stem + ending in there), None)
        if ending is None:
            wanted = labels / f"{stem}_gtFine_labelIds.png"
            raise FileError(f"{images / file} has no label: {wanted} is missing, unpack gtFine_trainvaltest.zip again")
        image, label = str(images / file), str(labels / (stem + ending))
        yield SceneFiles(image, label, image, label, _LABELS[ending])
