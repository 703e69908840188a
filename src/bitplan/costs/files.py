"""The bytes of the file that a target runs: codes, scales, zero points and padding, and what is not quantized.

A form says how one target stores the weight of a layer: which codes have a place there, how many bytes it takes, and
which quantizer makes such codes. Each target's form stands beside its exporter, which names it (`Exporter.form`).
`FileCost` is the cost that follows, in bytes (docs/decisions/files-and-budgets.md).
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
from bitplan.core.registry import EXPORTERS

FLOAT_BYTES = 4
OTHER_TENSORS = "what is no layer's weight"


@dataclass(frozen=True)
class Unquantized:
    """A tensor of a network: its shape, bytes of a value in memory, and of the narrowest float that holds all values.

    `raw` is the number of its bytes in the GGUF file that it was read from.
    """

    shape: tuple[int, ...]
    wide: int = FLOAT_BYTES
    narrow: int = FLOAT_BYTES
    raw: int | None = None

    @property
    def size(self) -> int:
        """The number of its values."""
        return prod(self.shape)


@dataclass(frozen=True)
class FileForm(ABC):
    """How a target stores weights: a frozen dataclass, whose fields are its options."""

    name: ClassVar[str]
    choices: ClassVar[str] = "w2a16,w4a16,w8a16"
    """The choices of a plan for this target, if the user names none."""
    tables: ClassVar[bool] = True
    """False leaves embeddings and the first and last layer float, unless the user says otherwise."""

    @property
    @abstractmethod
    def method(self) -> str:
        """The quantizer that makes codes for it, as `quantize` takes it."""

    @abstractmethod
    def place(self, row: int, bits: int) -> int:
        """Return the bits that a code of `bits` takes in rows of this length; 16 if it has no place."""

    @abstractmethod
    def taken(self, rows: int, row: int, bits: int) -> int:
        """Return the bytes of a weight: its codes, scales, zero points and padding."""

    def left(self, tensor: Unquantized) -> int:
        """Return the bytes of a tensor that has no codes."""
        return tensor.size * tensor.wide

    def why_not(self, row: int) -> str:
        """Say why rows of this length have no place, and which option would give them one."""
        return f"{self.name} has no place for codes in rows of {row}"

    @property
    def written(self) -> str:
        """The name with the options that differ from the defaults, as `read_form` reads it."""
        options = [
            f"{option.name}={str(value).lower() if isinstance(value, bool) else value}"
            for option in dataclasses.fields(self)
            if (value := getattr(self, option.name)) != option.default
        ]
        return f"{self.name}:{','.join(options)}" if options else self.name


@dataclass(frozen=True)
class GroupedForm(FileForm):
    """Groups of `size` inputs that share a scale, and with `zeros` a zero point each."""

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
        """Return the number of groups in a row; the last may be shorter."""
        return -(-row // self.size)


def read_form(written: str) -> FileForm:
    """Return the form of a target as people write it: "gguf", "vllm:size=64,zeros=true"."""
    name, options = read_named(written, "--for")
    kind = _form_of(name) if name in EXPORTERS else None
    if kind is None:
        raise UnknownName("target", name, target_names())
    defaults: dict[str, Any] = {option.name: option.default for option in dataclasses.fields(kind)}
    for option, value in options.items():
        if option not in defaults:
            raise UnknownName(f"option of {name}", option, defaults)
        if type(value) is not type(defaults[option]):
            raise InputError(
                f"--target {written}: {option} is {value!r}, and is written as {option}={defaults[option]}"
            )
    form: FileForm = kind(**options)
    return form


def target_names() -> list[str]:
    """Return the names of the exporters whose files a budget can count."""
    return [name for name in EXPORTERS if _form_of(name) is not None]


def _form_of(exporter: str) -> type[FileForm] | None:
    return getattr(EXPORTERS.get(exporter), "form", None)


@final
@dataclass(frozen=True)
class FileCost:
    """A cost function: the bytes of a layer in a target's file.

    `tensors` are those of the network, by layer or by name. Without them, unquantized layers count as float32, and
    other tensors are not counted.
    """

    form: FileForm
    tensors: Mapping[str, Unquantized] = field(default_factory=dict)
    unit: ClassVar[str] = "bytes"

    @property
    def __name__(self) -> str:
        return f"{self.form.name}{FILE}"

    @property
    def target(self) -> str:
        """The target that plans name."""
        return self.form.written

    def __call__(self, layer: Layer, precision: Precision) -> int:
        """Return the bytes of the layer's weight."""
        if precision.quantizes_inputs and layer.weights and not layer.fixed:
            raise InputError(f"{self.form.name} leaves activations alone, and {precision} does not: choose w…a16")
        if not layer.weights:
            return 0
        if not precision.quantizes_weights:
            described = Unquantized((layer.weights // row_length(layer), row_length(layer)))
            return self.form.left(self.tensors.get(layer.name, described))
        self.place(layer, precision)
        return self.form.taken(layer.weights // row_length(layer), row_length(layer), precision.weight_bits)

    def place(self, layer: Layer, precision: Precision) -> int:
        """Return the bits that its codes take in the file, or raise if they have no place there."""
        bits = self.form.place(row_length(layer), precision.weight_bits)
        if bits >= LEFT_ALONE_BITS and precision.quantizes_weights and layer.weights:
            raise InputError(
                f"layer {layer.name!r} at {precision}: {self.form.why_not(row_length(layer))}; or leave it as it is, "
                f"--rules 'fix={layer.name}=w16a16'"
            )
        return bits

    def beside(self, graph: Graph) -> dict[str, int]:
        """Return the bytes beside the layers: norms, biases and tables that no layer uses."""
        layers = {layer.name for layer in graph.layers if layer.weights}
        rest = sum(self.form.left(tensor) for name, tensor in self.tensors.items() if name not in layers)
        return {OTHER_TENSORS: rest} if rest else {}


def row_length(layer: Layer) -> int:
    """Return the length of a row of a layer's weight; for a convolution, whose kernel is not known here, all of it."""
    if layer.kind.startswith("conv") or not layer.in_features or layer.weights % layer.in_features:
        return max(1, layer.weights)
    return layer.weights // layer.in_features if layer.kind == "embedding" else layer.in_features
