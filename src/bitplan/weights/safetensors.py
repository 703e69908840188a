"""safetensors files by memory map: a header that is checked, tensors that stay on disk."""

from __future__ import annotations

import math
import mmap
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from bitplan.core.errors import FileError
from bitplan.core.parsing import check_room, parse_json
from bitplan.store.files import open_file
from bitplan.weights.refusals import unreadable
from bitplan.weights.tensors import DTYPES, Tensor

_MOST_HEADER = 100_000_000  # bytes, the format's own limit
_MOST_SIZE = 1 << 62  # elements of a tensor
_MOST_AXES = 64  # as many as numpy has
_MOST_READ = 1 << 25  # bytes of a mapped file that may stay in memory when they were read
_KINDS = {name: np.dtype(kind) for name, kind in DTYPES.items()}
_RAW = np.dtype("u1")
_DESCRIBED = frozenset({"dtype", "shape", "data_offsets"})  # what the header must say of a tensor


class _Span(NamedTuple):
    """A tensor as the header describes it: where its bytes lie, counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def map_with_texts(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Name → tensor, every one a view of the mapped file, and the texts that a writer may add to the header."""
    try:
        size = path.stat().st_size
        with open_file(path) as file:
            header, start = _read_header(path, file, size)
            mapped = _Mapped(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise unreadable(path, error) from None
    texts = _texts(header.pop("__metadata__", None))
    spans = [_span(path, name, entry, size - start) for name, entry in header.items()]
    _check_disjoint(path, spans)
    return {span.name: _view(mapped, start, span) for span in spans}, texts


def broken(path: Path, what: str) -> FileError:
    """What to say of a file that is no sound safetensors file."""
    return FileError(f"{path} is cut off or not a safetensors file: {what}. Download or write it again.")


def _read_header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The header, and where the data behind it begins. The file starts with the header's length in eight bytes."""
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8:
        raise broken(path, f"it has {size} bytes, too few for a header")
    if length > _MOST_HEADER:
        raise broken(path, f"it claims a header of {length:,} bytes; at most {_MOST_HEADER:,} are allowed")
    if 8 + length > size:
        raise broken(path, f"its header should be {length:,} bytes long, but the file ends after {size:,}")
    check_room(path, 16 * length, size)
    try:
        header = parse_json(file.read(length))
    except FileError as error:
        raise broken(path, f"its header is wrong: {error}") from None
    if not isinstance(header, dict):
        raise broken(path, "its header is not a JSON object")
    return header, 8 + length


def _texts(metadata: Any) -> dict[str, str]:
    """What a header says besides its tensors, as far as it is text."""
    pairs = metadata.items() if isinstance(metadata, dict) else ()
    return {name: value for name, value in pairs if isinstance(value, str)}


def _span(path: Path, name: str, entry: Any, room: int) -> _Span:
    """One entry of the header, believed only where type, shape and offsets agree."""
    if not isinstance(entry, dict) or not entry.keys() >= _DESCRIBED:
        raise broken(path, f"tensor {name!r} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise broken(path, f"tensor {name!r} has no type")
    if not _naturals(shape) or len(shape) > _MOST_AXES or math.prod(filter(None, shape)) > _MOST_SIZE:
        raise broken(path, f"tensor {name!r} has the impossible shape {str(shape)[:60]}")
    if not _naturals(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= room:
        raise broken(path, f"tensor {name!r} lies at {str(offsets)[:60]}, outside the {room:,} bytes of data")
    begin, end = offsets
    kind = _KINDS.get(dtype)
    if kind is not None and math.prod(shape) * kind.itemsize != end - begin:
        shown = "×".join(map(str, shape))
        raise broken(path, f"tensor {name!r} ({dtype}, {shown}) has {end - begin:,} bytes of data")
    return _Span(name, dtype, tuple(shape), begin, end)


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all([type(value) is int and value >= 0 for value in values])


def _check_disjoint(path: Path, spans: list[_Span]) -> None:
    ordered = sorted((span.begin, span.end, span.name) for span in spans if span.begin < span.end)
    for (_, end, name), (begin, _, other) in pairwise(ordered):
        if begin < end:
            raise broken(path, f"tensors {name!r} and {other!r} overlap")


def _view(mapped: _Mapped, start: int, span: _Span) -> Tensor:
    kind = _KINDS.get(span.dtype, _RAW)
    origin, width = start + span.begin, kind.itemsize
    data = np.frombuffer(mapped.pages, kind, (span.end - span.begin) // width, origin)

    def release(first: int, last: int) -> None:
        mapped.done(origin + first * width, origin + last * width)

    return Tensor(span.name, span.dtype, span.shape, data, release)


class _Mapped:
    """A mapped file whose pages leave memory when so many were read that the call to the system is worth it."""

    def __init__(self, pages: mmap.mmap) -> None:
        self.pages = pages
        self._lock = threading.Lock()
        self._read, self._first, self._last = 0, len(pages), 0  # bytes, and between which places, since pages last left

    def done(self, first: int, last: int) -> None:
        """Say that these bytes were read. Pages that another thread still reads may leave too: they come back."""
        with self._lock:
            self._read += last - first
            self._first, self._last = min(self._first, first), max(self._last, last)
            if self._read < _MOST_READ:
                return
            first, last = self._first, self._last
            self._read, self._first, self._last = 0, len(self.pages), 0
        begin, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE  # whole pages
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self.pages.madvise(mmap.MADV_DONTNEED, begin, end - begin)
