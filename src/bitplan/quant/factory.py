"""How a model is quantized, and the making of its quantizers: afresh, or from those that an earlier plan had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypedDict, cast

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from bitplan.core.errors import InputError, UnknownName
from bitplan.core.precision import LEFT_ALONE_BITS
from bitplan.quant.layers import channels_of
from bitplan.quant.methods.base import Quantizer, read_method
from bitplan.quant.quantizers import Features, InputQuantizer, WeightQuantizer
from bitplan.quant.sites import Site
from bitplan.quant.steps import Shared, check_real


@dataclass(frozen=True)
class Options:
    """How a model is quantized, beside its plan; `quantize` explains them."""

    per_channel: bool = False
    method: str = "lsq"
    percentile: float = 99.9
    features: Features = "sample"
    fused: bool = False
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
    fused: bool | None
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
