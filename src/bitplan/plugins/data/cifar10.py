"""CIFAR-10: 32×32 images of ten classes, decoded once and kept as bytes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, final

import numpy as np
import torch
from torch import Tensor

from bitplan.core.errors import FileError
from bitplan.core.parsing import explain_failures, limit_memory
from bitplan.plugins.data import pillow
from bitplan.plugins.data.encoded_images import from_parquet, parquet_files
from bitplan.store.files import open_file
from bitplan.tasks.base import Split
from bitplan.tasks.images import (
    IMAGENET_SCALE,
    Classification,
    Images,
    Labelled,
    OnCorrupt,
    Shifts,
    Splits,
    batches_of,
    check_on_corrupt,
    check_request,
    checked_labels,
    other_split,
)

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
        """Return one image."""
        return torch.empty(1, 3, 32, 32, device="meta")

    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterator[Labelled]:
        """Yield one pass over a split."""
        check_request(split, batch_size)
        augment = Shifts(4, mirror=True) if split == "train" else None
        return batches_of(self._data(split), IMAGENET_SCALE, batch_size, seed, augment)

    def _read(self, split: Split) -> Images:
        folder = Path(self.data)
        every_batch = [*_BATCHES["train"], *_BATCHES["test"]]
        for place in (folder, folder / _FOLDER):
            if any((place / name).is_file() for name in every_batch):
                return _concatenate([read_batch(place / name, _CLASSES) for name in _BATCHES[split]])
        paths = parquet_files(folder, split, other_split(split))
        if not paths:
            raise FileError(
                f"there is no CIFAR-10 {split} data in {folder}: download "
                f"https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz and unpack it, so that {folder / _FOLDER} "
                f"exists, or put parquet files (*{split}*.parquet) there; another folder is given as the option data"
            )
        return _decode(paths, self.on_corrupt)


def _concatenate(parts: list[Images]) -> Images:
    return Images(torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts]))


def _decode(paths: list[Path], on_corrupt: OnCorrupt) -> Images:
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


# CIFAR's `data_batch_1` … files. They are pickles, so they are read without running anything they name.

_SHAPE = (3, 32, 32)
_LENGTH = 3 * 32 * 32


class _Dtype:
    """Stands for numpy.dtype."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Ignore the byte order, which bytes do not have."""


class _Array:
    """Stands for numpy.ndarray."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _encode(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("a text that is not in latin1")
    return text.encode("latin1")


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,  # how Python 3 writes bytes into the older kind of pickle
}


class _Reader(pickle.Unpickler):
    def __init__(self, path: Path, file: BinaryIO) -> None:
        super().__init__(file, encoding="bytes")
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name; one that no batch of images needs is refused."""
        if (module, name) not in _STAND_INS:
            raise FileError(
                f"{self._path} wants to run code when it is read ({module}.{name}), so it is refused: it is not a "
                "CIFAR-10 batch; fetch it again from https://www.cs.toronto.edu/~kriz/cifar.html"
            )
        return _STAND_INS[module, name]


def read_batch(path: Path, classes: int) -> Images:
    """Return the images and classes of one file."""
    content = _unpickle(path)
    if not isinstance(content, dict):
        raise _format_error(path, f"a {type(content).__name__}, not a dictionary")
    # The names are bytes in files of Python 2, and may be texts in others.
    labels = content.get(b"labels", content.get("labels"))
    data = content.get(b"data", content.get("data"))
    if not isinstance(labels, list) or not isinstance(data, _Array):
        raise _format_error(path, "no labels and data")
    rows = _bytes(data, len(labels))
    if rows is None:
        raise _format_error(path, f"data is not {len(labels)} × {_LENGTH} bytes")
    return Images(torch.from_numpy(rows.reshape(-1, *_SHAPE)), checked_labels(labels, classes, path))


def _bytes(data: _Array, count: int) -> np.ndarray | None:
    """Return the content of an array if it is uint8 (count, 3072) and complete."""
    if not isinstance(data.state, tuple) or len(data.state) != 5:
        return None
    _, shape, dtype, fortran, raw = data.state
    of_bytes = isinstance(dtype, _Dtype) and dtype.code in ("u1", b"u1")
    complete = isinstance(raw, bytes) and len(raw) == count * _LENGTH
    if not of_bytes or shape != (count, _LENGTH) or not count or not complete:
        return None
    order: Literal["F", "C"] = "F" if fortran else "C"
    return np.ascontiguousarray(np.frombuffer(bytearray(raw), dtype=np.uint8).reshape(shape, order=order))


def _unpickle(path: Path) -> Any:
    with explain_failures(path, "a CIFAR-10 batch", "fetch it again"), limit_memory(path), open_file(path) as file:
        return _Reader(path, file).load()


def _format_error(path: Path, why: str) -> FileError:
    return FileError(f"{path} is cut off or not a CIFAR-10 batch ({why}): fetch it again")
