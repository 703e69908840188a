"""onnx: graphs as protocol buffers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from bitplan.core.errors import FileError, InputError, MissingExtra


def onnx(purpose: str = "ONNX") -> ModuleType:
    """Import onnx, or say what to install."""
    if importlib.util.find_spec("onnx") is None:
        raise MissingExtra("onnx", "export", purpose)
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
        line = str(error).strip().partition("\n")[0][:120]
        raise FileError(f"{path} is cut off or not an ONNX file ({line}): export it again") from None
    return model


def checked_bytes(model: Any) -> bytes:
    """A model proto as a file's content, after onnx's full check: types, shapes and the version of every operator."""
    library = onnx()
    try:
        library.checker.check_model(model, full_check=True)
    except Exception as error:
        line = str(error).strip().partition("\n")[0][:300]
        raise InputError(f"onnx's checker refuses the graph: {line}") from None
    content: bytes = model.SerializeToString(deterministic=True)
    return content
