"""Checkpoints that are already quantized and packed, refused by name: nothing is left to measure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from bitplan.core.errors import FileError
from bitplan.graph.files.tensors import FLOATS, INTEGERS, Tensor

# The first format whose pattern a name matches; GPTQ and AWQ differ by g_idx and are told apart below.
_MARKS: tuple[tuple[str, str], ...] = (
    ("bitsandbytes", r"\.quant_state\.bitsandbytes__|\.(absmax|quant_map|nested_absmax|SCB|weight_format)$"),
    ("compressed-tensors", r"\.weight_packed$"),
    ("HQQ", r"\.W_q$"),
    ("MXFP4", r"_proj_(blocks|scales)$"),
    ("FP8", r"\.weight_scale_inv$"),
)


def refuse_packed(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise if the names or the types of the tensors are those of a packed format."""
    if any(name.endswith(".qweight") for name in tensors):
        raise _refusal(path, "GPTQ" if any(name.endswith(".g_idx") for name in tensors) else "AWQ")
    for form, pattern in _MARKS:
        if any(re.search(pattern, name) for name in tensors):
            raise _refusal(path, form)
    for name, tensor in tensors.items():
        if name.endswith("weight") and len(tensor.shape) >= 2:
            if tensor.dtype.startswith(("F8", "FLOAT8")):
                raise _refusal(path, "FP8")
            if tensor.dtype in INTEGERS:
                raise FileError(
                    f"{path} stores {name!r} as integers ({tensor.dtype}): bitplan measures float weights, "
                    "so give it the checkpoint from before quantization"
                )
            if tensor.dtype not in FLOATS:
                raise FileError(f"{path} stores {name!r} as {tensor.dtype}; bitplan reads fp64, fp32, fp16 and bf16")


def refuse_foreign(path: Path, start: bytes) -> None:
    """Raise if the first bytes or the ending are those of a file that holds no plain tensors."""
    if start[:4] == b"GGUF" or path.suffix == ".gguf":
        raise _refusal(path, "GGUF")
    if path.suffix in (".onnx", ".h5", ".msgpack", ".npz", ".tflite"):
        raise FileError(f"{path}: bitplan reads .safetensors and PyTorch checkpoints, not {path.suffix}")


def _refusal(path: Path, form: str) -> FileError:
    return FileError(
        f"{path} is a {form} checkpoint, already quantized and packed: bitplan measures float weights, so "
        "give it the checkpoint that this one was made from"
    )
