"""Language models for vLLM: the bytes of its checkpoints, and two exporters.

`compressed-tensors` writes a recipe: the `quantization_config` that llm-compressor, transformers and vLLM read. `vllm`
writes a folder of Hugging Face's with packed codes. Codes, scales and zero points are those of the network; the format
is `pack-quantized`, with one config group for each precision. vLLM runs q/k/v and gate/up as one layer, so these must
agree.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitplan.adapters.tokenizers import TOKENIZER, tokenizer_text
from bitplan.core.errors import FileError, InputError
from bitplan.core.naming import layer_of, layer_of_quantizer
from bitplan.core.parsing import explain_failures, parse_json
from bitplan.core.precision import LEFT_ALONE, LEFT_ALONE_BITS, Precision
from bitplan.core.records import TENSORS
from bitplan.costs.files import GroupedForm, Unquantized
from bitplan.exporters.base import Exporter, ReadBack, Source
from bitplan.exporters.bit_packing import pack, unpack
from bitplan.models.file_tensors import narrow_of
from bitplan.plugins.runtimes.recipes import (
    Expressible,
    Part,
    RecipeExporter,
    can_group,
    escape_name,
    fit,
    parsing_recipe,
    read_json,
    unescape_name,
    write_json,
)
from bitplan.quant.convert import integer_weights, quantizers_of, weights_of
from bitplan.quant.quantizers import WeightQuantizer, why_not_uniform
from bitplan.quant.weight_groups import GroupedWeight
from bitplan.store.files import read_text
from bitplan.weights.pretrained_folders import CONFIG, says_network
from bitplan.weights.torch_tensors import read_safetensors, write_tensors

_log = logging.getLogger(__name__)
_METHOD, _FORMAT = "compressed-tensors", "pack-quantized"
_SIGN = "bitplan"  # by this key of config.json verify knows the folder


@final
@dataclass(frozen=True)
class VllmForm(GroupedForm):
    """Codes packed into words of 32 bits, float16 scales, zero points packed across rows."""

    name: ClassVar[str] = "vllm"
    choices: ClassVar[str] = "w4a16,w8a16"
    tables: ClassVar[bool] = False
    size: int = 128

    @property
    def method(self) -> str:
        """Groups whose scales are float16."""
        return f"{super().method},half=true"

    def place(self, row: int, bits: int) -> int:
        """Return the bits, up to 8 in rows of whole groups."""
        return bits if bits <= 8 and row % self.size == 0 else LEFT_ALONE_BITS

    def taken(self, rows: int, row: int, bits: int) -> int:
        """Return the bytes of codes, scales and zero points, and of the shape (two words of 64 bits)."""
        zeros = _word_bytes(rows * bits) * self.groups(row) if self.zeros else 0
        return rows * _word_bytes(row * bits) + rows * self.groups(row) * 2 + zeros + 16

    def left(self, tensor: Unquantized) -> int:
        """Return the bytes in the narrowest float that holds it."""
        return tensor.size * tensor.narrow

    def why_not(self, row: int) -> str:
        """Name the group size that rows of this length would fill."""
        sizes = [size for size in (128, 64, 32, 16) if row % size == 0]
        take = f": take --target vllm:size={sizes[0]}" if sizes else ""
        return f"groups have {self.size} weights, of which rows of {row} are no multiple{take}"


def _word_bytes(bits: int) -> int:
    """Return the bytes of whole words of 32 bits that hold so many bits."""
    return -(-bits // 32) * 4


def name_fused_layer(name: str) -> str | None:
    """Return the name of the layer that vLLM runs several as (q/k/v, gate/up, all experts of a block), or None.

    Their schemes must be equal.
    """
    experts = re.match(r"(.*\.experts)\.\d+\.", name)
    if experts:
        return experts[1]
    projection = re.fullmatch(r"(.*\.)((?P<qkv>[qkv])|gate|up)_proj", name)
    if not projection:
        return None
    parent, qkv = projection[1], projection["qkv"]
    if qkv and re.search(r"encoder_attn|cross_?attn", name):  # its keys and values read another tensor
        return None if qkv == "q" else f"{parent}kv_proj"
    return parent + ("qkv_proj" if qkv else "gate_up_proj")


CONFIG_TARGET = Expressible(_METHOD, weight_bits=lambda part: range(2, 9), act_bits=(8,), one=name_fused_layer)
TARGET = Expressible("vllm", weight_bits=lambda part: range(2, 9), kinds=("linear",), one=name_fused_layer)


@final
@dataclass(frozen=True)
class CompressedTensors(RecipeExporter):
    """`config_groups`, one per precision: integer weights in groups, activations per token as they come."""

    group_size: int = 128
    widen: bool = False

    def write(self, source: Source, path: Path) -> None:
        """Write `{"quantization_config": …}`."""
        parts = fit(source, CONFIG_TARGET, widen=self.widen)
        groups: dict[tuple[Precision, bool], list[str]] = defaultdict(list)
        for part in parts:
            if not part.precision.left_alone:
                groups[part.precision, self._in_groups(part)].append(escape_name(part.name))
        config = {
            "quant_method": _METHOD,
            "config_groups": {
                f"group_{index}": self._scheme(precision, in_groups, names)
                for index, ((precision, in_groups), names) in enumerate(groups.items())
            },
            "ignore": [escape_name(part.name) for part in parts if part.precision.left_alone],
        }
        write_json(path, {"quantization_config": config})

    def _in_groups(self, part: Part) -> bool:
        """Return False for rows that groups do not divide, and w8a8: its kernels want one scale per output channel."""
        return part.precision != Precision.parse("w8a8") and can_group(part, self.group_size)

    def _scheme(self, precision: Precision, in_groups: bool, names: list[str]) -> dict[str, Any]:
        weights = {"num_bits": precision.weight_bits, "type": "int", "symmetric": True, "dynamic": False}
        weights |= {"strategy": "group", "group_size": self.group_size} if in_groups else {"strategy": "channel"}
        inputs = {
            "num_bits": precision.act_bits,
            "type": "int",
            "symmetric": True,
            "dynamic": True,
            "strategy": "token",
        }
        return {
            "targets": names,
            "weights": weights,
            "input_activations": inputs if precision.quantizes_inputs else None,
            "output_activations": None,
        }

    def read(self, path: Path) -> ReadBack:
        """Return the precisions of the groups, and 16 bits for ignored layers."""
        with parsing_recipe(path, _METHOD):
            config = read_json(path)["quantization_config"]
            precisions = {unescape_name(name): LEFT_ALONE for name in config["ignore"]}
            for group in config["config_groups"].values():
                inputs = group["input_activations"]
                act = inputs["num_bits"] if inputs else LEFT_ALONE_BITS
                precision = Precision(weight_bits=group["weights"]["num_bits"], act_bits=act)
                precisions |= {unescape_name(name): precision for name in group["targets"]}
        return ReadBack(precisions)


class _Layout(NamedTuple):
    """Bits, group size and zero points that the layers of one config group share; size 0 is one scale for each row."""

    bits: int
    size: int
    zeros: bool

    @property
    def scheme(self) -> dict[str, Any]:
        """The entry of compressed-tensors."""
        entry: dict[str, Any] = {"num_bits": self.bits, "type": "int", "symmetric": not self.zeros, "dynamic": False}
        return entry | ({"strategy": "group", "group_size": self.size} if self.size else {"strategy": "channel"})


@final
@dataclass(frozen=True)
class Vllm(Exporter):
    """A checkpoint of packed codes for vLLM and transformers: linear layers, weights only.

    `widen` stores linked layers that differ at the wider precision, and leaves layers without a place float.
    """

    widen: bool = False
    form: ClassVar[type[VllmForm]] = VllmForm
    needs_model: ClassVar[bool] = True
    folder: ClassVar[bool] = True

    def write(self, source: Source, path: Path) -> None:
        """Write config.json, model.safetensors and the tokenizer."""
        model = source.model
        assert model is not None
        config: Any = getattr(model, "config", None)
        if not hasattr(config, "to_dict"):
            raise InputError(
                f"vllm serves networks of transformers', and {source.plan.model} has no configuration of one, so every "
                "layer of it lacks a name there: export it as packed or onnx"
            )
        parts = {part.name: part for part in fit(source, TARGET, widen=self.widen)}
        layouts = _layouts(model, parts)
        tensors = _tensors(model, layouts)
        content = config.to_dict() | {
            "quantization_config": _config(parts, layouts),
            "dtype": _compute_type(tensors),
            _SIGN: json.loads(source.plan.to_json()),
        }
        (path / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        write_tensors(tensors, path / TENSORS, {"format": "pt"})
        if source.folder is not None and (source.folder / TOKENIZER).is_file():
            (path / TOKENIZER).write_text(tokenizer_text(source.folder), encoding="utf-8")

    def read(self, path: Path) -> ReadBack:
        """Return the precisions of the config groups, and every code."""
        with explain_failures(path / CONFIG, "a configuration as bitplan writes it", "export it again"):
            config = parse_json(read_text(path / CONFIG))["quantization_config"]
            precisions = {unescape_name(name): LEFT_ALONE for name in config["ignore"]}
            tensors, _ = read_safetensors(path / TENSORS)
            codes = {}
            for group in config["config_groups"].values():
                bits = group["weights"]["num_bits"]
                for name in map(unescape_name, group["targets"]):
                    precisions[name] = Precision.weights_only(bits)
                    codes[name] = _unpack_words(tensors, name, bits)
        return ReadBack(precisions, codes)

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """Return True for a folder whose configuration has such a quantization and our plan."""
        if not says_network(path):
            return False
        try:
            return _SIGN in parse_json(read_text(path / CONFIG))
        except FileError:
            return False


def _layouts(model: nn.Module, parts: Mapping[str, Part]) -> dict[str, _Layout]:
    """Return the layout of every quantized weight; raise for a layer whose levels the format cannot hold."""
    quantizers, weights, layouts = quantizers_of(model), weights_of(model), {}
    for name, weight in weights.items():
        quantizer, part = quantizers[name].weight, parts[name]
        if not part.precision.quantizes_weights:
            continue
        assert quantizer is not None
        row = weight.shape[-1]
        size, zeros = 0, False
        if isinstance(quantizer, GroupedWeight):
            size, zeros = quantizer.blocks.width(row), quantizer.zero is not None
            why = f"its rows of {row} are no multiple of its groups of {size}" if row % size else ""
        else:
            why = why_not_uniform(quantizer)
        if why:
            raise InputError(
                f"layer {name!r} has no place in a checkpoint for vllm: {why}; plan … --target vllm:size=…"
            )
        layouts[name] = _Layout(part.precision.weight_bits, size, zeros)
    _check_fused(layouts)
    return layouts


def _check_fused(layouts: Mapping[str, _Layout]) -> None:
    """Raise for layers that vLLM runs as one and whose layouts differ."""
    first: dict[str, str] = {}
    for name, layout in layouts.items():
        fused_name = name_fused_layer(name)
        other = first.setdefault(fused_name, name) if fused_name else name
        if layouts[other] != layout:
            raise InputError(f"vllm runs {other} and {name} as one, and they differ: {layouts[other]} and {layout}")


def _config(parts: Mapping[str, Part], layouts: Mapping[str, _Layout]) -> dict[str, Any]:
    groups: dict[_Layout, list[str]] = defaultdict(list)
    for name, layout in layouts.items():
        groups[layout].append(escape_name(name))
    return {
        "quant_method": _METHOD,
        "format": _FORMAT,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {
            f"group_{index}": {
                "targets": names,
                "weights": layout.scheme,
                "input_activations": None,
                "output_activations": None,
                "format": _FORMAT,
            }
            for index, (layout, names) in enumerate(groups.items())
        },
        "ignore": [escape_name(name) for name in parts if name not in layouts],
    }


def _tensors(model: nn.Module, layouts: Mapping[str, _Layout]) -> dict[str, Tensor]:
    """Return the tensors of the file: codes with their scales, and all others in the narrowest exact type."""
    quantizers, codes, weights = quantizers_of(model), integer_weights(model), weights_of(model)
    half = all(_is_half(_steps(quantizers[name].weight, weights[name], layouts[name])) for name in layouts)
    if not half:
        _log.warning("steps are no float16 numbers, so they take 32 bits each: quantize with groups:…,half=true")
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, value in model.state_dict().items():
        layer, place = layer_of(name), (value.data_ptr(), value.shape)
        if layer_of_quantizer(name) is not None or (value.numel() and place in seen):
            continue
        seen.add(place)
        if layer in layouts:
            kind = torch.float16 if half else torch.float32
            tensors |= _pack_layer(layer, codes[layer], quantizers[layer].weight, weights[layer], layouts[layer], kind)
            continue
        if layer in codes:
            value = quantizers[layer].weight.values(codes[layer])  # type: ignore[union-attr]
        value = value.detach().cpu()
        tensors[name] = value.to(narrow_of(value)).contiguous()
    return tensors


def _pack_layer(
    name: str, codes: Tensor, quantizer: Any, weight: Tensor, layout: _Layout, kind: torch.dtype
) -> dict[str, Tensor]:
    """Return the tensors of one layer."""
    tensors = {
        f"{name}.weight_packed": _pack_words(codes.cpu(), layout.bits),
        f"{name}.weight_scale": _steps(quantizer, weight, layout).to(kind),
        f"{name}.weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
    }
    if layout.zeros:
        zero = quantizer.zero.detach().cpu().to(torch.int8)
        tensors[f"{name}.weight_zero_point"] = _pack_words(zero.t().contiguous(), layout.bits).t().contiguous()
    return tensors


def _steps(quantizer: WeightQuantizer | None, weight: Tensor, layout: _Layout) -> Tensor:
    """(rows, groups), or (rows, 1)."""
    assert quantizer is not None
    if layout.size:
        return quantizer.in_use(weight).detach().cpu().float().contiguous()
    return quantizer.steps_for(weight).expand(weight.shape)[:, :1].detach().cpu().float().contiguous()


def _is_half(steps: Tensor) -> bool:
    return torch.equal(steps.half().float(), steps)


def _pack_words(codes: Tensor, bits: int) -> Tensor:
    """Signed codes (rows, row) → int32 (rows, words), without gaps in a row, the first in the lowest bits."""
    rows, row = codes.shape
    padded = F.pad(codes, (0, -row % 32))
    packed = pack(padded, bits).view(rows, -1).view(torch.int32)
    return packed[:, : -(-row * bits // 32)].contiguous()


def _unpack_words(tensors: Mapping[str, Tensor], name: str, bits: int) -> Tensor:
    packed = tensors[f"{name}.weight_packed"]
    rows, row = tensors[f"{name}.weight_shape"].tolist()
    padded = F.pad(packed, (0, -(-row // 32) * bits - packed.shape[1])).contiguous()
    codes = unpack(padded.view(torch.uint8).flatten(), bits, rows * -(-row // 32) * 32)
    return codes.view(rows, -1)[:, :row].contiguous()


def _compute_type(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the type that a network of these tensors is computed in."""
    kinds = {value.dtype for value in tensors.values() if value.is_floating_point()}
    if torch.float32 in kinds or kinds == {torch.float16, torch.bfloat16}:
        return "float32"
    return "bfloat16" if torch.bfloat16 in kinds else "float16"
