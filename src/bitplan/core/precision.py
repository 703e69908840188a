"""How many bits the weights and the input activations of a layer have, as a value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from pydantic import Field, model_serializer, model_validator

from bitplan.core.errors import InputError
from bitplan.core.record import Value

_WRITTEN = re.compile(r"w([0-9]{1,12})a([0-9]{1,12})")
FEWEST_BITS = 2
LEFT_ALONE_BITS = 16
"""So many bits mean: not quantized, as it is."""


@lru_cache(maxsize=256)  # a run of thousands of trials says the same two or three over and over
def _bits(written: str | int) -> tuple[int, int]:
    """Those of weights and of inputs."""
    match = _WRITTEN.fullmatch(f"w{written}a{written}" if str(written).isdecimal() else str(written))
    if match is None:
        raise ValueError(f"a precision is written like w4a4 or w4a16, not {written!r}")
    bits = int(match[1]), int(match[2])
    if not all(FEWEST_BITS <= count <= LEFT_ALONE_BITS for count in bits):
        allowed = f"{FEWEST_BITS} to {LEFT_ALONE_BITS}"
        raise ValueError(f"a precision has {allowed} bits, like w2a2 or w4a16, not {written!r}")
    return bits


class Precision(Value):
    """Bits of a layer's weights and of its input; written "w4a4". `a16` leaves activations alone."""

    weight_bits: int = Field(ge=FEWEST_BITS, le=LEFT_ALONE_BITS)
    act_bits: int = Field(ge=FEWEST_BITS, le=LEFT_ALONE_BITS)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, data: Any) -> Any:
        if isinstance(data, bool) or not isinstance(data, int | str):
            return data
        weight_bits, act_bits = _bits(data)
        return {"weight_bits": weight_bits, "act_bits": act_bits}

    @model_serializer
    def _to_text(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return f"w{self.weight_bits}a{self.act_bits}"

    def __repr__(self) -> str:
        return f"Precision({str(self)!r})"

    @property
    def quantizes_weights(self) -> bool:
        """Whether the weights have codes, or are left alone."""
        return self.weight_bits < LEFT_ALONE_BITS

    @property
    def quantizes_inputs(self) -> bool:
        """Whether the inputs have codes, or are left alone."""
        return self.act_bits < LEFT_ALONE_BITS

    @property
    def left_alone(self) -> bool:
        """Whether nothing of the layer is quantized."""
        return not (self.quantizes_weights or self.quantizes_inputs)

    @classmethod
    def weights_only(cls, bits: int) -> Precision:
        """Weights of so many bits, inputs left alone."""
        return cls(weight_bits=bits, act_bits=LEFT_ALONE_BITS)

    def at_least(self, other: Precision) -> Precision:
        """Return this precision with both fields raised to those of another one where they are lower."""
        return Precision(
            weight_bits=max(self.weight_bits, other.weight_bits), act_bits=max(self.act_bits, other.act_bits)
        )

    def height(self) -> tuple[int, int]:
        """Return a key that sorts precisions by the bits of weights, then of inputs."""
        return self.weight_bits, self.act_bits

    def above(self, other: Precision) -> bool:
        """Tell whether neither field is lower than the other's and one is higher."""
        mine, theirs = (self.weight_bits, self.act_bits), (other.weight_bits, other.act_bits)
        return mine != theirs and mine[0] >= theirs[0] and mine[1] >= theirs[1]

    @classmethod
    def parse(cls, written: PrecisionLike) -> Precision:
        """Read "w4a4", "4", 4 or a Precision."""
        return written if isinstance(written, Precision) else cls.model_validate(written)


PrecisionLike = Precision | str | int
LEFT_ALONE = Precision.weights_only(LEFT_ALONE_BITS)


def parse_choices(written: str | Iterable[PrecisionLike]) -> tuple[Precision, ...]:
    """Read the precisions to choose from: "w2a2,w4a4" or a sequence, ascending."""
    parts: Iterable[PrecisionLike] = (
        [part.strip() for part in written.split(",")] if isinstance(written, str) else written
    )
    choices = tuple(Precision.parse(part) for part in parts)
    problem = why_not_choices(choices)
    if problem:
        raise InputError(problem)
    return choices


def why_not_choices(choices: Sequence[Precision]) -> str | None:
    """Say why these are not choices, or None: at least two, each above the one before."""
    shown = ",".join(map(str, choices))
    if len(choices) < 2:
        return f"at least two precisions are needed to choose from, got {shown or 'none'}"
    for low, high in pairwise(choices):
        if not high.above(low):
            return f"choices must ascend (neither field falls, one rises), but {low} is followed by {high} in {shown}"
    return None
