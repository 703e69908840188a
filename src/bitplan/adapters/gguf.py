"""GGUF files, through llama.cpp's Python package: read, checked and written. Nothing in them is run."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitplan.adapters.foreign import require
from bitplan.core.errors import FileError
from bitplan.core.parsing import check_available, check_room, first_line

_UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")  # as Python says it of an enumeration
_VALUE = 256  # bytes that the reader takes for a value of an array
_ADVICE = "fetch it again, or give it the checkpoint that this one was made from"


def check_gguf(path: Path) -> list[int]:
    """Return the bytes of each tensor; raise if the file is damaged or has a type that cannot become floats."""
    require("gguf", "text", f"reading {path}")
    import gguf
    import numpy as np

    tensors = _opened(path).tensors
    for tensor in tensors:
        kind = tensor.tensor_type
        _, size = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)
        except (NotImplementedError, ValueError):
            raise FileError(
                f"{path} is a GGUF checkpoint whose tensor {tensor.name!r} is of type {kind.name}, which cannot be "
                "turned into floats here: make one of another type (llama-quantize … F16), or give it the checkpoint "
                "that this one was made from"
            ) from None
    return [int(tensor.n_bytes) for tensor in tensors]


@dataclass(frozen=True)
class Entry:
    """A value in the header of a GGUF file with its gguf types; the second is the type of a list's members."""

    value: Any
    kinds: tuple[Any, ...]


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a GGUF file: the name of its type, its shape, and its rows as bytes, or as floats for F32 …"""

    kind: str
    shape: tuple[int, ...]
    data: Any

    @property
    def bytes(self) -> int:
        """The bytes without padding."""
        return int(self.data.nbytes)


def read_header(path: Path) -> dict[str, Entry]:
    """Return the entries of the header by key, without those of the file's own layout."""
    fields = _opened(path).fields
    return {key: Entry(one.contents(), tuple(one.types)) for key, one in fields.items() if not key.startswith("GGUF.")}


def pre_tokenizer_name(path: Path) -> str | None:
    """Return llama.cpp's name of the pre-tokenizer, which no tokenizer.json has, or None."""
    found = _opened(path).fields.get("tokenizer.ggml.pre")
    return None if found is None else str(found.contents())


def read_tensors(path: Path) -> dict[str, GgufTensor]:
    """Return the mapped tensors of a file by name."""
    found = {}
    for tensor in _opened(path).tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape.tolist()))
        found[tensor.name] = GgufTensor(tensor.tensor_type.name, shape, tensor.data)
    return found


def floats_of(held: GgufTensor) -> Any:
    """Return the values of a tensor as float32."""
    import gguf

    return gguf.dequantize(held.data, gguf.GGMLQuantizationType[held.kind]).reshape(held.shape)


def names_in_gguf(architecture: str, blocks: int, names: Iterable[str]) -> dict[str, str]:
    """Return the names of tensors in GGUF by their names in the network, without those that GGUF lacks."""
    require("gguf", "text", "names of tensors in GGUF files")
    import gguf

    known = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        return {}
    table = gguf.get_tensor_name_map(known[architecture], blocks)
    found = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in names}
    return {name: own for name, own in found.items() if own is not None}


def bytes_in_gguf(path: Path, names: Iterable[str]) -> dict[str, int]:
    """Return the bytes of tensors in a file, by their names in the network."""
    header, held = read_header(path), read_tensors(path)
    architecture = str(header["general.architecture"].value)
    known = names_in_gguf(architecture, int(header[f"{architecture}.block_count"].value), names)
    return {name: held[own].bytes for name, own in known.items() if own in held}


def text_entry(value: str) -> Entry:
    """Return a header entry for a text."""
    import gguf

    return Entry(value, (gguf.GGUFValueType.STRING,))


def entry_of(value: Any) -> Entry:
    """Return a header entry for a value; whole numbers have 32 bits without a sign, as llama.cpp wants."""
    import gguf

    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        inner = kinds.STRING if isinstance(value[0], str) else kinds.INT32
        return Entry(value, (kinds.ARRAY, inner))
    kind = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}[type(value)]
    return Entry(value, (kind,))


def write_gguf(path: Path, header: Mapping[str, Entry], tensors: Mapping[str, GgufTensor]) -> None:
    """Write a file of these entries and tensors."""
    require("gguf", "text", f"writing {path}")
    import gguf

    writer = gguf.GGUFWriter(path, str(header["general.architecture"].value))
    for key, entry in header.items():
        if key != "general.architecture":  # the writer says it itself
            inner = entry.kinds[1] if len(entry.kinds) > 1 else None
            writer.add_key_value(key, entry.value, entry.kinds[0], sub_type=inner)
    for name, held in tensors.items():
        kind = gguf.GGMLQuantizationType[held.kind]
        plain = held.kind in ("F32", "F16")
        writer.add_tensor(name, held.data, raw_shape=None, raw_dtype=None if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextmanager
def quick_gguf() -> Iterator[None]:
    """Make gguf's reader and name map three times as fast inside this block, with the same results."""
    import gguf

    maps = functools.cache(gguf.get_tensor_name_map)  # transformers asks for the same one for every module
    quick = {"GGUFReader": _reader(), "get_tensor_name_map": maps}
    slow = {name: getattr(gguf, name) for name in quick}
    vars(gguf).update(quick)
    try:
        yield
    finally:
        vars(gguf).update(slow)


@functools.cache
def _reader() -> Any:
    """Return gguf's reader on a plain array, from which it slices the words of a tokenizer faster than from a map.

    gguf reads on behind the end of a file as often as the file says: here that is an error.
    """
    import numpy as np
    from gguf import GGUFValueType
    from gguf.gguf_reader import GGUFReader

    class QuickReader(GGUFReader):
        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = np.asarray(mapped)
            self._path = str(mapped.filename)

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            if len(found) < count:
                raise ValueError(f"it says {count} values where its {len(self._plain)} bytes end")
            return found

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == GGUFValueType.ARRAY:
                size, count = len(self._plain), int(self._get(orig_offs + 4, np.uint64)[0])
                if count > size:
                    raise ValueError(f"it says an array of {count:,} values in {size:,} bytes")
                check_room(self._path, _VALUE * count, size)
                check_available(self._path, _VALUE * count)
            return super()._get_field_parts(orig_offs, raw_type)

    return QuickReader


def _opened(path: Path) -> Any:
    """Map a file; the reader checks the place of every tensor."""
    try:
        opened = _reader()(path)
        _check_blocks(opened)
        return opened
    except FileError:
        raise
    except Exception as error:  # whatever a damaged file makes the parser say
        said = first_line(error) or type(error).__name__
        unknown = _UNKNOWN_TYPE.search(said)
        if unknown:
            raise FileError(
                f"{path} is a GGUF checkpoint with a tensor of type {unknown[1]}, which this gguf package does not "
                "know: upgrade it (pip install -U gguf), or give it the checkpoint that this one was made from"
            ) from None
        raise FileError(f"{path} is a GGUF checkpoint that is cut off or damaged ({said}): {_ADVICE}") from None


def _check_blocks(opened: Any) -> None:
    """Raise if the header names more blocks than there are tensors: names are made for each block."""
    for key, field in opened.fields.items():
        blocks = field.contents() if key.endswith(".block_count") else 0
        if blocks > len(opened.tensors):
            raise ValueError(f"{key} is {blocks:,}, with {len(opened.tensors)} tensors")
