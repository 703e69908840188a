"""A tensor of a file as bytes that need not be in memory, and how they form rows of output channels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

# safetensors' names of element types → numpy's; bfloat16 and float16 are kept as patterns.
DTYPES: dict[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<u2", "BF16": "<u2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1",
    "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1", "F8_E4M3FNUZ": "u1", "F8_E5M2FNUZ": "u1",
    "C64": "<c8",
}  # fmt: skip
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
INTEGERS = frozenset({"I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8"})

Layout = Literal["out_in", "in_out", "stacked_in_out"]


@dataclass(frozen=True)
class Tensor:
    """A named array, flat and raw: `data` may be a view of a mapped file that `release` lets go of."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[Any]
    release: Callable[[int, int], None] | None = None

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def floats(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """Elements in fp32, in order, aligned; 16-bit ones are widened first."""
        part = self.data[start:stop]
        if self.dtype == "F32":
            if part.dtype == np.float32 and part.flags.aligned and part.flags.c_contiguous:
                return part
            return np.require(part, dtype=np.float32, requirements=["C", "A"])
        if self.dtype == "BF16":
            return (part.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if self.dtype == "F16":
            return np.ascontiguousarray(part).view(np.float16).astype(np.float32)
        with np.errstate(over="ignore"):
            return part.astype(np.float32)

    def done(self, start: int, stop: int) -> None:
        """Say that these elements were read, so that their pages may leave memory."""
        if self.release is not None:
            self.release(start, stop)


@dataclass(frozen=True)
class Rows:
    """How a weight falls into rows, one per output channel: `unit` elements make whole rows of `width`.

    `inner` elements belong to each input: the positions of a convolution's kernel.
    """

    unit: int
    width: int
    inner: int
    shape: tuple[int, ...]
    layout: Layout = "out_in"

    @classmethod
    def of(cls, shape: tuple[int, ...], layout: Layout) -> Rows:
        """Rows of a weight (out, in, …), (in, out, …) or, for stacked experts, (experts, in, out)."""
        if len(shape) < 2:
            size = math.prod(shape)
            return cls(size, size, 1, shape)
        if layout == "stacked_in_out" and len(shape) == 3:
            return cls(shape[1] * shape[2], shape[1], 1, shape, layout)
        inner = math.prod(shape[2:])
        if layout == "in_out":
            return cls(math.prod(shape), shape[0] * inner, inner, shape, layout)
        return cls(shape[1] * inner, shape[1] * inner, inner, shape)

    def arrange(self, part: NDArray[np.float32]) -> NDArray[np.float32]:
        """Flat elements, whole units of them → (rows, width)."""
        if self.layout == "stacked_in_out":
            part = part.reshape(-1, *self.shape[1:]).swapaxes(1, 2)
        elif self.layout == "in_out":
            part = part.reshape(self.shape).swapaxes(0, 1)
        return np.ascontiguousarray(part).reshape(-1, self.width)
