"""The bytes of the file that a target runs: codes, steps, zero points and padding, and what is not quantized.

A form says how one target stores the weight of a layer: which codes have a place there, what that place takes, and
which quantizer makes codes for it. `FileCost` is the cost that follows, in bytes (docs/decisions/files-and-budgets.md).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, final

from bitplan.core.budget import FILE
from bitplan.core.errors import InputError, UnknownName
from bitplan.core.option_parsing import read_named
from bitplan.core.precision import LEFT_ALONE_BITS, Precision
from bitplan.core.records import Graph, Layer

FLOAT_BYTES = 4
ALIGNED = 32
"""Tensors of a GGUF file begin at multiples of so many bytes."""
REST = "what is no layer's weight"


@dataclass(frozen=True)
class Unquantized:
    """A tensor of a network as it is: its shape, bytes of a value in memory, and of the narrowest float that holds all.

    `raw` are its bytes in the GGUF file that it was read from.
    """

    shape: tuple[int, ...]
    wide: int = FLOAT_BYTES
    narrow: int = FLOAT_BYTES
    raw: int | None = None

    @property
    def size(self) -> int:
        """How many values it has."""
        return prod(self.shape)


@dataclass(frozen=True)
class Form(ABC):
    """How a target stores weights: a frozen dataclass, whose fields are its options."""

    name: ClassVar[str]
    choices: ClassVar[str] = "w2a16,w4a16,w8a16"
    """What there is to choose from where nothing is said."""
    tables: ClassVar[bool] = True
    """Whether embeddings and the layer behind the last block have codes too, where nothing is said."""

    @property
    @abstractmethod
    def method(self) -> str:
        """The quantizer that makes codes for it, as `quantize` takes it."""

    @abstractmethod
    def place(self, row: int, bits: int) -> int:
        """The bits of the place that codes of so many take in rows of this length; 16 where there is none."""

    @abstractmethod
    def taken(self, rows: int, row: int, bits: int) -> int:
        """Bytes of a weight of so many rows at codes of so many bits, with all that belongs to them."""

    def left(self, tensor: Unquantized) -> int:
        """Bytes of a tensor that has no codes."""
        return tensor.size * tensor.wide

    def why_not(self, row: int) -> str:
        """Say why rows of this length have no place, and what would give them one."""
        return f"{self.name} has no place for codes in rows of {row}"

    @property
    def written(self) -> str:
        """As people write it: the name, and options that differ from the usual."""
        told = [
            f"{one.name}={str(value).lower() if isinstance(value, bool) else value}"
            for one in dataclasses.fields(self)
            if (value := getattr(self, one.name)) != one.default
        ]
        return f"{self.name}:{','.join(told)}" if told else self.name


@dataclass(frozen=True)
class _Grouped(Form):
    """Groups of `size` inputs that share a step, and with `zeros` a zero point each."""

    size: int = 32
    zeros: bool = False

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 1:
            raise InputError(f"{self.name}: size is {self.size!r}, and must be a whole number such as 32, 64 or 128")

    @property
    def method(self) -> str:
        """Groups of that size."""
        return f"groups:size={self.size}" + (",zeros=true" if self.zeros else "")

    def groups(self, row: int) -> int:
        """How many a row has; the last may be shorter."""
        return -(-row // self.size)


BLOCKS = {2: ("TQ2_0", 256, 66), 4: ("Q4_0", 32, 18), 5: ("Q5_0", 32, 22), 8: ("Q8_0", 32, 34)}
"""Bits → the type of GGUF that holds such codes, the weights of a block and its bytes."""
BLOCKS_WITH_ZEROS = BLOCKS | {4: ("Q4_1", 32, 20), 5: ("Q5_1", 32, 24)}


@final
@dataclass(frozen=True)
class GgufForm(Form):
    """llama.cpp's blocks: Q8_0, Q5_0, Q4_0, and TQ2_0 where rows are multiples of 256; `zeros` takes Q4_1 and Q5_1."""

    name: ClassVar[str] = "gguf"
    zeros: bool = False

    @property
    def blocks(self) -> Mapping[int, tuple[str, int, int]]:
        """Bits → type, weights of a block, bytes of a block."""
        return BLOCKS_WITH_ZEROS if self.zeros else BLOCKS

    @property
    def method(self) -> str:
        """Its own."""
        return "gguf:zeros=true" if self.zeros else "gguf"

    def place(self, row: int, bits: int) -> int:
        """The narrowest type whose blocks fill rows of this length."""
        fitting = [wide for wide, (_, size, _) in self.blocks.items() if wide >= bits and row % size == 0]
        return fitting[0] if fitting else LEFT_ALONE_BITS

    def taken(self, rows: int, row: int, bits: int) -> int:
        """Whole blocks, and what the next tensor waits for."""
        _, size, each = self.blocks[self.place(row, bits)]
        return aligned(rows * (row // size) * each)

    def left(self, tensor: Unquantized) -> int:
        """As in the file that it comes from; vectors are float32, as llama.cpp wants them."""
        if len(tensor.shape) < 2:
            return aligned(tensor.size * FLOAT_BYTES)
        return aligned(tensor.size * tensor.narrow if tensor.raw is None else tensor.raw)

    def why_not(self, row: int) -> str:
        """Blocks have 32."""
        return f"blocks of gguf have 32 weights, of which rows of {row} are no multiple"


@final
@dataclass(frozen=True)
class VllmForm(_Grouped):
    """compressed-tensors, packed: words of 32 bits, float16 steps, zero points packed across rows."""

    name: ClassVar[str] = "vllm"
    choices: ClassVar[str] = "w4a16,w8a16"
    tables: ClassVar[bool] = False
    size: int = 128

    @property
    def method(self) -> str:
        """Groups whose steps are float16."""
        return f"{super().method},half=true"

    def place(self, row: int, bits: int) -> int:
        """Any bits up to 8, in rows of whole groups."""
        return bits if bits <= 8 and row % self.size == 0 else LEFT_ALONE_BITS

    def taken(self, rows: int, row: int, bits: int) -> int:
        """Codes in words, steps, zero points, and the shape in two words of 64 bits."""
        zeros = words(rows * bits) * self.groups(row) if self.zeros else 0
        return rows * words(row * bits) + rows * self.groups(row) * 2 + zeros + 16

    def left(self, tensor: Unquantized) -> int:
        """In the narrowest float that holds it."""
        return tensor.size * tensor.narrow

    def why_not(self, row: int) -> str:
        """Groups are whole."""
        sizes = [size for size in (128, 64, 32, 16) if row % size == 0]
        take = f": take --target vllm:size={sizes[0]}" if sizes else ""
        return f"groups have {self.size} weights, of which rows of {row} are no multiple{take}"


@final
@dataclass(frozen=True)
class MatMulForm(_Grouped):
    """ONNX Runtime's MatMulNBits: blocks of 16, 32, 64 … inputs, filled up; float32 steps, packed zero points."""

    name: ClassVar[str] = "matmulnbits"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 16 or self.size & (self.size - 1):
            raise InputError(f"{self.name}: a block is 16, 32, 64, 128 … inputs, not {self.size}")

    def place(self, row: int, bits: int) -> int:
        """2, 4 or 8 bits."""
        return next((wide for wide in (2, 4, 8) if wide >= bits), LEFT_ALONE_BITS)

    def taken(self, rows: int, row: int, bits: int) -> int:
        """Blocks, steps and zero points."""
        wide, groups = self.place(row, bits), self.groups(row)
        zeros = rows * -(-groups * wide // 8) if self.zeros else 0
        return rows * groups * (self.size * wide // 8 + FLOAT_BYTES) + zeros


@final
@dataclass(frozen=True)
class PackedForm(_Grouped):
    """bitplan's own file: codes without gaps, steps and zero points float32; `size` 0 is one step a weight (LSQ)."""

    name: ClassVar[str] = "packed"
    size: int = 64

    def __post_init__(self) -> None:
        if self.size or self.zeros:
            super().__post_init__()

    @property
    def method(self) -> str:
        """Groups, or LSQ."""
        return super().method if self.size else "lsq"

    def place(self, row: int, bits: int) -> int:
        """Exactly as many bits."""
        return bits

    def taken(self, rows: int, row: int, bits: int) -> int:
        """Codes, steps and zero points."""
        steps = rows * self.groups(row) * (2 if self.zeros else 1) if self.size else 1
        return -(-rows * row * bits // 8) + steps * FLOAT_BYTES


FORMS: dict[str, type[Form]] = {form.name: form for form in (GgufForm, VllmForm, MatMulForm, PackedForm)}
"""The targets that `--target` names."""


def aligned(size: int) -> int:
    """Bytes of a tensor in a GGUF file, up to where the next one may begin."""
    return -(-size // ALIGNED) * ALIGNED


def words(bits: int) -> int:
    """The bytes of whole words of 32 bits that hold so many."""
    return -(-bits // 32) * 4


def read_form(written: str) -> Form:
    """The form of a target as people write it: "gguf", "vllm:size=64,zeros=true"."""
    name, options = read_named(written, "--target")
    if name not in FORMS:
        raise UnknownName("target", name, FORMS)
    known: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(FORMS[name])}
    for option, value in options.items():
        if option not in known:
            raise UnknownName(f"option of {name}", option, known)
        if type(value) is not type(known[option]):
            raise InputError(f"--target {written}: {option} is {value!r}, and is written as {option}={known[option]}")
    return FORMS[name](**options)


@final
@dataclass(frozen=True)
class FileCost:
    """A cost function: the bytes of a layer in a target's file; `tensors` are those of the network, by layer or name.

    Without them, what is left alone counts as float32 and what is no layer's weight is not known.
    """

    form: Form
    tensors: Mapping[str, Unquantized] = field(default_factory=dict)
    unit: ClassVar[str] = "bytes"

    @property
    def __name__(self) -> str:
        return f"{self.form.name}{FILE}"

    @property
    def target(self) -> str:
        """What plans say they are for."""
        return self.form.written

    def __call__(self, layer: Layer, precision: Precision) -> int:
        """Bytes of the layer's weight."""
        if precision.quantizes_inputs and layer.weights and not layer.fixed:
            raise InputError(f"{self.form.name} leaves activations alone, and {precision} does not: choose w…a16")
        if not layer.weights:
            return 0
        if not precision.quantizes_weights:
            found = self.tensors.get(layer.name, Unquantized((layer.weights // row_of(layer), row_of(layer))))
            return self.form.left(found)
        self.place(layer, precision)
        return self.form.taken(layer.weights // row_of(layer), row_of(layer), precision.weight_bits)

    def place(self, layer: Layer, precision: Precision) -> int:
        """The bits of its place in the file; a layer that has none is refused by its name."""
        bits = self.form.place(row_of(layer), precision.weight_bits)
        if bits >= LEFT_ALONE_BITS and precision.quantizes_weights and layer.weights:
            raise InputError(
                f"layer {layer.name!r} at {precision}: {self.form.why_not(row_of(layer))}; or leave it as it is, "
                f"--rules 'fix={layer.name}=w16a16'"
            )
        return bits

    def beside(self, graph: Graph) -> dict[str, int]:
        """What the file holds beside the layers: norms, biases and tables that no layer uses."""
        layers = {layer.name for layer in graph.layers if layer.weights}
        rest = sum(self.form.left(one) for name, one in self.tensors.items() if name not in layers)
        return {REST: rest} if rest else {}


def row_of(layer: Layer) -> int:
    """The length of a row of a layer's weight; of a convolution, whose kernel a layer does not tell, all of it."""
    if layer.kind.startswith("conv") or not layer.in_features or layer.weights % layer.in_features:
        return max(1, layer.weights)
    return layer.weights // layer.in_features if layer.kind == "embedding" else layer.in_features
