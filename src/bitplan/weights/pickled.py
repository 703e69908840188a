"""PyTorch's `.pth`, `.pt`, `.bin` and `.th` files, through the weights-only loader and nothing else."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bitplan.adapters.foreign import first_line
from bitplan.core.errors import FileError
from bitplan.weights.refusals import unreadable
from bitplan.weights.tensors import Tensor
from bitplan.weights.torch_tensors import as_tensor

_NESTED = ("state_dict", "model", "model_state_dict", "net", "module")  # where training scripts keep it
_DEEPEST = 3  # a pickled dict may hold itself
# How torch's loader names what a pickle asks for, before the name itself.
_MARKS = ("Unsupported global: GLOBAL ", "Trying to load unsupported GLOBAL ", "Unsupported class ")


def load_pickled(path: Path) -> dict[str, Tensor]:
    """Name → tensor; a zip archive is mapped, the older format loaded whole."""
    return {name: as_tensor(name, value) for name, value in _state_dict(path, _load(path)).items()}


def _load(path: Path) -> Any:
    try:
        zipped = zipfile.is_zipfile(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # on pickle protocols: it loads, or is refused below
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True if zipped else None)
    except pickle.UnpicklingError as error:
        raise FileError(
            f"{path} wants to run code when it is read, so it is refused{_wanted(str(error))}: save only its "
            "state_dict (torch.save(model.state_dict(), path)) or write it as safetensors"
        ) from None
    except OSError as error:
        raise unreadable(path, error) from None
    except Exception as error:  # torch's reader raises many kinds on a cut-off or foreign file
        line = first_line(error) or type(error).__name__
        raise FileError(f"{path} is cut off or not a PyTorch file ({line}): download or write it again") from None


def _wanted(message: str) -> str:
    """The function or class that a pickle asks for, as torch's loader names it."""
    for line in message.splitlines():
        for mark in _MARKS:
            if mark in line:
                return f" ({line.split(mark, 1)[1].split()[0]})"
    return ""


def _state_dict(path: Path, content: Any) -> dict[str, torch.Tensor]:
    """The names and tensors, also where they are nested under one of the usual keys; other entries are left aside."""
    for _ in range(_DEEPEST + 1):
        if not isinstance(content, Mapping):
            break
        nested = next((content[key] for key in _NESTED if isinstance(content.get(key), Mapping)), None)
        if nested is None:
            tensors = {str(name): value for name, value in content.items() if isinstance(value, torch.Tensor)}
            if tensors:
                return tensors
            break
        content = nested
    raise FileError(f"{path} holds no state_dict: save the network's with torch.save(model.state_dict(), path)")
