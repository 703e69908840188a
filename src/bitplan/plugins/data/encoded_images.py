"""Encoded images: read from class folders or parquet files, and decoded ahead in threads."""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from bitplan.adapters.parquet import read_columns
from bitplan.core.errors import FileError
from bitplan.plugins.data import pillow
from bitplan.tasks.images import OnCorrupt, checked_labels

T = TypeVar("T")
_ENDINGS = (".jpeg", ".jpg", ".png", ".webp", ".bmp")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Encoded:
    """A name for messages, the path or the bytes, and the class of each image."""

    names: Sequence[str]
    sources: Sequence[str | bytes]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, rows: Sequence[int]) -> Encoded:
        """Return the images of these rows."""
        return Encoded([self.names[row] for row in rows], [self.sources[row] for row in rows], self.labels[rows])

    def read(self, row: int, view: Callable[[pillow.Image], T], on_corrupt: OnCorrupt) -> T | None:
        """Return `view(image)`; a damaged image raises, or with "skip" gives None and a warning that names it."""
        return readable(self.names[row], lambda: view(pillow.decode(self.sources[row])), on_corrupt)


def readable(name: str, read: Callable[[], T], on_corrupt: OnCorrupt) -> T | None:
    """Return `read()`; a damaged image raises, or with "skip" gives None and a warning that names it."""
    try:
        return read()
    except FileError as error:
        if on_corrupt == "skip":
            _log.warning("skipped %s: %s", name, error)
            return None
        advice = "fetch it again, or give the option on_corrupt=skip"
        raise FileError(f"the image {name} cannot be read ({error}): {advice}") from None


def parquet_files(folder: Path, word: str, other: str) -> list[Path]:
    """Return the parquet files with a word such as train in their names; refuse one with the other split's too."""
    paths = [path for path in sorted(folder.glob("*.parquet")) if word in _words(path)]
    for path in paths:
        if other in _words(path):
            raise FileError(f"{path} is named for {word} and for {other}: rename it, the two must stay apart")
    return paths


def _words(path: Path) -> list[str]:
    return re.findall("[a-z]+", path.stem.lower())


def from_parquet(paths: Sequence[Path], classes: int) -> Encoded:
    """Read the columns `file`, `label` and `webp` (any format that is read); the encoded bytes stay in memory."""
    names: list[str] = []
    sources: list[bytes] = []
    labels: list[Tensor] = []
    for path in paths:
        columns = read_columns(path, ("file", "label", "webp"))
        names += [f"{file} (row {row} of {path})" for row, file in enumerate(columns["file"])]
        sources += [data or b"" for data in columns["webp"]]
        labels.append(checked_labels(columns["label"], classes, path))
    return Encoded(names, sources, torch.cat(labels))


def from_folders(root: Path, classes: Sequence[str]) -> Encoded:
    """Read one folder per class below the root; the position of its name in `classes` is the label."""
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        with os.scandir(root / name) as entries:
            of_class = sorted(entry.path for entry in entries if entry.name.lower().endswith(_ENDINGS))
        if not of_class:
            raise FileError(f"the class folder {root / name} has no image: unpack it again")
        paths += of_class
        labels += [label] * len(of_class)
    return Encoded(paths, paths, torch.tensor(labels))


def class_folders(root: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


_AHEAD = 2  # batches that are being decoded while one is used


def read_ahead(batches: Iterable[Sequence[Callable[[], T]]], workers: int) -> Iterator[list[T]]:
    """Yield the results of the jobs of each batch, in order; draw random numbers before: threads have no order."""
    waiting = iter(batches)
    with ThreadPoolExecutor(workers) as pool:
        ahead: deque[list[Future[T]]] = deque()
        try:
            while True:
                for jobs in islice(waiting, 1 + _AHEAD - len(ahead)):
                    ahead.append([pool.submit(job) for job in jobs])
                if not ahead:
                    return
                yield [future.result() for future in ahead.popleft()]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
