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
    """The bytes of each tensor of a file that is whole and can be turned into floats; none is loaded."""
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
    """A value in the header of a GGUF file: its types are those of gguf's, the second one of the members of a list."""

    value: Any
    kinds: tuple[Any, ...]


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as a GGUF file holds it: the name of its type, its rows as bytes, or as floats where it is F32 …"""

    kind: str
    shape: tuple[int, ...]
    data: Any

    @property
    def bytes(self) -> int:
        """How many it takes, without what the next one waits for."""
        return int(self.data.nbytes)


def read_header(path: Path) -> dict[str, Entry]:
    """What a file says of itself, by key; what belongs to its own layout is left out."""
    fields = _opened(path).fields
    return {key: Entry(one.contents(), tuple(one.types)) for key, one in fields.items() if not key.startswith("GGUF.")}


def cut_of(path: Path) -> str | None:
    """llama.cpp's name of how a text is cut before pairs are joined, which no tokenizer.json says by name."""
    found = _opened(path).fields.get("tokenizer.ggml.pre")
    return None if found is None else str(found.contents())


def read_tensors(path: Path) -> dict[str, GgufTensor]:
    """The tensors of a file by their names, mapped."""
    found = {}
    for tensor in _opened(path).tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape.tolist()))
        found[tensor.name] = GgufTensor(tensor.tensor_type.name, shape, tensor.data)
    return found


def floats_of(held: GgufTensor) -> Any:
    """The values of a tensor as float32."""
    import gguf

    return gguf.dequantize(held.data, gguf.GGMLQuantizationType[held.kind]).reshape(held.shape)


def names_in_gguf(architecture: str, blocks: int, names: Iterable[str]) -> dict[str, str]:
    """The names of tensors in a file of that architecture, by those of the network's; what has none is left out."""
    require("gguf", "text", "names of tensors in GGUF files")
    import gguf

    known = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        return {}
    table = gguf.get_tensor_name_map(known[architecture], blocks)
    found = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in names}
    return {name: own for name, own in found.items() if own is not None}


def bytes_in_gguf(path: Path, names: Iterable[str]) -> dict[str, int]:
    """The bytes of tensors in a file, by the names that the network has for them."""
    header, held = read_header(path), read_tensors(path)
    architecture = str(header["general.architecture"].value)
    known = names_in_gguf(architecture, int(header[f"{architecture}.block_count"].value), names)
    return {name: held[own].bytes for name, own in known.items() if own in held}


def text_entry(value: str) -> Entry:
    """A text for a header."""
    import gguf

    return Entry(value, (gguf.GGUFValueType.STRING,))


def entry_of(value: Any) -> Entry:
    """A value for a header: whole numbers have 32 bits without a sign, as llama.cpp wants them."""
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
    """Let what others read of GGUF files by this package take a third of the time; what it gives is the same."""
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
    """gguf's reader, which cuts each word of a tokenizer from the mapped file; from a plain array that is quicker.

    It goes on behind the end of a file, where it finds nothing, as often as the file says: here that is an error.
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
    """The file, mapped; its reader looks at every tensor's place."""
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
    """Refuse a header that says more blocks than there are tensors: names are made for each of them."""
    for key, field in opened.fields.items():
        blocks = field.contents() if key.endswith(".block_count") else 0
        if blocks > len(opened.tensors):
            raise ValueError(f"{key} is {blocks:,}, with {len(opened.tensors)} tensors")
