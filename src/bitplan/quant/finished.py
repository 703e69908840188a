"""Layers whose weights are finished, kept in a folder: a killed run of hours goes on with those that it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from bitplan.core.errors import InputError
from bitplan.core.store import whole_file
from bitplan.quant.convert import options_of, plan_of
from bitplan.quant.quantizers import WeightQuantizer
from bitplan.weights.torch_tensors import hash_of_tensors, read_safetensors, write_tensors

_WEIGHT, _SHARE, _OF = "weight", "share", "of"


class FinishedLayers:
    """A file for each layer: its weight, its quantizer's tensors, and of what it was made.

    What belongs to another plan, method or damping, to other weights anywhere in the network or to other batches is not
    taken: what a layer reads depends on all of them. `model` is as it is before its first layer is finished.
    """

    def __init__(self, folder: str | Path, model: nn.Module, batches: Sequence[Any], damping: float) -> None:
        self.folder = Path(folder)
        options = sorted(asdict(options_of(model)).items())
        self._made_of = f"{plan_of(model).id} {options} {damping!r} {_hash(model.state_dict())} {_hash(list(batches))}"

    @torch.no_grad()
    def take_(self, name: str, weight: Tensor, quantizer: WeightQuantizer) -> float | None:
        """Fill a layer as it was kept, and say which part of its error was left; None where it is not there."""
        try:
            tensors, texts = read_safetensors(self._path(name))
        except InputError:  # not there, or damaged: it is made again
            return None
        if texts.get(_OF) != self._made_of:
            return None
        weight.copy_(tensors.pop(_WEIGHT))
        quantizer.load_state_dict(tensors)
        return float(texts[_SHARE])

    def keep(self, name: str, weight: Tensor, quantizer: WeightQuantizer, share: float) -> None:
        """Keep a layer that is finished."""
        tensors = {_WEIGHT: weight, **quantizer.state_dict()}
        with whole_file(self._path(name)) as temporary:
            texts = {_SHARE: repr(share), _OF: self._made_of}
            write_tensors({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, temporary, texts)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name.replace('/', '_')}.safetensors"


def _hash(tree: Any) -> str:
    """A hash of what is in a tree: tensors by their names, types, shapes and values, and other things as they print."""
    tensors: dict[str, Tensor] = {}
    for number, (path, leaf) in enumerate(tree_leaves_with_path(tree)):
        is_tensor = isinstance(leaf, Tensor)
        said = f"{leaf.dtype} {tuple(leaf.shape)}" if is_tensor else repr(leaf)
        tensors[f"{number} {keystr(path)} {said}"] = leaf if is_tensor else torch.empty(0)
    return hash_of_tensors(tensors)
