"""What a method of quantization is: which modules quantize weights and inputs, and at which bits."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from bitplan.core.errors import InputError
from bitplan.core.precision import Precision
from bitplan.core.records import Plan
from bitplan.core.registry import QUANTIZERS
from bitplan.core.written import read_named
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.steps import Shared

if TYPE_CHECKING:
    from bitplan.quant.factory import Options

ALL_BITS = range(2, 16)


@dataclass(frozen=True)
class Quantizer(ABC):
    """A method of quantization: a frozen dataclass registered in `bitplan.quantizers`, whose fields are its options.

    `quantize(model, plan, method="name")` makes it, or "name:option=value,…" with options. `weight` and `input` make
    the modules that quantize one tensor each; `quant/quantizers.py` has LSQ's, from which others derive.
    """

    source: ClassVar[str] = ""
    """Where it comes from."""
    uniform: ClassVar[bool] = True
    """Whether the levels of weights and inputs are equally far apart, so that exporters can say them."""
    weight_bits: ClassVar[Sequence[int]] = ALL_BITS
    input_bits: ClassVar[Sequence[int]] = ALL_BITS
    percentile: ClassVar[bool] = False
    """Whether steps or limits begin at a percentile of magnitudes, `percentile` of quantize."""
    rows: ClassVar[bool] = False
    """Whether weights are always seen by output channel, whatever `per_channel` says."""
    anew: ClassVar[bool] = False
    """Whether a weight lies otherwise at other bits, so that steps kept from there say nothing."""
    integers: ClassVar[bool] = False
    """Whether steps are stored and zero is a level, so that integer=True can put biases on the grid of products."""

    @abstractmethod
    def weight(self, weight: Tensor, bits: int, shared: Shared, options: Options) -> WeightQuantizer:
        """What quantizes a weight; `shared` says which of its values share a step."""

    def input(self, bits: int, name: str, options: Options, *, masked: bool) -> InputQuantizer:
        """What quantizes an activation that the layer `name` reads: as LSQ does, unless a method says otherwise."""
        return InputQuantizer(bits, name, features=options.features, fused=options.fused, masked=masked)

    @property
    def name(self) -> str:
        """What it is registered as."""
        return QUANTIZERS.name_of(self)


def read_method(written: str) -> Quantizer:
    """The method that a text names, "pact" or "pact:decay=0.0002"; one that is not there is said, with near names."""
    name, options = read_named(written, f"method {written!r}:")
    factory = QUANTIZERS.get(name)
    if not (isinstance(factory, type) and issubclass(factory, Quantizer) and dataclasses.is_dataclass(factory)):
        raise InputError(f"the quantizer {name!r} is no dataclass derived from bitplan.Quantizer (docs/extend.md)")
    made: Quantizer = QUANTIZERS.make(name, options)
    return made


def check_bits(method: Quantizer, plan: Plan) -> None:
    """Refuse a plan that asks for bits which a method does not have."""
    for layer, precision in plan.precisions.items():
        check_has(method, precision, f"the plan gives layer {layer!r}")


def check_has(method: Quantizer, precision: Precision, who: str) -> None:
    """Refuse a precision whose bits a method does not have; `who` asks for it."""
    asked = (
        ("weights", precision.quantizes_weights, precision.weight_bits, method.weight_bits),
        ("inputs", precision.quantizes_inputs, precision.act_bits, method.input_bits),
    )
    for what, quantized, bits, known in asked:
        if quantized and bits not in known:
            raise InputError(
                f"{method.name} has no {bits} bits for {what}, which {who}: it has {bits_in_words(known)}; take "
                "precisions of these, or another method (`bitplan list quantizers`)"
            )


def check_integers(method: Quantizer) -> None:
    """Refuse a method whose levels integer kernels cannot add biases to."""
    if not method.integers:
        able = [name for name in QUANTIZERS if getattr(QUANTIZERS.get(name), "integers", False)]
        raise InputError(
            f"integer=True rounds biases to the grid of products, and {method.name} has no steps that stay between two "
            f"runs: quantize with method {' or '.join(able)}, or without integer=True"
        )


def described() -> dict[str, dict[str, str]]:
    """Every method by its name, in words: what it is, bits, whether it is uniform, options and where it comes from."""
    found = {}
    for name in QUANTIZERS:
        kind = QUANTIZERS.get(name)
        found[name] = {
            "what": (kind.__doc__ or "").partition("\n")[0],
            "weights": f"{bits_in_words(kind.weight_bits)} bits",
            "inputs": f"{bits_in_words(kind.input_bits)} bits",
            "uniform": "yes" if kind.uniform else "no",
            "options": ", ".join(f"{option.name}={option.default}" for option in dataclasses.fields(kind)),
            "from": kind.source,
        }
    return found


def bits_in_words(known: Sequence[int]) -> str:
    """The bits that a method has: "2 to 15", "2, 4, 8"."""
    whole = list(known) == list(range(min(known), max(known) + 1)) and len(known) > 2
    return f"{min(known)} to {max(known)}" if whole else ", ".join(map(str, known))
