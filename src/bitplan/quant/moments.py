"""Second moments of the inputs of layers, H = Σ xxᵀ, collected while a network runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bitplan.quant.functions import MULTIPLICATIONS, Arguments, Function, place_operands, replace_arguments
from bitplan.quant.layers import Channels
from bitplan.quant.quantizers import WeightQuantizer
from bitplan.quant.weight_groups import FIRST_AXIS

_LAYOUTS = {**dict.fromkeys(("linear", "conv1d", "conv2d"), FIRST_AXIS), "addmm": Channels((1,))}
"""Functions whose inputs are understood, and which axis of their weight numbers the outputs."""
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_AT_ONCE = 1 << 24  # values of patches that are made together


class Enough(Exception):
    """Raised to end a run when every layer of interest has run."""


class Moments:
    """The moments of one layer's inputs: `total` (parts, inputs, inputs) for groups of convolutions or 1."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.layout: Channels | None = None
        self.count = 0

    def add(self, columns: Tensor, layout: Channels) -> None:
        """Add inputs, (parts, inputs, samples)."""
        wide = columns if columns.dtype == torch.float64 else columns.float()
        seen = (wide @ wide.transpose(1, 2)).double()
        self.total = seen if self.total is None else self.total + seen
        self.layout, self.count = layout, self.count + columns.shape[-1]


class WeightCall(NamedTuple):
    """A function call that gets a layer's weight, with its arguments and the index of the weight among them.

    `weight` is the tensor that the quantizer was given.
    """

    layer: str
    weight: Tensor
    name: str
    function: Function
    args: Arguments
    named: dict[str, Any]
    place: int
    other: int

    def run(self, weight: Tensor | None = None) -> Any:
        """Call the function, with this weight in the place of its own."""
        given = self.args if weight is None else replace_arguments(self.args, {self.place: weight})
        return self.function(*given, **self.named)


class WeightWatch(TorchFunctionMode, ABC):
    """Shows the function calls that get one of some weights from a quantizer."""

    def __init__(self) -> None:
        super().__init__()
        self._operands: dict[int, tuple[str, Tensor, Tensor]] = {}  # what quantizers gave, kept so that ids stay theirs

    @abstractmethod
    def see(self, call: WeightCall) -> None:
        """Handle a weight that is about to be multiplied; functions called here are not shown."""

    @contextmanager
    def watching(self, quantizers: Mapping[str, WeightQuantizer]) -> Iterator[Self]:
        """Watch until the block ends."""
        hooks = [one.register_forward_hook(partial(self._note, layer)) for layer, one in quantizers.items()]
        try:
            with self:
                yield self
        finally:
            self._operands.clear()
            for hook in hooks:
                hook.remove()

    def __torch_function__(
        self, func: Function, kinds: Any, args: Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, about = kwargs or {}, MULTIPLICATIONS.get(func)
        if about is not None and self._operands:
            given, named = place_operands(about, args, kwargs)
            for other, place in about.orders:
                known = self._operands.get(id(given[place])) if place < len(given) else None
                if known is not None:
                    with torch._C.DisableTorchFunction():
                        self.see(WeightCall(known[0], known[1], about.name, func, given, named, place, other))
        return func(*args, **kwargs)

    def _note(self, layer: str, module: nn.Module, args: Any, out: Tensor) -> None:
        """Remember the weight that a quantizer returned, and forget the one before."""
        self._operands = {key: known for key, known in self._operands.items() if known[0] != layer}
        self._operands[id(out)] = (layer, args[0], out)


class _InputWatch(WeightWatch):
    """Adds up the moments of the inputs that weights are multiplied by."""

    def __init__(self, wanted: Mapping[str, Moments], *, stop: bool) -> None:
        super().__init__()
        self.wanted, self.stop, self.left = wanted, stop, set(wanted)

    def see(self, call: WeightCall) -> None:
        """Add the inputs of a function whose inputs are understood."""
        if call.name not in _LAYOUTS:
            return
        moments, layout, x = self.wanted[call.layer], _LAYOUTS[call.name], call.args[call.other]
        if call.name.startswith("conv"):
            for columns in _unfold_patches(x, dict(zip(_CONVOLUTION, call.args, strict=False)) | call.named):
                moments.add(columns, layout)
        else:
            moments.add(x.reshape(1, -1, x.shape[-1]).transpose(1, 2), layout)
        self.left.discard(call.layer)
        if self.stop and not self.left:
            self.left = set(self.wanted)  # of the next run
            raise Enough


@contextmanager
def watching(quantizers: Mapping[str, WeightQuantizer], *, stop: bool = False) -> Iterator[dict[str, Moments]]:
    """Yield the moments of these layers' inputs until the block ends; with `stop` a run ends once all have run."""
    found = {layer: Moments() for layer in quantizers}
    with _InputWatch(found, stop=stop).watching(quantizers):
        yield found


def _unfold_patches(x: Tensor, call: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the patches that a convolution multiplies, some images at a time: (groups, inputs, patches)."""
    weight: Tensor = call["weight"]
    flat = weight.dim() == 3
    kernel = (1, *weight.shape[2:]) if flat else tuple(weight.shape[2:])
    stride, dilation = (_pair(call.get(name, 1), flat, 1) for name in ("stride", "dilation"))
    images = x if x.dim() == weight.dim() else x[None]
    images = images[:, :, None] if flat else images
    images = F.pad(images, _zeros_around(call.get("padding", 0), flat, kernel, dilation))
    groups = call.get("groups", 1)
    each = max(1, _AT_ONCE // max(1, images[0].numel() * kernel[0] * kernel[1]))
    for some in images.split(each):
        columns = F.unfold(some, kernel, dilation, 0, stride)  # (B, channels · kernel, patches)
        yield columns.unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(2)


def _zeros_around(
    padding: Any, flat: bool, kernel: tuple[int, ...], dilation: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Return the zeros at the left, right, top and bottom, also if padding is a word."""
    if padding == "same":
        rows, columns = (spread * (size - 1) for spread, size in zip(dilation, kernel, strict=True))
        return columns // 2, columns - columns // 2, rows // 2, rows - rows // 2
    rows, columns = (0, 0) if padding == "valid" else _pair(padding, flat, 0)
    return columns, columns, rows, rows


def _pair(value: Any, flat: bool, unused: int) -> tuple[int, int]:
    """Return two numbers; a convolution in one dimension does not use the first."""
    numbers = tuple(value) if isinstance(value, tuple | list) else (value,)
    last = int(numbers[-1])
    return (unused if flat else int(numbers[0]), last)
