"""Describe the tensors of a network, to count the bytes of a target's file before it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from bitplan.adapters.gguf import bytes_in_gguf
from bitplan.core.naming import layer_of, layer_of_quantizer
from bitplan.costs.files import FLOAT_BYTES, FileCost, Unquantized, read_form
from bitplan.weights.opened import OpenedCheckpoint, open_checkpoint
from bitplan.weights.pretrained_folders import is_gguf
from bitplan.weights.tensors import FLOATS
from bitplan.weights.tensors import Tensor as Stored
from bitplan.weights.torch_tensors import as_torch


def file_cost(target: str, network: nn.Module | OpenedCheckpoint | str | Path, source: Path | None = None) -> FileCost:
    """Return the cost that counts the bytes of a target's file: `price(file_cost("gguf", model), graph, choices)`.

    `target` is gguf, vllm, matmulnbits or packed, with options as in "vllm:size=64,zeros=true"; `source` is the GGUF
    file that the network was read from; unquantized tensors keep its types.
    """
    form = read_form(target)
    opened = open_checkpoint(network) if isinstance(network, str | Path) else network
    if not isinstance(opened, nn.Module):
        return FileCost(form, Tensors(_of_file(opened)))
    held = source is not None and source.is_file() and is_gguf(source)
    raw = bytes_in_gguf(source, opened.state_dict()) if source is not None and held else {}
    return FileCost(form, Tensors(_of_module(opened, raw)))


class Tensors(Mapping[str, Unquantized]):
    """The tensors of a network by layer, or by name if they are no layer's weight.

    Each is read when it is asked for, since a checkpoint may be larger than memory.
    """

    def __init__(self, found: dict[str, Callable[[], Unquantized]]) -> None:
        self._found = found

    def __getitem__(self, name: str) -> Unquantized:
        return self._found[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _of_module(model: nn.Module, raw: Mapping[str, int]) -> dict[str, Callable[[], Unquantized]]:
    """Describe the tensors of a model's state, each once."""
    seen: set[tuple[int, torch.Size]] = set()
    found: dict[str, Callable[[], Unquantized]] = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape)
        if layer_of_quantizer(name) is not None:
            continue
        if tensor.numel() and not tensor.is_meta and place in seen:
            continue
        seen.add(place)
        found[layer_of(name)] = partial(_of_tensor, tensor, raw.get(name))
    return found


def _of_tensor(tensor: Tensor, raw: int | None = None) -> Unquantized:
    return Unquantized(tuple(tensor.shape), tensor.element_size(), narrow_of(tensor).itemsize, raw)


def _of_file(opened: OpenedCheckpoint) -> dict[str, Callable[[], Unquantized]]:
    """Describe the float tensors of a file, which are loaded as float32."""
    seen: set[int] = set()
    found: dict[str, Callable[[], Unquantized]] = {}
    for tensor in opened.tensors.values():
        place = tensor.data.ctypes.data if tensor.data.size else id(tensor)
        if tensor.dtype in FLOATS and place not in seen:
            seen.add(place)
            found[layer_of(tensor.name)] = partial(_of_stored, tensor)
    return found


def _of_stored(tensor: Stored) -> Unquantized:
    if tensor.dtype in ("F16", "BF16"):
        return Unquantized(tensor.shape, FLOAT_BYTES, 2)
    return Unquantized(tensor.shape, FLOAT_BYTES, narrow_of(as_torch(tensor).float()).itemsize)


def narrow_of(tensor: Tensor) -> torch.dtype:
    """Return the narrowest type that holds a tensor exactly: float16, bfloat16 or its own."""
    if not tensor.is_floating_point() or tensor.is_meta:
        return tensor.dtype
    exact = (kind for kind in (torch.float16, torch.bfloat16) if torch.equal(tensor.to(kind).to(tensor.dtype), tensor))
    return next(exact, tensor.dtype)
