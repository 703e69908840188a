"""Refuse files that cannot be read, with the reason: packed formats, foreign ones, unreadable files."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

from bitplan.core.errors import FileError
from bitplan.core.parsing import explain_failures
from bitplan.weights.tensors import FLOATS, INTEGERS, Tensor

# The first format whose pattern a name matches; GPTQ and AWQ differ by g_idx and are told apart below.
_MARKS: tuple[tuple[str, str], ...] = (
    ("bitsandbytes", r"\.quant_state\.bitsandbytes__|\.(absmax|quant_map|nested_absmax|SCB|weight_format)$"),
    ("compressed-tensors", r"\.weight_packed$"),
    ("HQQ", r"\.W_q$"),
    ("MXFP4", r"_proj_(blocks|scales)$"),
    ("FP8", r"\.weight_scale_inv$"),
)
# What a file is → how its name usually ends, and where its first bytes tell it as well (from which byte on, which).
_FOREIGN: dict[str, tuple[str, int, bytes]] = {
    "an ONNX file": (".onnx", 2, b"\x12\x07pytorch"),  # behind the version: who wrote it
    "an HDF5 file": (".h5", 0, b"\x89HDF"),
    "a TensorFlow Lite file": (".tflite", 4, b"TFL3"),
    "a Flax file": (".msgpack", 0, b""),
    "a NumPy archive": (".npz", 0, b""),
}
_PRINTED = frozenset(range(32, 127)) | frozenset(b"\t\r\n")  # bytes of plain text
_ADVICE = "give the file of tensors (.safetensors, .pth)"
# What an archive of torch's is → an entry that only it has, and what gives its tensors.
_ARCHIVES = {
    "a TorchScript file": ("/code/", "torch.jit.load({!r}).state_dict()"),
    "a torch.export file": ("/archive_format", "dict(torch.export.load({!r}).state_dict)"),
}


def refuse_packed(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise if the names or the types of the tensors are those of a packed format: nothing is left to measure."""
    if any(name.endswith(".qweight") for name in tensors):
        raise _already_packed(path, "GPTQ" if any(name.endswith(".g_idx") for name in tensors) else "AWQ")
    names = "\n".join(tensors)  # all of them in one search
    for form, pattern in _MARKS:
        if re.search(pattern, names, re.MULTILINE):
            raise _already_packed(path, form)
    for tensor in tensors.values():
        if tensor.name.endswith("weight") and len(tensor.shape) >= 2:
            _refuse_type(path, tensor)


def _refuse_type(path: Path, weight: Tensor) -> None:
    if weight.dtype.startswith(("F8", "FLOAT8")):
        raise _already_packed(path, "FP8")
    if weight.dtype in INTEGERS:
        raise FileError(
            f"{path} stores {weight.name!r} as integers ({weight.dtype}): bitplan starts from float weights, so give "
            "it the checkpoint from before quantization"
        )
    if weight.dtype not in FLOATS:
        raise FileError(f"{path} stores {weight.name!r} as {weight.dtype}; bitplan reads fp64, fp32, fp16 and bf16")


def is_own_packed(texts: Mapping[str, str]) -> bool:
    """Return True if the header of a safetensors file says that bitplan packed it."""
    return "bitplan" in texts and "packed" in texts


def refuse_own_packed(path: Path, texts: Mapping[str, str]) -> None:
    """Raise if bitplan itself packed the file: its codes need the plan beside them."""
    if is_own_packed(texts):
        raise FileError(
            f"{path} is a network that bitplan packed: read it with load_packed, or give the checkpoint that it was "
            "exported from"
        )


def refuse_foreign(path: Path, start: bytes) -> None:
    """Raise if the first bytes or the ending are those of a file that holds no plain tensors."""
    if start[:4] == b"GGUF" or path.suffix == ".gguf":
        raise FileError(
            f"{path} is a GGUF checkpoint, a network with its own configuration: name it as the model itself, or where "
            "weights are asked for give it the checkpoint that this one was made from"
        )
    for form, (ending, place, mark) in _FOREIGN.items():
        if path.suffix == ending or (mark and start[place : place + len(mark)] == mark):
            raise FileError(
                f"{path} is {form}: give the PyTorch model that it was made from, or its weights (.safetensors, .pth)"
            )
    if start[:2] == b"PK":
        _refuse_archive(path)


def refuse_text(path: Path, start: bytes) -> None:
    """Raise if a file is text: JSON, such as a configuration that lies beside weights, or code, or a table."""
    is_json = start.lstrip()[:1] in (b"{", b"[") and b"\0" not in start  # as in the length before safetensors' own
    if is_json:
        raise FileError(
            f"{path} is JSON text, in which there are no weights: give the file of tensors (.safetensors, .pth) or the "
            "index of its parts (.index.json)"
        )
    if start[:2] in (b"\xff\xfe", b"\xfe\xff") or (start and all(byte in _PRINTED for byte in start)):
        advice = "name what builds the network in it, package.module:factory" if path.suffix == ".py" else _ADVICE
        raise FileError(f"{path} is a text file, in which there are no weights: {advice}")


def _refuse_archive(path: Path) -> None:
    try:
        names = [entry.filename for entry in _entries(path)]
    except FileError:  # cut off: who reads it says so
        return
    for form, (mark, tensors) in _ARCHIVES.items():
        if any(mark in name for name in names):
            raise FileError(
                f"{path} is {form}, code and weights in one: give the model's own code, or write its weights alone: "
                f"torch.save({tensors.format(str(path))}, 'weights.pth')"
            )


def check_archive(path: Path) -> None:
    """Refuse an archive whose entries are larger than the file: torch stores them as they are, each once."""
    entries = _entries(path)
    size, unpacked = path.stat().st_size, sum(entry.file_size for entry in entries)
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or unpacked > size:
        raise FileError(
            f"{path} is a compressed archive, {unpacked:,} bytes in {size:,}, which PyTorch does not write: unpack it, "
            "or write it again with torch.save(torch.load(path), path)"
        )


def _entries(path: Path) -> list[zipfile.ZipInfo]:
    """What the directory of an archive lists; no entry is read."""
    with explain_failures(path, "a PyTorch archive", "download or write it again"), zipfile.ZipFile(path) as archive:
        return archive.infolist()


def unreadable(path: Path, error: OSError) -> FileError:
    """What to say of a file that the system does not let us read."""
    missing = isinstance(error, FileNotFoundError)
    return FileError(f"cannot read {path}: {'there is no such file or folder' if missing else error.strerror or error}")


def _already_packed(path: Path, form: str) -> FileError:
    return FileError(
        f"{path} is already quantized and packed, by {form}: bitplan starts from float weights, so "
        "give it the checkpoint that this one was made from"
    )
