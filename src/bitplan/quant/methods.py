"""What a method of quantization is: which modules quantize weights and inputs, and at which bits."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypedDict, cast, final

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
from bitplan.quant.scales import Shared, check_real, weight_step
from bitplan.quant.sites import Site

# --- What a method of quantization is: which modules quantize weights and inputs, and at which bits.

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
        return InputQuantizer(bits, name, features=options.features, masked=masked)

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


# --- How a model is quantized, and the making of its quantizers: afresh, or from those that an earlier plan had.


@dataclass(frozen=True)
class Options:
    """How a model is quantized, beside its plan; `quantize` explains them."""

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


_OPTIONS = TypeAdapter(Options)


class Told(TypedDict, total=False):
    """What `quantize` is told of its options; None, like nothing, leaves one as it was."""

    per_channel: bool | None
    method: str | None
    percentile: float | None
    features: Features | None
    integer: bool | None


def told_by(content: Mapping[str, Any]) -> Told:
    """Options as a file or a user has them, once they are known to be some, with values that they can have."""
    unknown = [name for name in content if name not in Told.__annotations__]
    if unknown:
        raise UnknownName("option of quantize", unknown[0], Told.__annotations__)
    try:
        valid = _OPTIONS.validate_python(dict(content))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        raise InputError(f"{where}: {said}, not {first['input']!r:.60}" if where else said) from None
    return cast("Told", {name: getattr(valid, name) for name in content})


class Quantizers(NamedTuple):
    """What quantizes a layer: its weight (None: left alone) and its inputs (two or more for products)."""

    weight: WeightQuantizer | None
    inputs: tuple[InputQuantizer, ...]


NONE = Quantizers(None, ())


class Factory:
    """Makes quantizers: afresh, or with the steps that were kept, rescaled to the new precision."""

    def __init__(self, options: Options, kept: Mapping[str, Quantizers], device: torch.device) -> None:
        self.options = options
        self.kept = kept
        self.device = device
        self.method = read_method(options.method)

    def weight(self, site: Site, bits: int) -> nn.Module:
        """A quantizer for a site's weight; left alone, an identity."""
        weight = site.weight
        if bits >= LEFT_ALONE_BITS or weight is None:
            return nn.Identity()
        check_real(weight)
        by_channel = self.options.per_channel or self.method.rows
        shared = Shared(channels_of(site.module, weight) if by_channel else None)
        kept = self.kept.get(site.layer, NONE).weight
        if kept is not None and kept.bits != bits and self.method.anew:
            kept = None
        bits_before = kept.bits if kept else bits
        made = self.method.weight(weight, bits_before, shared, self.options)
        if kept is not None:
            made.take_(kept)
        made.rescale_(bits)
        made.integer = self.options.integer
        if site.computed is not False and kept is None and not made.follows:
            made.first_step = partial(_first_step, self.method, bits=bits, shared=shared, options=self.options)
        return made

    def inputs(self, layer: str, bits: int, members: list[str]) -> nn.Module:
        """The one quantizer of an activation that these members read; left alone, an identity."""
        if bits >= LEFT_ALONE_BITS:
            return nn.Identity()
        kept = [quantizer for name in members for quantizer in self.kept.get(name, NONE).inputs]
        return self.activation(layer, bits, kept[0] if kept else None)

    def activation(self, layer: str, bits: int, kept: InputQuantizer | None, *, masked: bool = False) -> InputQuantizer:
        """A quantizer for one activation."""
        made = self.method.input(kept.bits if kept else bits, layer, self.options, masked=masked)
        if kept is not None:
            made.take_(kept)
        made.rescale_(bits)
        return made.to(self.device)


def _first_step(method: Quantizer, weight: Tensor, *, bits: int, shared: Shared, options: Options) -> Tensor:
    """The step that a quantizer of this weight begins with."""
    return method.weight(weight, bits, shared, options).step.detach()


# --- LSQ, the default: every step is learned (`quant/lsq.py` has the equations).


@final
@dataclass(frozen=True)
class LearnedSteps(Quantizer):
    """Learned steps of weights and inputs: the default."""

    source: ClassVar[str] = "Esser et al. 2020, Learned step size quantization"
    integers: ClassVar[bool] = True

    def weight(self, weight: Tensor, bits: int, shared: Shared, options: Options) -> WeightQuantizer:
        """A learned step, at first 2·mean|w|/√Qp."""
        return WeightQuantizer(bits, weight_step(weight, bits, shared))


# --- FAQ: steps are set once, at a percentile of magnitudes, and stay; only weights are fine-tuned.


class FixedInput(InputQuantizer):
    """A step that is a percentile of |v| over Qp, and does not learn."""

    def __init__(self, bits: int, name: str, *, percentile: float, **told: Any) -> None:
        super().__init__(bits, name, learned=False, **told)
        self.percentile = percentile

    def new_observation(self) -> Observation:
        """An empty memory of a percentile."""
        return Observation(self.percentile)

    def _first_step(self, seen: Observation, high: int) -> Tensor:
        return torch.tensor(seen.percentile_magnitude / high)


@final
@dataclass(frozen=True)
class Faq(Quantizer):
    """Steps fixed at `percentile` of magnitudes, an option of quantize; the weights are fine-tuned."""

    source: ClassVar[str] = "McKinstry et al. 2019, FAQ; its details are recalled, not read"
    integers: ClassVar[bool] = True
    percentile: ClassVar[bool] = True

    def weight(self, weight: Tensor, bits: int, shared: Shared, options: Options) -> WeightQuantizer:
        """A step that is a percentile of |w| over Qp."""
        step = weight_step(weight, bits, shared, options.percentile)
        return WeightQuantizer(bits, step, learned=False)

    def input(self, bits: int, name: str, options: Options, *, masked: bool) -> InputQuantizer:
        """The same of inputs."""
        return FixedInput(bits, name, percentile=options.percentile, features=options.features, masked=masked)
