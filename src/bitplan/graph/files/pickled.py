"""PyTorch's `.pth`, `.pt`, `.bin` and `.th` files, through the weights-only loader and nothing else."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bitplan.core.errors import FileError
from bitplan.graph.files.tensors import Tensor

if TYPE_CHECKING:
    import torch

_NESTED = ("state_dict", "model", "model_state_dict", "net", "module")
_PREFIXES = ("module.", "_orig_mod.")


def load_pickled(path: Path) -> dict[str, Tensor]:
    """Name → tensor; a zip archive is mapped, the older format loaded whole."""
    state = _state_dict(path, _load(path))
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return {name: as_tensor(name, value) for name, value in state.items()}


def as_tensor(name: str, value: torch.Tensor) -> Tensor:
    """A torch tensor as ours, sharing its memory where it is contiguous and on the CPU."""
    import torch

    value = value.detach()
    if value.is_quantized or value.layout != torch.strided:
        raise FileError(f"tensor {name!r} is quantized or sparse; bitplan reads plain float weights")
    value = value.cpu().contiguous()
    dtype = _names().get(value.dtype, str(value.dtype).removeprefix("torch.").upper())
    flat = value.view(-1) if value.dim() else value.reshape(1)
    if dtype in ("F16", "BF16"):
        return Tensor(name, dtype, tuple(value.shape), flat.view(torch.int16).numpy().view(np.uint16))
    known = dtype in ("F32", "F64")
    return Tensor(name, dtype, tuple(value.shape), flat.numpy() if known else np.empty(0, np.uint8))


def _names() -> dict[Any, str]:
    import torch

    return {
        torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
        torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
        torch.bool: "BOOL",
    }  # fmt: skip


def _load(path: Path) -> Any:
    import torch

    try:
        zipped = zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True if zipped else None)
    except pickle.UnpicklingError as error:
        wanted = _wanted(str(error))
        raise FileError(
            f"{path} wants to run code when it is opened{wanted}, so it is refused: save only its state_dict "
            "(torch.save(model.state_dict(), path)) or write it as safetensors"
        ) from None
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # torch's reader raises many kinds on a cut-off or foreign file
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileError(f"{path} is not a whole PyTorch checkpoint: {line[:160]}") from None


def _wanted(message: str) -> str:
    for line in message.splitlines():
        for mark in (
            "Unsupported global: GLOBAL ",
            "Trying to load unsupported GLOBAL ",
            "Unsupported class ",
        ):
            if mark in line:
                return f" ({line.split(mark, 1)[1].split()[0]})"
    return ""


def _state_dict(path: Path, loaded: Any) -> dict[str, Any]:
    """The names and tensors, also where they are nested under one of the usual keys."""
    import torch

    for _ in range(3):
        if not isinstance(loaded, Mapping):
            break
        found = {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
        nested = next((loaded[key] for key in _NESTED if isinstance(loaded.get(key), Mapping)), None)
        if nested is None:
            if found:
                return {str(name): value for name, value in found.items()}
            break
        loaded = nested
    raise FileError(f"{path} holds no state_dict: save the network's with torch.save(model.state_dict(), path)")
