"""A method of quantization: the modules that quantize weights and inputs, its bits, and its options."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypedDict, cast, final

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from bitplan.core.errors import InputError, UnknownName
from bitplan.core.option_parsing import read_named
from bitplan.core.precision import LEFT_ALONE_BITS, Precision
from bitplan.core.records import Plan
from bitplan.core.registry import QUANTIZERS
from bitplan.quant.layers import channels_of
from bitplan.quant.observe import Observation
from bitplan.quant.quantizers import Features, InputQuantizer, WeightQuantizer
from bitplan.quant.scales import ScaleSharing, check_real, first_weight_scale
from bitplan.quant.sites import NONE, Quantizers, Site

ALL_BITS = range(2, 16)


@dataclass(frozen=True)
class Quantizer(ABC):
    """A method of quantization: a frozen dataclass registered in `bitplan.quantizers`, whose fields are its options.

    `quantize(model, plan, method="name")` uses it, or "name:option=value,…" with options. `weight` and `input` return
    the modules that quantize one tensor each; `quant/quantizers.py` has LSQ's, from which others derive.
    """

    source: ClassVar[str] = ""
    """The publication that it comes from."""
    uniform: ClassVar[bool] = True
    """True if the levels of weights and inputs are equally far apart, so that exporters can write them."""
    weight_bits: ClassVar[Sequence[int]] = ALL_BITS
    input_bits: ClassVar[Sequence[int]] = ALL_BITS
    percentile: ClassVar[bool] = False
    """True if scales or limits begin at a percentile of magnitudes, the option `percentile` of quantize."""
    rows: ClassVar[bool] = False
    """True if weights always have scales per output channel, whatever `per_channel` says."""
    anew: ClassVar[bool] = False
    """True if a weight is laid out differently at other bits, so that scales from there do not apply."""
    integers: ClassVar[bool] = False
    """True if scales are stored and zero is a level, so that integer=True can put biases on the grid of products."""

    @abstractmethod
    def weight(self, weight: Tensor, bits: int, shared: ScaleSharing, options: QuantizeOptions) -> WeightQuantizer:
        """Return the quantizer of a weight; `shared` says which of its values share a scale."""

    def input(self, bits: int, name: str, options: QuantizeOptions, *, masked: bool) -> InputQuantizer:
        """Return the quantizer of an activation that the layer `name` reads; by default LSQ's."""
        return InputQuantizer(bits, name, features=options.features, masked=masked)

    @property
    def name(self) -> str:
        """The name under which it is registered."""
        return QUANTIZERS.name_of(self)


def read_method(written: str) -> Quantizer:
    """Return the method that a text names, such as "pact" or "pact:decay=0.0002"."""
    name, options = read_named(written, f"method {written!r}:")
    factory = QUANTIZERS.get(name)
    if not (isinstance(factory, type) and issubclass(factory, Quantizer) and dataclasses.is_dataclass(factory)):
        raise InputError(f"the quantizer {name!r} is no dataclass derived from bitplan.Quantizer (docs/extend.md)")
    method: Quantizer = QUANTIZERS.make(name, options)
    return method


def check_bits(method: Quantizer, plan: Plan) -> None:
    """Raise an error if a plan asks for bits that a method does not have."""
    for layer, precision in plan.precisions.items():
        check_precision(method, precision, f"the plan gives layer {layer!r}")


def check_precision(method: Quantizer, precision: Precision, who: str) -> None:
    """Raise an error if a method does not have the bits of a precision, which `who` asks for."""
    asked = (
        ("weights", precision.quantizes_weights, precision.weight_bits, method.weight_bits),
        ("inputs", precision.quantizes_inputs, precision.act_bits, method.input_bits),
    )
    for operand, is_quantized, bits, known in asked:
        if is_quantized and bits not in known:
            raise InputError(
                f"{method.name} has no {bits} bits for {operand}, which {who}: it has {format_bits(known)}; take "
                "precisions of these, or another method (`bitplan list quantizers`)"
            )


def check_integers(method: Quantizer) -> None:
    """Raise an error if integer kernels cannot add biases to the levels of a method."""
    if not method.integers:
        names = [name for name in QUANTIZERS if getattr(QUANTIZERS.get(name), "integers", False)]
        raise InputError(
            f"integer=True rounds biases to the grid of products, and {method.name} has no scales that stay between "
            f"two runs: quantize with method {' or '.join(names)}, or without integer=True"
        )


def describe_quantizers() -> dict[str, dict[str, str]]:
    """Return a description of every method by its name: bits, whether it is uniform, options and source."""
    descriptions = {}
    for name in QUANTIZERS:
        kind = QUANTIZERS.get(name)
        descriptions[name] = {
            "what": (kind.__doc__ or "").partition("\n")[0],
            "weights": f"{format_bits(kind.weight_bits)} bits",
            "inputs": f"{format_bits(kind.input_bits)} bits",
            "uniform": "yes" if kind.uniform else "no",
            "options": ", ".join(f"{option.name}={option.default}" for option in dataclasses.fields(kind)),
            "from": kind.source,
        }
    return descriptions


def format_bits(known: Sequence[int]) -> str:
    """Return the bits that a method has in words: "2 to 15", "2, 4, 8"."""
    is_range = list(known) == list(range(min(known), max(known) + 1)) and len(known) > 2
    return f"{min(known)} to {max(known)}" if is_range else ", ".join(map(str, known))


