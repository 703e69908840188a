"""onnx: graphs as protocol buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from bitplan.adapters.foreign import first_line, require
from bitplan.core.errors import FileError, InputError


def onnx(purpose: str = "ONNX") -> ModuleType:
    """Import onnx, or say what to install."""
    require("onnx", "export", purpose)
    import onnx as module
    import onnx.checker
    import onnx.helper
    import onnx.numpy_helper

    return module


def read(path: Path) -> Any:
    """The model proto in a file; a file of another kind, or cut off, is one line."""
    if not path.is_file():
        raise FileError(f"cannot read {path}: there is no such file")
    library = onnx()
    try:
        model = library.load_model_from_string(path.read_bytes())
        library.checker.check_model(model)
    except Exception as error:  # protobuf's and onnx's own kinds
        raise FileError(f"{path} is cut off or not an ONNX file ({first_line(error)}): export it again") from None
    return model


def by_name(inputs: Mapping[str, np.ndarray] | Sequence[np.ndarray], names: Sequence[str]) -> dict[str, np.ndarray]:
    """The inputs of a graph by their names, given so or in their order."""
    return dict(inputs) if isinstance(inputs, Mapping) else dict(zip(names, inputs, strict=True))


def checked_bytes(model: Any) -> bytes:
    """A model proto as a file's content, after onnx's full check: types, shapes and the version of every operator."""
    library = onnx()
    try:
        library.checker.check_model(model, full_check=True)
    except Exception as error:
        raise InputError(f"onnx's checker refuses the graph: {first_line(error, 300)}") from None
    content: bytes = model.SerializeToString(deterministic=True)
    return content
