"""Codes in the blocks of GGUF's types, and back: a row of weights is a row of blocks, each with a float16 step.

type           block      a value is                                     codes
Q8_0           32         d·q                                            −128 … 127
Q5_0, Q4_0     32         d·(q − 16), d·(q − 8)                          −16 … 15, −8 … 7
Q5_1, Q4_1     32         d·q + m                                        the same, with a zero point
TQ2_0          256        d·(q − 1), d negative: step −d, q = 1 − code   −2 … 1
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitplan.costs.files import BLOCKS, BLOCKS_WITH_ZEROS

Bytes = NDArray[np.uint8]
BITS = {kind: bits for table in (BLOCKS, BLOCKS_WITH_ZEROS) for bits, (kind, _, _) in table.items()}
"""Type → the bits of its codes."""
SIZES = {kind: (size, each) for table in (BLOCKS, BLOCKS_WITH_ZEROS) for kind, size, each in table.values()}
"""Type → weights and bytes of a block."""


class Coded(NamedTuple):
    """A weight as codes (rows, row), a step for each, and a zero point for each where there are any."""

    codes: NDArray[np.int8]
    steps: NDArray[np.float32]
    zeros: NDArray[np.float32] | None
    bits: int

    def holds(self, kind: str) -> bool:
        """Whether a type holds it exactly: rows of whole blocks, one step and one zero point in each, float16 both."""
        size, _ = SIZES[kind]
        with_zeros = kind.endswith("_1")
        if BITS[kind] < self.bits or self.codes.shape[1] % size or with_zeros != (self.zeros is not None):
            return False
        each = [self.steps] if self.zeros is None else [self.steps, self.zeros]
        if any((cut(one, size) != cut(one, size)[..., :1]).any() for one in each):
            return False
        steps = cut(self.steps, size)[..., 0]
        if not _is_half(steps):
            return False
        return self.zeros is None or _is_half(self._lowest(size))

    def _lowest(self, size: int) -> NDArray[np.float32]:
        """m of types with zero points: what the code of all zeros stands for."""
        assert self.zeros is not None
        steps, zeros = cut(self.steps, size)[..., 0], cut(self.zeros, size)[..., 0]
        return -(zeros + 2 ** (self.bits - 1)) * steps

    def moved(self, rows: NDArray[np.int64]) -> Coded:
        """The same with its rows in this order."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return Coded(self.codes[rows], self.steps[rows], zeros, self.bits)

    def blocks(self, kind: str) -> Bytes:
        """The bytes of every row."""
        size, _ = SIZES[kind]
        codes, steps = cut(self.codes, size).astype(np.int16), cut(self.steps, size)[..., 0]
        rows = len(codes)
        if kind == "TQ2_0":
            made = np.concatenate([_pairs_of_bits(1 - codes), _half(-steps)], -1)
        elif kind == "Q8_0":
            made = np.concatenate([_half(steps), codes.astype(np.int8).view(np.uint8)], -1)
        else:
            lowest = 2 ** (self.bits - 1) if kind.endswith("_1") else 2 ** (BITS[kind] - 1)
            whole = (codes + lowest).astype(np.uint8)
            parts = [_half(steps)]
            parts += [_half(self._lowest(size))] if kind.endswith("_1") else []
            parts += [_fifth_bits(whole)] if BITS[kind] == 5 else []
            made = np.concatenate([*parts, _nibbles(whole & 15)], -1)
        return made.reshape(rows, -1)


def codes_in(blocks: Bytes, kind: str, bits: int) -> NDArray[np.int8]:
    """The codes in rows of blocks (rows, bytes), of a weight that has so many bits."""
    size, each = SIZES[kind]
    cut_up = blocks.reshape(len(blocks), -1, each)
    if kind == "TQ2_0":
        spread = cut_up[..., : size // 4].reshape(*cut_up.shape[:2], -1, 1, 32) >> _SHIFTS
        found = 1 - (spread & 3).astype(np.int16)
    elif kind == "Q8_0":
        found = cut_up[..., 2:].view(np.int8).astype(np.int16)
    else:
        lowest = 2 ** (bits - 1) if kind.endswith("_1") else 2 ** (BITS[kind] - 1)
        nibbles = cut_up[..., -16:]
        whole = np.concatenate([nibbles & 15, nibbles >> 4], -1).astype(np.int16)
        if BITS[kind] == 5:
            fifth = np.unpackbits(cut_up[..., -20:-16], axis=-1, bitorder="little")
            whole += fifth.astype(np.int16) << 4
        found = whole - lowest
    return found.reshape(len(blocks), -1).astype(np.int8)


_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(4, 1)


def _pairs_of_bits(whole: NDArray[np.int16]) -> Bytes:
    """(…, 256) of 0 to 3 → 64 bytes: four rows of 32 in a byte's pairs of bits, twice."""
    quarters = whole.astype(np.uint8).reshape(*whole.shape[:-1], -1, 4, 32) << _SHIFTS
    joined: Bytes = np.bitwise_or.reduce(quarters, axis=-2).reshape(*whole.shape[:-1], -1)
    return joined


def _nibbles(whole: Bytes) -> Bytes:
    """(…, 32) of 0 to 15 → 16 bytes: the first half low, the second high."""
    joined: Bytes = whole[..., :16] | whole[..., 16:] << np.uint8(4)
    return joined


def _fifth_bits(whole: Bytes) -> Bytes:
    """(…, 32) → the fifth bits in 4 bytes."""
    return np.packbits(whole >> 4, axis=-1, bitorder="little")


def _half(values: NDArray[np.float32]) -> Bytes:
    """(…) → the two bytes of each as float16."""
    return np.ascontiguousarray(values[..., None].astype("<f2")).view(np.uint8)


def _is_half(values: NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16).astype(np.float32) == values).all())


def cut(values: NDArray[Any], size: int) -> NDArray[Any]:
    """(rows, row) → (rows, blocks, size)."""
    return values.reshape(len(values), -1, size)