@dataclass(frozen=True)
class QuantizeOptions:
    """The options of a quantized model; `quantize` explains them."""

    per_channel: bool = False
    method: str = "lsq"
    percentile: float = 99.9
    features: Features = "sample"
    integer: bool = field(default=False, repr=False)  # told apart in fingerprints, which hold what is shown

    def __post_init__(self) -> None:
        read_method(self.method)
        if self.features not in ("sample", "batch"):
            raise InputError(f"features are counted per sample or batch, not {self.features!r}")
        if not 0 < self.percentile <= 100:
            raise InputError(f"the percentile must be above 0 and at most 100, not {self.percentile}")


_OPTIONS = TypeAdapter(QuantizeOptions)


class OptionChanges(TypedDict, total=False):
    """The options that a call of `quantize` changes; None leaves one as it was."""

    per_channel: bool | None
    method: str | None
    percentile: float | None
    features: Features | None
    integer: bool | None


def check_options(content: Mapping[str, Any]) -> OptionChanges:
    """Return options from a file or a user, checked by name and value."""
    unknown = [name for name in content if name not in OptionChanges.__annotations__]
    if unknown:
        raise UnknownName("option of quantize", unknown[0], OptionChanges.__annotations__)
    try:
        valid = _OPTIONS.validate_python(dict(content))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        raise InputError(f"{where}: {said}, not {first['input']!r:.60}" if where else said) from None
    return cast("OptionChanges", {name: getattr(valid, name) for name in content})


class QuantizerFactory:
    """Makes quantizers, new ones or ones that go on with the scales of an earlier plan, rescaled to new bits."""

    def __init__(self, options: QuantizeOptions, kept: Mapping[str, Quantizers], device: torch.device) -> None:
        self.options = options
        self.kept = kept
        self.device = device
        self.method = read_method(options.method)

    def weight(self, site: Site, bits: int) -> nn.Module:
        """Return the quantizer of a site's weight, an identity if the weight stays in float."""
        weight = site.weight
        if bits >= LEFT_ALONE_BITS or weight is None:
            return nn.Identity()
        check_real(weight)
        by_channel = self.options.per_channel or self.method.rows
        shared = ScaleSharing(channels_of(site.module, weight) if by_channel else None)
        kept = self.kept.get(site.layer, NONE).weight
        if kept is not None and kept.bits != bits and self.method.anew:
            kept = None
        quantizer = self.method.weight(weight, kept.bits if kept else bits, shared, self.options)
        if kept is not None:
            quantizer.take_(kept)
        quantizer.rescale_(bits)
        quantizer.integer = self.options.integer
        if site.computed is not False and kept is None and not quantizer.follows:
            quantizer.first_step = partial(_first_step, self.method, bits=bits, shared=shared, options=self.options)
        return quantizer

    def inputs(self, layer: str, bits: int, members: list[str]) -> nn.Module:
        """Return the one quantizer of an activation that these layers read, an identity if it stays in float."""
        if bits >= LEFT_ALONE_BITS:
            return nn.Identity()
        kept = [quantizer for name in members for quantizer in self.kept.get(name, NONE).inputs]
        return self.activation(layer, bits, kept[0] if kept else None)

    def activation(self, layer: str, bits: int, kept: InputQuantizer | None, *, masked: bool = False) -> InputQuantizer:
        """Return the quantizer of one activation."""
        quantizer = self.method.input(kept.bits if kept else bits, layer, self.options, masked=masked)
        if kept is not None:
            quantizer.take_(kept)
        quantizer.rescale_(bits)
        return quantizer.to(self.device)


def _first_step(
    method: Quantizer, weight: Tensor, *, bits: int, shared: ScaleSharing, options: QuantizeOptions
) -> Tensor:
    """Return the first scale of this weight."""
    return method.weight(weight, bits, shared, options).step.detach()


@final
@dataclass(frozen=True)
class LearnedSteps(Quantizer):
    """Learned scales of weights and inputs: the default (`quant/lsq.py` has the equations)."""

    source: ClassVar[str] = "Esser et al. 2020, Learned step size quantization"
    integers: ClassVar[bool] = True

    def weight(self, weight: Tensor, bits: int, shared: ScaleSharing, options: QuantizeOptions) -> WeightQuantizer:
        """Return a quantizer with a learned scale, at first 2·mean|w|/√Qp."""
        return WeightQuantizer(bits, first_weight_scale(weight, bits, shared))


class FixedInput(InputQuantizer):
    """An input quantizer whose scale is a percentile of |v| over Qp, and does not learn."""

    def __init__(self, bits: int, name: str, *, percentile: float, **arguments: Any) -> None:
        super().__init__(bits, name, learned=False, **arguments)
        self.percentile = percentile

    def new_observation(self) -> Observation:
        """Return an empty observation of a percentile."""
        return Observation(self.percentile)

    def _first_step(self, seen: Observation, high: int) -> Tensor:
        return torch.tensor(seen.percentile_magnitude / high)


@final
@dataclass(frozen=True)
class Faq(Quantizer):
    """Scales fixed at `percentile` of magnitudes, an option of quantize; only the weights are fine-tuned."""

    source: ClassVar[str] = "McKinstry et al. 2019, FAQ; its details are recalled, not read"
    integers: ClassVar[bool] = True
    percentile: ClassVar[bool] = True

    def weight(self, weight: Tensor, bits: int, shared: ScaleSharing, options: QuantizeOptions) -> WeightQuantizer:
        """Return a quantizer whose scale is a percentile of |w| over Qp."""
        step = first_weight_scale(weight, bits, shared, options.percentile)
        return WeightQuantizer(bits, step, learned=False)

    def input(self, bits: int, name: str, options: QuantizeOptions, *, masked: bool) -> InputQuantizer:
        """Return a quantizer whose scale is a percentile of |v| over Qp."""
        return FixedInput(bits, name, percentile=options.percentile, features=options.features, masked=masked)
