"""Integer kernels: uint8 codes times int8 codes, summed in int32, given as float32. They are oneDNN's, inside torch.

Signed codes are handed over as uint8 with zero point 128, which the kernels take off again, also where they pad. A CPU
without instructions for such sums (VNNI, AMX) adds pairs of products up in 16 bits, where they overflow: it is not
asked what it has, but tried on the largest products there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from bitplan.core.errors import InputError
from bitplan.core.parsing import first_line
from bitplan.quant.lsq import is_dense

Kernel = Callable[[Tensor], Tensor]
"""The float input of a layer → its float output, computed from codes; it can be pickled, and never changes."""

_SIGNED_ZERO = 128
_PACKED = "packed"
_SUMS_BELOW = 2**31


class CutOff(NamedTuple):
    """What a convolution cuts off of what it gives out: a function as oneDNN calls it, and its limits."""

    function: str = "none"
    limits: tuple[float, ...] = ()


NOTHING: Final = CutOff()


@dataclass(frozen=True, eq=False)
class Operands:
    """What a layer multiplies: the codes of its weight, in the weight's layout, and those that its input gets.

    `steps` has one step, or one for each output channel; `bias` is added in float32; the input's codes go from `low` to
    `high`, times `step`.
    """

    layer: str
    codes: Tensor
    steps: Tensor
    bias: Tensor | None
    step: float
    low: int
    high: int

    def linear(self) -> LinearKernel | str:
        """Return the kernel of a product with a weight (out, in), or why there is none."""
        return LinearKernel.of(self)

    def convolution(self, **geometry: Any) -> ConvolutionKernel | str:
        """Return the kernel of a convolution, whose options are those of `ConvolutionKernel`, or why there is none."""
        return ConvolutionKernel.of(self, **geometry)

    @property
    def zero_point(self) -> int:
        """The unsigned code of zero."""
        return _SIGNED_ZERO if self.low < 0 else 0

    def encode(self, x: Tensor) -> Tensor:
        """The unsigned codes of an input, in its memory layout."""
        wide = x if x.dtype is torch.float32 else x.float()
        wide = wide if is_dense(wide) else wide.contiguous()
        codes, has_nan = _loops().encode(wide, self.step, self.low, self.high, self.zero_point)
        if has_nan:
            raise InputError(
                f"the input of layer {self.layer!r} has NaN values, which have no integer codes; check the data and "
                "the layers before it"
            )
        return codes


@dataclass(frozen=True, eq=False)
class _Kernel(ABC):
    """What kernels have in common: their weight is packed for the CPU, and packed again after a pickle."""

    operands: Operands

    @classmethod
    def of(cls, operands: Operands, **geometry: Any) -> Self | str:
        """A kernel, or why there is none: what it adds up must fit 32 bits."""
        products = operands.codes[0].numel() if len(operands.codes) else 0
        largest = int(operands.codes.short().abs().amax()) if products else 0  # −128 has no opposite in int8
        if products * largest * (operands.high + operands.zero_point) >= _SUMS_BELOW:
            return f"sums of {products} products may not fit 32 bits"
        return cls(operands, **geometry)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != _PACKED}

    @abstractmethod
    def _pack(self, shape: torch.Size) -> tuple[Any, ...]:
        """What oneDNN is given behind the codes, its weight packed as is best for codes of this shape."""

    def _packed(self, shape: torch.Size) -> tuple[Any, ...]:
        """The same, packed for the shape that came first: right for all, and repacking takes longer."""
        if _PACKED not in vars(self):
            vars(self)[_PACKED] = self._pack(shape)
        packed: tuple[Any, ...] = vars(self)[_PACKED]
        return packed

    @property
    def _steps(self) -> Tensor:
        """The step of every output channel."""
        return self.operands.steps.expand(len(self.operands.codes)).contiguous()

    @property
    def _no_shift(self) -> Tensor:
        """The zero points of the weight's channels."""
        return self.operands.codes.new_zeros(len(self.operands.codes), dtype=torch.int32)


@dataclass(frozen=True, eq=False)
class LinearKernel(_Kernel):
    """x (…, in) → (…, out), for codes (out, in)."""

    def _pack(self, shape: torch.Size) -> tuple[Any, ...]:
        given = self.operands
        weight = torch.ops.onednn.qlinear_prepack(given.codes, None)
        return given.step, given.zero_point, weight, self._steps, self._no_shift, given.bias, 1.0, 0, torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        """Encode and multiply."""
        given = self.operands
        out: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            given.encode(x), *self._packed(x.shape), "none", [], ""
        )
        return out.view(*x.shape[:-1], -1) if x.numel() else out.new_empty(*x.shape[:-1], len(given.codes))


