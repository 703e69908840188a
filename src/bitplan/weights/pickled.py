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

from bitplan.core.errors import FileError
from bitplan.core.parsing import check_room, explain_failures, limit_memory
from bitplan.weights.refusals import check_archive
from bitplan.weights.tensors import Tensor
from bitplan.weights.torch_tensors import as_tensor

_USUAL = ("state_dict", "model", "model_state_dict")  # where most training scripts keep the network among other ones
_OPTIMIZER = "param_groups"  # what every optimizer's state has
_DEEPEST = 3
_EXPECTED = ("a PyTorch file", "download or write it again")
Keys = tuple[Any, ...]
_log = logging.getLogger(__name__)
# How torch's loader names what a pickle asks for, before the name itself.
_MARKS = ("Unsupported global: GLOBAL ", "Trying to load unsupported GLOBAL ", "Unsupported class ")


def load_pickled(path: Path) -> dict[str, Tensor]:
    """Return the tensors by name; a zip archive is mapped, the older format loaded whole."""
    with explain_failures(path, *_EXPECTED):
        tensors = _state_dict(path, _load(path))
        _check_sizes(path, tensors)
        return {name: as_tensor(name, value) for name, value in tensors.items()}


def read_pickle(path: Path) -> Any:
    """Return all of a file, not only tensors, such as a plan in a checkpoint of Lightning's."""
    with explain_failures(path, *_EXPECTED):
        return _load(path)


def _load(path: Path) -> Any:
    zipped = zipfile.is_zipfile(path)
    if zipped:
        check_archive(path)
    try:
        with warnings.catch_warnings(), limit_memory(path):  # a pickle can multiply what it holds
            warnings.simplefilter("ignore", UserWarning)  # on pickle protocols: it loads, or is refused below
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True if zipped else None)
    except pickle.UnpicklingError as error:
        wanted = _wanted(str(error))
        if not wanted and not zipped and not _is_pickle(path):
            raise FileError(f"{path} is no PyTorch file: give one of weights (.safetensors, .pth)") from None
        raise FileError(
            f"{path} wants to run code when it is read, so it is refused{wanted}: save only its "
            "state_dict (torch.save(model.state_dict(), path)) or write it as safetensors"
        ) from None


def _is_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1) == pickle.PROTO


def _check_sizes(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that are larger than the file: a shape may repeat one number without end."""
    storages: dict[int, int] = {}
    need = 0
    for name, tensor in tensors.items():
        name.encode()  # half a character cannot be written again
        if tensor.is_meta:
            raise FileError(f"{path}: tensor {name!r} has a shape and no values: save the network's weights")
        if tensor.layout != torch.strided or tensor.is_nested:  # as_tensor refuses it
            continue
        if tensor.is_contiguous():
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        else:
            need += tensor.numel() * tensor.element_size()
    check_room(path, need + sum(storages.values()), path.stat().st_size)


def _wanted(message: str) -> str:
    """Return the function or class that a pickle asks for, as torch's loader names it."""
    for line in message.splitlines():
        for mark in _MARKS:
            if mark in line:
                return f" ({line.split(mark, 1)[1].split()[0]})"
    return ""


def _state_dict(path: Path, content: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of the network in a file by name, wherever a training script keeps them.

    They are the only mapping of names to weights. If there are several, the one under a usual key is taken, or the
    first if all are copies of one network (such as a running average), with a warning. Otherwise the file is refused.
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


def _mappings(
    content: Any, least: int, keys: Keys = (), seen: set[int] | None = None
) -> dict[Keys, dict[str, torch.Tensor]]:
    """Return the mappings of names to tensors by the keys that lead to them; one tensor has `least` dimensions.

    Two dimensions tell a network from means, scores and random states. A mapping may hold itself, or another a thousand
    times: each is visited once.
    """
    seen = set() if seen is None else seen
    if not isinstance(content, Mapping) or _OPTIMIZER in content or len(keys) > _DEEPEST or id(content) in seen:
        return {}
    seen.add(id(content))
    tensors = {str(name): value for name, value in content.items() if isinstance(value, torch.Tensor)}
    found = {keys: tensors} if any(tensor.dim() >= least for tensor in tensors.values()) else {}
    for key, value in content.items():
        found |= _mappings(value, least, (*keys, key), seen)
    return found


def _shapes(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Size, ...]:
    """Return the sorted shapes of the weights, which are equal for copies of one network under any names."""
    return tuple(sorted(tensor.shape for tensor in tensors.values() if tensor.dim() > 1))


def _words(found: Iterable[Keys]) -> str:
    return ", ".join(".".join(map(str, keys)) or "its top level" for keys in found)
