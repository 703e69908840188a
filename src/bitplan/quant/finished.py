"""Layers whose weights are finished, kept in a folder: a killed run of hours goes on with those that it lacks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.core.store import whole_file
from bitplan.quant.convert import options_of, plan_of
from bitplan.quant.quantizers import WeightQuantizer
from bitplan.weights.torch_tensors import hash_of_tensors, read_safetensors, write_tensors

_WEIGHT, _SHARE, _OF = "weight", "share", "of"


class FinishedLayers:
    """A file for each layer: its weight, its quantizer's tensors, and of what it was made.

    What belongs to another plan, another method or other float weights is not taken. Data is not looked at: begin in
    another folder where it changes.
    """

    def __init__(self, folder: str | Path, model: nn.Module) -> None:
        self.folder = Path(folder)
        self._made_by = f"{plan_of(model).id} {sorted(asdict(options_of(model)).items())}"
        self._float: dict[str, str] = {}

    @torch.no_grad()
    def take_(self, name: str, weight: Tensor, quantizer: WeightQuantizer) -> float | None:
        """Fill a layer as it was kept, and say which part of its error was left; None where it is not there."""
        self._float[name] = f"{self._made_by} {hash_of_tensors({_WEIGHT: weight})}"
        try:
            tensors, texts = read_safetensors(self._path(name))
        except InputError:  # not there, or damaged: it is made again
            return None
        if texts.get(_OF) != self._float[name]:
            return None
        weight.copy_(tensors.pop(_WEIGHT))
        quantizer.load_state_dict(tensors)
        return float(texts[_SHARE])

    def keep(self, name: str, weight: Tensor, quantizer: WeightQuantizer, share: float) -> None:
        """Keep a layer that is finished."""
        tensors = {_WEIGHT: weight, **quantizer.state_dict()}
        with whole_file(self._path(name)) as temporary:
            texts = {_SHARE: repr(share), _OF: self._float[name]}
            write_tensors({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, temporary, texts)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name.replace('/', '_')}.safetensors"
