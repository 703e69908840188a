"""Second moments of what layers read, H = Σ xxᵀ, as a network runs: seen where functions are given a layer's weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bitplan.quant.blocks import FIRST_AXIS
from bitplan.quant.functions import MULTIPLICATIONS, Arguments, Function, with_operands_in_place
from bitplan.quant.layers import Channels
from bitplan.quant.quantizers import WeightQuantizer

_LAYOUTS = {**dict.fromkeys(("linear", "conv1d", "conv2d"), FIRST_AXIS), "addmm": Channels((1,))}
"""Functions whose inputs are understood, and which axis of their weight numbers the outputs."""
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_AT_ONCE = 1 << 24  # values of patches that are made together


class Enough(Exception):
    """Every layer that was looked for has run."""


class Moments:
    """What one layer read: `total` (parts, inputs, inputs) for groups of convolutions or 1, and how its weight lies."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.layout: Channels | None = None
        self.count = 0

    def add(self, columns: Tensor, layout: Channels) -> None:
        """More of it, (parts, inputs, samples)."""
        wide = columns if columns.dtype == torch.float64 else columns.float()
        seen = (wide @ wide.transpose(1, 2)).double()
        self.total = seen if self.total is None else self.total + seen
        self.layout, self.count = layout, self.count + columns.shape[-1]


class _InputWatch(TorchFunctionMode):
    """Sees functions that are given one of some weights, and adds up the moments of what it is multiplied by."""

    def __init__(self, wanted: Mapping[str, Moments], *, stop: bool) -> None:
        super().__init__()
        self.wanted, self.stop, self.left = wanted, stop, set(wanted)
        self.operands: dict[int, tuple[str, Tensor]] = {}  # what quantizers gave, kept so that no other has its id

    def __torch_function__(
        self, func: Function, kinds: Any, args: Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, about = kwargs or {}, MULTIPLICATIONS.get(func)
        if about is not None and self.operands:
            given, named = with_operands_in_place(about, args, kwargs)
            layer, _ = self.operands.get(id(given[about.second]), (None, None))
            if layer is not None and about.name in _LAYOUTS:
                self._see(layer, about.name, given[about.first], (given, named))
        return func(*args, **kwargs)

    def _see(self, layer: str, name: str, x: Tensor, call: tuple[Arguments, dict[str, Any]]) -> None:
        moments, layout = self.wanted[layer], _LAYOUTS[name]
        with torch._C.DisableTorchFunction():
            if name.startswith("conv"):
                for columns in _patches(x, dict(zip(_CONVOLUTION, call[0], strict=False)) | call[1]):
                    moments.add(columns, layout)
            else:
                moments.add(x.reshape(1, -1, x.shape[-1]).transpose(1, 2), layout)
        self.left.discard(layer)
        if self.stop and not self.left:
            self.left = set(self.wanted)  # of the next run
            raise Enough

    def note(self, layer: str, module: nn.Module, args: Any, out: Tensor) -> None:
        """Remember a weight that a quantizer hands out."""
        self.operands[id(out)] = (layer, out)


@contextmanager
def watching(quantizers: Mapping[str, WeightQuantizer], *, stop: bool = False) -> Iterator[dict[str, Moments]]:
    """The moments of what these layers read until the block ends; with `stop` a run ends once all of them have run."""
    found = {layer: Moments() for layer in quantizers}
    watch = _InputWatch(found, stop=stop)
    hooks = [one.register_forward_hook(partial(watch.note, layer)) for layer, one in quantizers.items()]
    try:
        with watch:
            yield found
    finally:
        for hook in hooks:
            hook.remove()


def _patches(x: Tensor, call: Mapping[str, Any]) -> Iterator[Tensor]:
    """What a convolution multiplies by the rows of its weight, some images at a time: (groups, inputs, patches)."""
    weight: Tensor = call["weight"]
    flat = weight.dim() == 3
    kernel = (1, *weight.shape[2:]) if flat else tuple(weight.shape[2:])
    stride, dilation = (_pair(call.get(name, 1), flat, 1) for name in ("stride", "dilation"))
    images = x if x.dim() == weight.dim() else x[None]
    images = images[:, :, None] if flat else images
    images = F.pad(images, _padding(call.get("padding", 0), flat, kernel, dilation))
    groups = call.get("groups", 1)
    each = max(1, _AT_ONCE // max(1, images[0].numel() * kernel[0] * kernel[1]))
    for some in images.split(each):
        columns = F.unfold(some, kernel, dilation, 0, stride)  # (B, channels · kernel, patches)
        yield columns.unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(2)


def _padding(padding: Any, flat: bool, kernel: tuple[int, ...], dilation: tuple[int, int]) -> tuple[int, int, int, int]:
    """Zeros at the left, right, top and bottom, also where a word says how many."""
    if padding == "same":
        rows, columns = (spread * (size - 1) for spread, size in zip(dilation, kernel, strict=True))
        return columns // 2, columns - columns // 2, rows // 2, rows - rows // 2
    rows, columns = (0, 0) if padding == "valid" else _pair(padding, flat, 0)
    return columns, columns, rows, rows


def _pair(value: Any, flat: bool, unused: int) -> tuple[int, int]:
    """Two numbers, of which a convolution in one dimension has no use for the first."""
    numbers = tuple(value) if isinstance(value, tuple | list) else (value,)
    last = int(numbers[-1])
    return (unused if flat else int(numbers[0]), last)
