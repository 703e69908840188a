"""Tensors of files as torch's and back, and files of torch's tensors: whole ones, for networks that run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from bitplan.core.errors import FileError
from bitplan.core.parsing import check_available
from bitplan.weights.opened import open_checkpoint
from bitplan.weights.safetensors import broken, map_with_texts
from bitplan.weights.tensors import DTYPES, Tensor

TorchTensors = dict[str, torch.Tensor]

# safetensors' names of element types → torch's; a type that safetensors lacks goes by torch's name in capitals.
_TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
}  # fmt: skip
_OUR_NAMES = {torch_name: name for name, torch_name in _TORCH_NAMES.items()}


def read_weights(path: Path) -> TorchTensors:
    """The tensors of any file or folder that `open_checkpoint` opens."""
    return _all_as_torch(path, open_checkpoint(path).tensors)


def read_safetensors(path: Path) -> tuple[TorchTensors, dict[str, str]]:
    """The tensors of one safetensors file just as they were written, and the texts in its header."""
    tensors, texts = map_with_texts(path)
    return _all_as_torch(path, tensors), texts


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, texts: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; what prevents it is an OSError.

    The file may be read by whom the user's other files may; safetensors alone gives it to its owner only (mode 0600).
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata=None if texts is None else dict(texts))
    except SafetensorError as error:
        raise OSError(str(error)) from None
    path.chmod(mode)


def hash_of_tensors(tensors: Mapping[str, torch.Tensor], length: int = 16) -> str:
    """A hash of names and values in their order, `length` bytes long, in hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=length)
    for name, tensor in tensors.items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def as_tensor(name: str, value: torch.Tensor) -> Tensor:
    """A torch tensor as ours, sharing its memory where it is contiguous and on the CPU."""
    value = value.detach()
    if value.is_quantized or value.layout != torch.strided:
        raise FileError(f"tensor {name!r} is quantized or sparse; bitplan reads plain float weights")
    torch_name = str(value.dtype).removeprefix("torch.")
    dtype = _OUR_NAMES.get(torch_name, torch_name.upper())
    raw = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return Tensor(name, dtype, tuple(value.shape), raw.view(DTYPES.get(dtype, "u1")))


def as_torch(tensor: Tensor) -> torch.Tensor:
    """One of our tensors as torch's: in memory of its own, unless it is torch's memory already.

    What is mapped is read-only, and torch would end the process where something writes to it.
    """
    kind = _torch_type(tensor)
    assert kind is not None, tensor.dtype
    mapped = not tensor.data.flags.writeable
    flat = torch.from_numpy((tensor.data.copy() if mapped else tensor.data).view("u1"))
    return flat.view(kind).reshape(tensor.shape)


def _torch_type(tensor: Tensor) -> torch.dtype | None:
    """The type of the elements, if torch has it and the bytes are as many as it needs."""
    found = getattr(torch, _TORCH_NAMES.get(tensor.dtype, tensor.dtype.lower()), None)
    fits = isinstance(found, torch.dtype) and found.itemsize * tensor.size == tensor.data.nbytes
    return found if fits else None


def _all_as_torch(path: Path, tensors: Mapping[str, Tensor]) -> TorchTensors:
    for tensor in tensors.values():
        if _torch_type(tensor) is None:
            raise broken(path, f"tensor {tensor.name!r} has the unknown type {tensor.dtype}")
    check_available(path, sum(tensor.data.nbytes for tensor in tensors.values() if not tensor.data.flags.writeable))
    return {name: as_torch(tensor) for name, tensor in tensors.items()}
