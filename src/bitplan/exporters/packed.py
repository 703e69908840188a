"""packed: one safetensors file with bit-packed codes of the weights and all other tensors unchanged.

The header holds the plan, the graph if known, the options of `quantize`, and the model's name in the zoo.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar, final

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from bitplan.core.errors import FileError, InputError
from bitplan.core.parsing import explain_failures, name_file_in_errors, parse_json
from bitplan.core.records import Plan
from bitplan.costs.files import FLOAT_BYTES, GroupedForm
from bitplan.exporters.base import Execution, Exporter, ReadBack, Source
from bitplan.exporters.bit_packing import pack, packed_bytes, unpack
from bitplan.quant.checkpoint import build_from_zoo, fill_, tensors_of
from bitplan.quant.convert import integer_weights, options_of, quantize, quantizers_of, weights_of
from bitplan.quant.finite import check_finite
from bitplan.quant.layers import Channels
from bitplan.quant.methods import check_options
from bitplan.quant.quantizers import WeightQuantizer
from bitplan.quant.weight_groups import GroupedWeight, Grouping, Levels
from bitplan.weights.refusals import is_own_packed
from bitplan.weights.safetensors import map_with_texts
from bitplan.weights.torch_tensors import TorchTensors, read_safetensors, write_tensors

FORMAT = "1"


@final
@dataclass(frozen=True)
class PackedForm(GroupedForm):
    """Codes without gaps; scales, zero points, number of bits as float32. `size` 0 is one scale per weight (LSQ)."""

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
        """Return the bits themselves."""
        return bits

    def taken(self, rows: int, row: int, bits: int) -> int:
        """Return the bytes of codes, scales, zero points and the number of bits."""
        scales = rows * self.groups(row) * (2 if self.zeros else 1) if self.size else 1
        return -(-rows * row * bits // 8) + (scales + 1) * FLOAT_BYTES


@dataclass(frozen=True)
class Codes:
    """Where a packed tensor belongs, and what unpacks it.

    A `computed` one is the weight of no module: what it is computed from is in the file too, and the codes are for
    those who only multiply. A value is (code + `offset`)·step.

    Where `size` is given, a weight is seen as rows, numbered by its `axes` (after its first is split into `parts`), and
    groups of so many inputs of a row have steps of their own, (rows, groups); so have zero points, where `zero` names
    them: a value is then (code − zero)·step.
    """

    layers: tuple[str, ...]
    bits: int
    shape: tuple[int, ...]
    dtype: str
    step: str
    computed: bool = False
    offset: float = 0.0
    size: int = 0
    axes: tuple[int, ...] = (0,)
    parts: int = 1
    zero: str = ""

    def values(self, codes: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """What codes stand for, by the steps among a file's tensors."""
        step = tensors[self.step]
        if not self.size:
            return (codes + self.offset) * WeightQuantizer(self.bits, step).steps_for(codes)
        levels = Levels(step, tensors[self.zero] if self.zero else None)
        return GroupedWeight(self.bits, Grouping(self.size, Channels(self.axes, self.parts)), levels).values(codes)


_ALL_CODES = TypeAdapter(dict[str, Codes])
_TIES = TypeAdapter(dict[str, str])


@final
@dataclass(frozen=True)
class Packed(Exporter):
    """Safetensors with bit-packed weights; `load_packed` gives back the same model, bit for bit."""

    form: ClassVar[type[PackedForm]] = PackedForm
    needs_model: ClassVar[bool] = True
    suffix: ClassVar[str] = ".safetensors"

    def write(self, source: Source, path: Path) -> None:
        """Write codes, steps and all other tensors, and in the header what gives them meaning."""
        model = source.model
        assert model is not None
        tensors, tied = tensors_of(model)
        codes = _codes(model, tied)
        integers = integer_weights(model)
        steps = _steps_in_use(model)
        for name, about in codes.items():
            tensors[name] = pack(integers[about.layers[0]], about.bits)
            tensors[about.step] = steps[about.layers[0]].to("cpu", copy=True)
        header = {
            "format": "pt",
            "bitplan": FORMAT,
            "plan": _compact(source.plan.to_json()),
            "options": json.dumps(asdict(options_of(model))),
            "packed": _ALL_CODES.dump_json(codes, exclude_defaults=True).decode(),
            "tied": json.dumps(tied),
            "spec": source.spec or "",
            "graph": _compact(source.graph.to_json()) if source.graph else "",
        }
        write_tensors(tensors, path, header)

    def read(self, path: Path) -> ReadBack:
        """Return the plan in the header, and every code."""
        with _open_packed(path) as (tensors, header):
            plan = Plan.from_json(header["plan"])
            codes = _ALL_CODES.validate_json(header["packed"])
            found = {}
            for name, about in codes.items():
                whole = _unpack(tensors[name], about)
                found.update({layer: whole for layer in about.layers})
        return ReadBack(plan.precisions, {layer: found[layer] for layer in plan.precisions if layer in found})

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """Return True for a safetensors file whose header says that bitplan packed it."""
        try:
            _, header = map_with_texts(path)  # nothing but the header is read
        except FileError:
            return False
        return is_own_packed(header)

    def opened(self, path: Path, model: nn.Module) -> Execution:
        """Return a copy of the model that is filled from the file: every output must be equal."""
        return Execution(load_packed(path, model).eval())


