"""onnx: graphs as protocol buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from bitplan.adapters.foreign import require
from bitplan.core.errors import FileError, InputError
from bitplan.core.memory import bounded
from bitplan.core.parsing import first_line, parsing
from bitplan.core.store import read_bytes


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
    content = read_bytes(path)
    with parsing(path, "an ONNX file", "export it again"), bounded(path):
        model = library.load_model_from_string(content)
        library.checker.check_model(model)
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
