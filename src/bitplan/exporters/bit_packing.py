"""Pack codes of b bits without gaps, the first in the lowest bits: four codes of 2 bits per byte."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bitplan.core.errors import InputError

_MOST_BITS = 16
_PIECE = 1 << 20  # codes at a time, a multiple of eight: each piece ends with a whole byte


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes that so many codes take."""
    return (count * bits + 7) // 8


def pack(codes: Tensor, bits: int, *, offset: bool = True) -> Tensor:
    """Signed codes of any shape → uint8 (bytes,), in the order of `codes.flatten()`.

    `offset` stores code + 2^(bits−1), so that the lowest code is all zeros; False stores the two's complement.
    """
    flat = codes.detach().cpu().flatten().numpy().astype(np.int32) + (1 << (bits - 1) if offset else 0)
    pieces = []
    for start in range(0, len(flat), _PIECE):
        piece = flat[start : start + _PIECE, None] >> np.arange(bits) & 1
        pieces.append(np.packbits(piece.astype(np.uint8).ravel(), bitorder="little"))
    return torch.from_numpy(np.concatenate(pieces) if pieces else np.zeros(0, np.uint8))


def unpack(packed: Tensor, bits: int, count: int, *, offset: bool = True) -> Tensor:
    """uint8 (bytes,) → signed codes (count,): int8 up to 8 bits, else int16."""
    if not 1 <= bits <= _MOST_BITS or count < 0 or packed.numel() != packed_bytes(count, bits):
        raise InputError(f"{packed.numel()} bytes do not hold {count} codes of {bits} bits")
    raw, middle = packed.numpy(), 1 << (bits - 1)
    step = packed_bytes(_PIECE, bits)
    codes = np.empty(count, np.int16 if bits > 8 else np.int8)
    for place, start in enumerate(range(0, count, _PIECE)):
        stop = min(start + _PIECE, count)
        piece = raw[place * step : place * step + packed_bytes(stop - start, bits)]
        unpacked = np.unpackbits(piece, count=(stop - start) * bits, bitorder="little").reshape(-1, bits)
        unsigned = unpacked.astype(np.int32) @ (1 << np.arange(bits, dtype=np.int32))
        codes[start:stop] = (unsigned if offset else unsigned ^ middle) - middle
    return torch.from_numpy(codes)