def load_packed(path: str | Path, model: nn.Module | None = None, *, trust: bool = False) -> nn.Module:
    """Return the model in a packed file; its outputs equal those of the exported model bit for bit.

    `model` is a float model of the same kind, which stays unchanged. Without it the file must name a model of the zoo,
    or, with `trust`, code to import.
    """
    source = Path(path)
    with _open_packed(source) as (tensors, header):
        plan = Plan.from_json(header["plan"])
        codes = _ALL_CODES.validate_json(header["packed"])
        tied = _TIES.validate_json(header["tied"])
        options = check_options(parse_json(header["options"]))
        for name, about in codes.items():
            if about.computed:
                del tensors[name]
                continue
            whole = _unpack(tensors[name], about)
            tensors[name] = about.values(whole, tensors).to(getattr(torch, about.dtype))
        tensors.update({name: tensors[stored] for name, stored in tied.items()})
    base = build_from_zoo(header["spec"] or None, source, trust=trust) if model is None else model
    with name_file_in_errors(source):
        filled = quantize(base, plan, **options)
    _check_types(filled, tensors, source)
    fill_(filled, tensors, source)
    with name_file_in_errors(source):
        check_finite(filled)
    return filled


def predict_bytes(model: nn.Module) -> int:
    """Return the bytes of the tensors in a packed file of this model."""
    tensors, tied = tensors_of(model)
    codes = _codes(model, tied)
    others = sum(t.numel() * t.element_size() for name, t in tensors.items() if name not in codes)
    return others + sum(packed_bytes(math.prod(about.shape), about.bits) for about in codes.values())


def _codes(model: nn.Module, tied: Mapping[str, str]) -> dict[str, Codes]:
    """Return how to unpack each weight that is stored as codes, by its name in the model's state."""
    state = model.state_dict(keep_vars=True)
    names = {id(value): tied.get(name, name) for name, value in reversed(state.items())}
    quantizers, weights, integers = quantizers_of(model), weights_of(model), integer_weights(model)
    found: dict[str, Codes] = {}
    for layer, weight in weights.items():
        quantizer = quantizers[layer].weight
        assert quantizer is not None
        if not quantizer.uniform:
            raise InputError(
                f"the levels of layer {layer!r} are not equally far apart, so codes and a step cannot say them: keep "
                "the network as a checkpoint (save_checkpoint)"
            )
        step, kind = names[id(quantizer.step)], str(weight.dtype)[6:]
        about = Codes((layer,), quantizer.bits, tuple(weight.shape), kind, step, offset=quantizer.offset)
        if isinstance(quantizer, GroupedWeight):
            about = _in_groups(about, quantizer, names)
        if id(weight) not in names:
            found[f"{layer}.codes"] = replace(about, computed=True)
            continue
        name = names[id(weight)]
        _check_survives(layer, quantizer, weight, integers[layer])
        if name in found:
            about = _merge_shared(model, name, found[name], about)
        found[name] = about
    return found


def _in_groups(about: Codes, quantizer: GroupedWeight, names: Mapping[int, str]) -> Codes:
    blocks, zero = quantizer.blocks, "" if quantizer.zero is None else names[id(quantizer.zero)]
    return replace(about, size=blocks.size, axes=blocks.channels.axes, parts=blocks.channels.groups, zero=zero)


def _check_survives(layer: str, quantizer: WeightQuantizer, weight: Tensor, codes: Tensor) -> None:
    """Raise if a weight's type cannot hold the values of its codes."""
    pinned = quantizer.pinned(weight)
    if not torch.equal(pinned.codes(pinned.values(codes).to(weight.dtype)), codes):
        raise InputError(f"layer {layer!r}: {quantizer.bits}-bit codes do not survive in {str(weight.dtype)[6:]}")


def _steps_in_use(model: nn.Module) -> dict[str, Tensor]:
    """Return the steps of every quantized weight, also those computed from the weight, which the file lacks."""
    quantizers = quantizers_of(model)
    return {layer: quantizers[layer].weight.in_use(weight) for layer, weight in weights_of(model).items()}  # type: ignore[union-attr]


def _merge_shared(model: nn.Module, name: str, first: Codes, second: Codes) -> Codes:
    """Return one entry for a tensor that two layers share; raise if they quantize it differently."""
    state = model.state_dict()
    named = (first.step, second.step), (first.zero, second.zero)  # which have no names where there are none
    equal = all(torch.equal(state[one], state[other]) if one and other else one == other for one, other in named)
    if not equal or replace(second, layers=first.layers, step=first.step, zero=first.zero) != first:
        raise InputError(
            f"layers {', '.join((*first.layers, *second.layers))} share {name} but quantize it differently, so it "
            "cannot be stored as one set of codes: untie them, or give them one precision, one step and one zero point"
        )
    return replace(first, layers=(*first.layers, *second.layers))


def _unpack(packed: Tensor, about: Codes) -> Tensor:
    return unpack(packed, about.bits, math.prod(about.shape)).view(about.shape)


def _check_types(model: nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    for name, value in model.state_dict().items():
        stored = tensors.get(name)
        if stored is not None and stored.dtype != value.dtype:
            kinds = f"{str(stored.dtype)[6:]} in the file, {str(value.dtype)[6:]} in the model"
            raise FileError(f"{source}: {name} is {kinds}: convert the model first, with model.to(…)")


def _compact(text: str) -> str:
    return json.dumps(json.loads(text), separators=(",", ":"))


@contextmanager
def _open_packed(path: Path) -> Iterator[tuple[TorchTensors, dict[str, str]]]:
    """Yield the tensors and the header of a packed file; raise for any other file."""
    if not path.is_file():
        raise FileError(f"cannot read {path}: there is no such file")
    with explain_failures(path, "a packed file", "export it again"):
        tensors, header = read_safetensors(path)
    if "bitplan" not in header or "packed" not in header:
        raise FileError(f"{path} is a safetensors file, but not one that bitplan packed")
    if header["bitplan"] != FORMAT:
        raise FileError(f"{path} has packed format {header['bitplan']}; this bitplan reads {FORMAT}")
    with explain_failures(path, "a packed file", "export it again"):
        yield tensors, header
