"""CIFAR's `data_batch_1` … files. They are pickles, so they are read without running anything they name.

The few names such a file needs are replaced by the stand-ins below, which only keep what they are given; every other
name is refused. Not even numpy's own code runs before shape, type and length have been looked at.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch

from bitplan.core.errors import FileError
from bitplan.core.memory import bounded
from bitplan.core.parsing import parsing
from bitplan.core.store import open_file
from bitplan.tasks.images import Images, checked_labels

_SHAPE = (3, 32, 32)
_LENGTH = 3 * 32 * 32


class _Dtype:
    """Stands for numpy.dtype."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """The byte order, which bytes do not have."""


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
        """The stand-in for a name; one that no batch of images needs is refused."""
        if (module, name) not in _STAND_INS:
            raise FileError(
                f"{self._path} wants to run code when it is read ({module}.{name}), so it is refused: it is not a "
                "CIFAR-10 batch; fetch it again from https://www.cs.toronto.edu/~kriz/cifar.html"
            )
        return _STAND_INS[module, name]


def read_batch(path: Path, classes: int) -> Images:
    """The images and classes of one file."""
    content = _unpickle(path)
    if not isinstance(content, dict):
        raise _foreign(path, f"a {type(content).__name__}, not a dictionary")
    # The names are bytes in files of Python 2, and may be texts in others.
    labels = content.get(b"labels", content.get("labels"))
    data = content.get(b"data", content.get("data"))
    if not isinstance(labels, list) or not isinstance(data, _Array):
        raise _foreign(path, "no labels and data")
    rows = _bytes(data, len(labels))
    if rows is None:
        raise _foreign(path, f"data is not {len(labels)} × {_LENGTH} bytes")
    return Images(torch.from_numpy(rows.reshape(-1, *_SHAPE)), checked_labels(labels, classes, path))


def _bytes(data: _Array, count: int) -> np.ndarray | None:
    """The content of an array if it is uint8 (count, 3072) and complete."""
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
    with parsing(path, "a CIFAR-10 batch", "fetch it again"), bounded(path), open_file(path) as file:
        return _Reader(path, file).load()


def _foreign(path: Path, why: str) -> FileError:
    return FileError(f"{path} is cut off or not a CIFAR-10 batch ({why}): fetch it again")