@dataclass(frozen=True, eq=False)
class ConvolutionKernel(_Kernel):
    """x (B, in, …) → (B, out, …) in one, two or three dimensions, for codes (out, in / groups, …).

    What its own zeros cannot do, the input is padded by before: `pad` as F.pad takes it, in that `mode`.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    pad: tuple[int, ...] = ()
    mode: str = "constant"

    @property
    def may_give_nan(self) -> bool:
        """Tell whether a step or bias is not finite: what cuts off would make a number of the NaN that comes of it."""
        given = self.operands
        figures = [given.steps * given.step, *([] if given.bias is None else [given.bias])]
        return not all(one.isfinite().all() for one in figures)

    def scaled(self, scale: Tensor, shift: Tensor) -> Self:
        """The kernel whose output channels are multiplied by these figures, then shifted."""
        given = self.operands
        bias = shift if given.bias is None else shift + given.bias * scale
        steps = (given.steps * scale).float()
        return replace(self, operands=replace(given, steps=steps, bias=bias.float()))

    def _pack(self, shape: torch.Size) -> tuple[Any, ...]:
        given, geometry = self.operands, (self.stride, self.padding, self.dilation, self.groups)
        weight = torch.ops.onednn.qconv_prepack(
            given.codes, self._steps, given.step, given.zero_point, *geometry, list(shape)
        )
        scales = given.step, given.zero_point, weight, self._steps, self._no_shift
        return *scales, given.bias, *geometry, 1.0, 0, torch.float32

    def __call__(self, x: Tensor, cut_off: CutOff = NOTHING) -> Tensor:
        """Pad, encode and convolve, one sample without a batch as well."""
        dimensions = len(self.stride)
        if x.dim() == dimensions + 1:
            return self(x.unsqueeze(0), cut_off).squeeze(0)
        codes = self.operands.encode(F.pad(x, self.pad, self.mode) if self.pad else x)
        out: Tensor = _convolutions()[dimensions](codes, *self._packed(codes.shape), *cut_off, "")
        return out


@cache
def why_not_here() -> str:
    """Why this machine does not compute in integers; empty where it does."""
    try:
        with torch.device("cpu"):  # whatever is the default here
            exact = all(_is_exact(kernel, x) for kernel, x in _largest_products())
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        return f"this build of torch has no integer kernels for this CPU ({first_line(error, 60)})"
    return "" if exact else "this CPU adds 8-bit products up in 16 bits (no VNNI, no AMX), where they overflow"


@cache
def _loops() -> Any:
    """The module of compiled loops, loaded when first used, since it loads numba."""
    from bitplan.quant import numba_loops

    return numba_loops


@cache
def _convolutions() -> dict[int, Any]:
    """The convolution of so many dimensions."""
    kernels = torch.ops.onednn
    every = {1: kernels.qconv1d_pointwise, 2: kernels.qconv2d_pointwise, 3: kernels.qconv3d_pointwise}
    return {dimensions: kernel.default for dimensions, kernel in every.items()}


def _largest_products() -> list[tuple[LinearKernel | ConvolutionKernel, Tensor]]:
    """Kernels of every kind for the largest codes, and inputs of the largest."""
    found: list[tuple[LinearKernel | ConvolutionKernel, Tensor]] = []
    steps = torch.ones(64, dtype=torch.float32)
    for low, high in ((0, 255), (-128, 127)):
        for code in (127, -128):
            alike = Operands("", torch.full((64, 64), code, dtype=torch.int8), steps, None, 1.0, low, high)
            found.append((LinearKernel(alike), torch.full((8, 64), high, dtype=steps.dtype)))
            for width in (1, 3):
                spatial = replace(alike, codes=torch.full((64, 64, width, width), code, dtype=torch.int8))
                kernel = ConvolutionKernel(spatial, (1, 1), (0, 0), (1, 1), 1)
                found.append((kernel, torch.full((1, 64, 8, 8), high, dtype=steps.dtype)))
    return found


def _is_exact(kernel: LinearKernel | ConvolutionKernel, x: Tensor) -> bool:
    """Tell whether the sums of a kernel, whose codes are all alike, are right."""
    codes = kernel.operands.codes
    return bool((kernel(x) == codes[0].double().sum() * kernel.operands.high).all())
