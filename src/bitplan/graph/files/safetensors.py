"""safetensors files by memory map: a header that is checked, tensors that stay on disk."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bitplan.core.errors import FileError
from bitplan.graph.files.tensors import DTYPES, Tensor

_MOST_HEADER = 100_000_000
_MOST_SIZE = 1 << 62


def map_safetensors(path: Path) -> dict[str, Tensor]:
    """Name → tensor, every one a view of the mapped file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header, start = _read_header(path, file.read(8), file.read, size)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from None
    spans = {name: _span(path, name, entry, size - start) for name, entry in header.items()}
    _check_disjoint(path, {name: span[2:] for name, span in spans.items()}, size - start)
    return {name: _view(mapped, name, start, *span) for name, span in spans.items()}


def _read_header(path: Path, prefix: bytes, read: Callable[[int], bytes], size: int) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8:
        raise _broken(path, f"it has {size} bytes, too few for a header")
    if length > _MOST_HEADER:
        raise _broken(path, f"it claims a header of {length:,} bytes; at most {_MOST_HEADER:,} are allowed")
    if 8 + length > size:
        raise _broken(path, f"its header should be {length:,} bytes long, but the file ends after {size:,}")
    try:
        header = json.loads(read(length).decode("utf-8"), object_pairs_hook=lambda pairs: _unique(path, pairs))
    except FileError:
        raise
    except (
        ValueError,
        RecursionError,
    ):  # not UTF-8, not JSON, numbers of thousands of digits, or nested without end
        raise _broken(path, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _broken(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    return header, 8 + length


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _broken(path, f"its header has {twice!r} twice")
    return found


def _span(path: Path, name: str, entry: Any, room: int) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape, first and last byte of a tensor, believed only where they agree."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _broken(path, f"tensor {name!r} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise _broken(path, f"tensor {name!r} has no type")
    if not _naturals(shape) or math.prod(shape) > _MOST_SIZE:
        raise _broken(path, f"tensor {name!r} has the impossible shape {str(shape)[:60]}")
    if not _naturals(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= room:
        raise _broken(path, f"tensor {name!r} lies at {str(offsets)[:60]}, outside the {room:,} bytes of data")
    if dtype in DTYPES and math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize != offsets[1] - offsets[0]:
        shown = "×".join(map(str, shape))
        raise _broken(path, f"tensor {name!r} ({dtype}, {shown}) has {offsets[1] - offsets[0]:,} bytes of data")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_disjoint(path: Path, spans: dict[str, tuple[int, int]], room: int) -> None:
    ordered = sorted((begin, end, name) for name, (begin, end) in spans.items() if begin < end)
    for (_, end, name), (begin, _, other) in pairwise(ordered):
        if begin < end:
            raise _broken(path, f"tensors {name!r} and {other!r} overlap")


def _view(mapped: mmap.mmap, name: str, start: int, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> Tensor:
    kind = np.dtype(DTYPES.get(dtype, "u1"))
    data = np.frombuffer(mapped, np.uint8, end - begin, start + begin).view(kind)
    return Tensor(name, dtype, shape, data, _releaser(mapped, start + begin, kind.itemsize))


def _releaser(mapped: mmap.mmap, origin: int, width: int) -> Callable[[int, int], None] | None:
    """Let pages that lie wholly in a span of elements leave memory, so that use stays bounded."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return None

    def release(start: int, stop: int) -> None:
        first = -(-(origin + start * width) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (origin + stop * width) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            mapped.madvise(mmap.MADV_DONTNEED, first, last - first)

    return release


def _broken(path: Path, what: str) -> FileError:
    return FileError(f"{path} is not a whole safetensors file: {what}. Download or write it again.")
