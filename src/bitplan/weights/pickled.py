"""PyTorch's `.pth`, `.pt`, `.bin` and `.th` files, through the weights-only loader and nothing else."""

from __future__ import annotations

import logging
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from bitplan.adapters.foreign import first_line
from bitplan.core.errors import FileError
from bitplan.weights.refusals import unreadable
from bitplan.weights.tensors import Tensor
from bitplan.weights.torch_tensors import as_tensor

_USUAL = ("state_dict", "model", "model_state_dict")  # where most training scripts keep the network among other ones
_OPTIMIZER = "param_groups"  # what every optimizer's state has
_DEEPEST = 3  # a pickled dict may hold itself
Keys = tuple[Any, ...]
_log = logging.getLogger(__name__)
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
    """The names and tensors of the network in a file, wherever a training script keeps them; the rest is left aside.

    They are the one mapping of names to weights. Of several the one under a usual key is taken, or where all are copies
    of one network (a running average is) the first, and that is said; else the file is refused, with what there is.
    """
    found = _mappings(content, least=2) or _mappings(content, least=0)
    if not found:
        raise FileError(f"{path} holds no state_dict: save the network's with torch.save(model.state_dict(), path)")
    usual = [keys for keys in found if keys and keys[-1] in _USUAL]
    alike = len({_shapes(tensors) for tensors in found.values()}) == 1
    if not usual and not alike:
        where = "".join(f"[{key!r}]" for key in max(found))
        raise FileError(
            f"{path} holds several networks ({_words(found)}): save the one you mean alone, such as "
            f"torch.save(torch.load({str(path)!r}){where}, 'weights.pth')"
        )
    taken = [*usual, *found][0]
    if len(found) > 1:
        others = [keys for keys in found if keys != taken]
        _log.warning("%s holds several networks: that of %s is taken, not %s", path, _words([taken]), _words(others))
    return found[taken]


def _mappings(content: Any, least: int, keys: Keys = ()) -> dict[Keys, dict[str, torch.Tensor]]:
    """The mappings of names to tensors, one of which has so many dimensions, by the keys that lead to them.

    Two dimensions tell a network from what else is kept: means, scores, states of random numbers.
    """
    if not isinstance(content, Mapping) or _OPTIMIZER in content or len(keys) > _DEEPEST:
        return {}
    tensors = {str(name): value for name, value in content.items() if isinstance(value, torch.Tensor)}
    found = {keys: tensors} if any(tensor.dim() >= least for tensor in tensors.values()) else {}
    for key, value in content.items():
        found |= _mappings(value, least, (*keys, key))
    return found


def _shapes(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Size, ...]:
    """Those of the weights, by which copies of one network are known, whatever stands before their names."""
    return tuple(sorted(tensor.shape for tensor in tensors.values() if tensor.dim() > 1))


def _words(found: Iterable[Keys]) -> str:
    return ", ".join(".".join(map(str, keys)) or "its top level" for keys in found)
