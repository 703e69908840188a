"""Layers whose weights are finished, kept in a folder: a killed run of hours goes on with those that it lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class FinishedParts:
    """A file for each part: its tensors, which part of its error was left, and of what it was made.

    What belongs to another plan, method or setting, to other weights anywhere in the network or to other batches is not
    taken: what a part reads depends on all of them. `model` is as it is before its first part is finished.
    """

    def __init__(self, folder: str | Path, model: nn.Module, batches: Sequence[Any], setting: str) -> None:
        self.folder = Path(folder)
        options = sorted(asdict(options_of(model)).items())
        self._made_of = f"{plan_of(model).id} {options} {setting} {_hash(model.state_dict())} {_hash(list(batches))}"

    @torch.no_grad()
    def take_(self, name: str, tensors: Mapping[str, Tensor]) -> float | None:
        """Fill a part's tensors as they were kept, and say which part of its error was left; None: they are not."""
        try:
            kept, texts = read_safetensors(self._path(name))
        except InputError:  # not there, or damaged: it is made again
            return None
        if texts.get(_OF) != self._made_of:
            return None
        for key, tensor in tensors.items():
            tensor.copy_(kept[key])
        return float(texts[_SHARE])

    def keep(self, name: str, tensors: Mapping[str, Tensor], share: float) -> None:
        """Keep a part that is finished."""
        with whole_file(self._path(name)) as temporary:
            texts = {_SHARE: repr(share), _OF: self._made_of}
            write_tensors({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, temporary, texts)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name.replace('/', '_')}.safetensors"


class FinishedLayers(FinishedParts):
    """A file for each layer: its weight and its quantizer's tensors."""

    def take_layer_(self, name: str, weight: Tensor, quantizer: WeightQuantizer) -> float | None:
        """Fill a layer as it was kept."""
        share = self.take_(name, self._tensors(weight, quantizer))
        if share is not None:
            quantizer.load_state_dict(quantizer.state_dict())  # what it leads from them is led again
        return share

    def keep_layer(self, name: str, weight: Tensor, quantizer: WeightQuantizer, share: float) -> None:
        """Keep a layer that is finished."""
        self.keep(name, self._tensors(weight, quantizer), share)

    def _tensors(self, weight: Tensor, quantizer: WeightQuantizer) -> dict[str, Tensor]:
        return {_WEIGHT: weight, **quantizer.state_dict()}


def _hash(tree: Any) -> str:
    """A hash of what is in a tree: tensors by their names, types, shapes and values, and other things as they print."""
    tensors: dict[str, Tensor] = {}
    for number, (path, leaf) in enumerate(tree_leaves_with_path(tree)):
        is_tensor = isinstance(leaf, Tensor)
        said = f"{leaf.dtype} {tuple(leaf.shape)}" if is_tensor else repr(leaf)
        tensors[f"{number} {keystr(path)} {said}"] = leaf if is_tensor else torch.empty(0)
    return hash_of_tensors(tensors)
