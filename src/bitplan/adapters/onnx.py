"""onnx: graphs as protocol buffers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from bitplan.adapters.foreign import require
from bitplan.core.errors import FileError, InputError
from bitplan.core.parsing import explain_failures, first_line, limit_memory
from bitplan.store.files import read_bytes

_LARGEST = 2**31  # bytes of a graph as one message


def onnx(purpose: str = "ONNX") -> ModuleType:
    """Import onnx, or say what to install."""
    require("onnx", "export", purpose)
    import onnx as module
    import onnx.checker
    import onnx.helper
    import onnx.numpy_helper

    return module


def read(path: Path) -> Any:
    """Return the model proto in a file with its external data, or raise with the reason in one line."""
    if not path.is_file():
        raise FileError(f"cannot read {path}: there is no such file")
    library = onnx()
    content = _content(path)
    with explain_failures(path, "an ONNX file", "export it again"), limit_memory(path):
        model = library.load_model_from_string(content)
        take_in_external_(model, path)
        library.checker.check_model(model)
    return model


def content_of(model: bytes | Path) -> bytes:
    """Return an ONNX file's content for a runtime, with its external data, so that the runtime reads no other file."""
    if isinstance(model, bytes):
        return model
    content = _content(model)
    try:
        proto = onnx().load_model_from_string(content)
    except Exception:  # the runtime says what is wrong with it
        return content
    return proto.SerializeToString() if take_in_external_(proto, model) else content


def _content(path: Path) -> bytes:
    """Return the bytes of a file, or raise if it is larger than a message of protocol buffers."""
    size = path.stat().st_size if path.is_file() else 0
    if size > _LARGEST:
        raise FileError(f"{path} has {size:,} bytes, and an ONNX file ends at 2 GB: it is cut off or not an ONNX file")
    return read_bytes(path)


def take_in_external_(proto: Any, path: Path) -> bool:
    """Replace references to other files by their data; return True if there were any.

    Such files must lie in the folder of the ONNX file or below it. A path or link that leads elsewhere is refused,
    because private data would get into the output.
    """
    library = onnx()
    away = library.TensorProto.EXTERNAL
    external = [one for one in parts(proto, library.TensorProto) if one.external_data or one.data_location == away]
    taken = 0
    for tensor in external:
        about = {entry.key: entry.value for entry in tensor.external_data}
        with _beside(path, about.get("location", "")).open("rb") as file:
            begin, length = _range(about, os.fstat(file.fileno()).st_size, path)
            taken += length
            if taken > _LARGEST:
                raise FileError(f"{path} takes {taken:,} bytes from other files, and a graph ends at 2 GB")
            file.seek(begin)
            tensor.raw_data = file.read(length)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    return bool(external)


def _beside(path: Path, location: str) -> Path:
    """Return the file of external data, or raise if it is not in the folder of the ONNX file."""
    folder = path.parent.resolve()
    try:
        found = (folder / location).resolve()
        is_there = found.is_file()
    except (OSError, ValueError, RuntimeError):  # a name too long, with a zero in it, or links that go in a circle
        is_there = False
    if not is_there or Path(location).is_absolute() or ".." in Path(location).parts or not found.is_relative_to(folder):
        raise FileError(f"{path} keeps data in {location!r}, which is no file in its own folder: it is not read")
    return found


def _range(about: Mapping[str, str], size: int, path: Path) -> tuple[int, int]:
    """Return the start and length of a tensor's data in a file of that size."""
    try:
        begin = int(about.get("offset", 0))
        length = int(about.get("length", size - begin))
    except ValueError:
        begin = length = -1
    if not 0 <= begin <= begin + length <= size:
        raise FileError(f"{path} keeps data in {about['location']!r} beyond its end ({size:,} bytes): export it again")
    return begin, length


def parts(message: Any, kind: type[Any]) -> Iterator[Any]:
    """Yield every message of a kind inside another, also in bodies of loops, branches and functions."""
    if isinstance(message, kind):
        yield message
        if kind is onnx().TensorProto:  # which holds no other
            return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for one in value if isinstance(value, Sequence) else (value,):
                yield from parts(one, kind)


def by_name(inputs: Mapping[str, np.ndarray] | Sequence[np.ndarray], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the inputs of a graph by name, from a mapping or in order."""
    return dict(inputs) if isinstance(inputs, Mapping) else dict(zip(names, inputs, strict=True))


def checked_bytes(model: Any) -> bytes:
    """Return a model proto as bytes, after onnx's full check of types, shapes and operator versions."""
    library = onnx()
    try:
        library.checker.check_model(model, full_check=True)
    except Exception as error:
        raise InputError(f"onnx's checker refuses the graph: {first_line(error, 300)}") from None
    content: bytes = model.SerializeToString(deterministic=True)
    return content
