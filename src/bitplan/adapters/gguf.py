"""GGUF files, through llama.cpp's Python package: whether one can be read, and what is in it. Nothing in it is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bitplan.adapters.foreign import require
from bitplan.core.errors import FileError
from bitplan.core.parsing import first_line

_UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")  # as Python says it of an enumeration
_ADVICE = "fetch it again, or give it the checkpoint that this one was made from"


def check_gguf(path: Path) -> None:
    """Refuse a file that is cut off, and tensors of a type that cannot be turned into floats, before any is loaded."""
    require("gguf", "text", f"reading {path}")
    import gguf
    import numpy as np

    for tensor in _opened(path).tensors:
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


def _opened(path: Path) -> Any:
    """The file, mapped; its reader looks at every tensor's place."""
    import gguf

    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # whatever a damaged file makes the parser say
        said = first_line(error) or type(error).__name__
        unknown = _UNKNOWN_TYPE.search(said)
        if unknown:
            raise FileError(
                f"{path} is a GGUF checkpoint with a tensor of type {unknown[1]}, which this gguf package does not "
                "know: upgrade it (pip install -U gguf), or give it the checkpoint that this one was made from"
            ) from None
        raise FileError(f"{path} is a GGUF checkpoint that is cut off or damaged ({said}): {_ADVICE}") from None
