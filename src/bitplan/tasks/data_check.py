"""Look for the data of a task, and report the samples of each split, or the fault, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from bitplan.core.errors import InputError
from bitplan.tasks.base import Split, load_task

PUBLISHED: Mapping[str, Mapping[str, int]] = {
    "digits": {"train": 1_437, "test": 360},
    "cifar10": {"train": 50_000, "test": 10_000},
    "imagenet": {"train": 1_281_167, "test": 50_000},
    "camvid": {"train": 367, "test": 101},
    "cityscapes": {"train": 2_975, "test": 500},
    "squad": {"train": 87_599, "test": 10_570},
}
"""The samples of each split as published: images, scenes, or for SQuAD questions."""


@dataclass(frozen=True)
class SplitFound:
    """One split: its number of samples, or advice if they cannot be read."""

    split: str
    samples: int = 0
    published: int | None = None
    missing: str = ""

    def __str__(self) -> str:
        if self.missing:
            return f"{self.split}: {self.missing}"
        whole = f" of the {self.published:,} published" if self.published not in (None, self.samples) else ""
        return f"{self.split}: {self.samples:,} samples{whole}"


def check_data(name: str, **options: Any) -> list[SplitFound]:
    """Look for both splits of a task's data, and read a first batch of each."""
    return [_look_for_split(name, split, options) for split in get_args(Split)]


def _look_for_split(name: str, split: Split, options: Mapping[str, Any]) -> SplitFound:
    published = PUBLISHED.get(name, {}).get(split)
    task = load_task(name, **options)  # each split by a task of its own: one may be broken, and the other not
    try:
        samples = task.size(split)
        if samples:
            next(iter(task.batches(split, min(2, samples))))
    except InputError as error:
        return SplitFound(split, published=published, missing=str(error))
    if not samples:
        return SplitFound(split, published=published, missing="it is empty: look into the folder")
    return SplitFound(split, samples, published)
