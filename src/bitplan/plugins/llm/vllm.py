"""vllm: a folder of Hugging Face's with packed codes, as the library compressed-tensors, transformers and vLLM read it.

Codes, steps and zero points are those of the network, not found again: format `pack-quantized`, one quantization config
with a group for each precision. vLLM runs q/k/v and gate/up as one, so these must agree.
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
from bitplan.core.parsing import parse_json, parsing
from bitplan.core.precision import LEFT_ALONE, LEFT_ALONE_BITS, Precision
from bitplan.core.records import TENSORS
from bitplan.exporters.base import Exporter, ReadBack, Source
from bitplan.exporters.bit_packing import pack, unpack
from bitplan.models.file_tensors import narrow_of
from bitplan.plugins.runtimes.recipes import (
    Expressible,
    Part,
    RecipeExporter,
    fit,
    grouped,
    literal,
    read_json,
    reading,
    unliteral,
    write_json,
)
from bitplan.quant.convert import integer_weights, quantizers_of, weights_of
from bitplan.quant.quantizers import WeightQuantizer, why_no_multiples
from bitplan.quant.weight_groups import GroupedWeight
from bitplan.store.files import read_text
from bitplan.weights.pretrained_folders import CONFIG, says_network
from bitplan.weights.torch_tensors import read_safetensors, write_tensors

# --- compressed-tensors: the `quantization_config` that llm-compressor, transformers and vLLM read.

_NAME = "compressed-tensors"
_EIGHT = Precision.parse("w8a8")


def fused(name: str) -> str | None:
    """What vLLM runs as one: q/k/v, gate/up, and all experts of a block; their schemes must be equal."""
    experts = re.match(r"(.*\.experts)\.\d+\.", name)
    if experts:
        return experts[1]
    found = re.fullmatch(r"(.*\.)((?P<qkv>[qkv])|gate|up)_proj", name)
    if not found:
        return None
    if found["qkv"] and re.search(r"encoder_attn|cross_?attn", name):  # its keys and values read another tensor
        return None if found["qkv"] == "q" else f"{found[1]}kv_proj"
    return found[1] + ("qkv_proj" if found["qkv"] else "gate_up_proj")


CONFIG_TARGET = Expressible(_NAME, weight_bits=lambda part: range(2, 9), act_bits=(8,), one=fused)


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
                groups[part.precision, self._in_groups(part)].append(literal(part.name))
        config = {
            "quant_method": _NAME,
            "config_groups": {
                f"group_{index}": self._scheme(precision, in_groups, names)
                for index, ((precision, in_groups), names) in enumerate(groups.items())
            },
            "ignore": [literal(part.name) for part in parts if part.precision.left_alone],
        }
        write_json(path, {"quantization_config": config})

    def _in_groups(self, part: Part) -> bool:
        """Rows that cannot be cut, and w8a8 (whose kernels want it so), have one step per output channel."""
        return part.precision != _EIGHT and grouped(part, self.group_size)

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
        """The precisions of the groups, and 16 bits for what is ignored."""
        with reading(path, _NAME):
            config = read_json(path)["quantization_config"]
            found = {unliteral(name): LEFT_ALONE for name in config["ignore"]}
            for group in config["config_groups"].values():
                inputs = group["input_activations"]
                act = inputs["num_bits"] if inputs else LEFT_ALONE_BITS
                precision = Precision(weight_bits=group["weights"]["num_bits"], act_bits=act)
                found |= {unliteral(name): precision for name in group["targets"]}
        return ReadBack(found)


# --- vllm: a folder of Hugging Face's with packed codes, as the library compressed-tensors, transformers and vLLM
# read it.

_log = logging.getLogger(__name__)
_METHOD, _FORMAT = "compressed-tensors", "pack-quantized"
_SIGN = "bitplan"  # by which verify knows the folder
TARGET = Expressible("vllm", weight_bits=lambda part: range(2, 9), kinds=("linear",), one=fused)


class _Layout(NamedTuple):
    """What the layers of one config group share; a size of 0 is one step for each row."""

    bits: int
    size: int
    zeros: bool

    @property
    def scheme(self) -> dict[str, Any]:
        """As compressed-tensors writes it."""
        told: dict[str, Any] = {"num_bits": self.bits, "type": "int", "symmetric": not self.zeros, "dynamic": False}
        return told | ({"strategy": "group", "group_size": self.size} if self.size else {"strategy": "channel"})


@final
@dataclass(frozen=True)
class Vllm(Exporter):
    """A checkpoint of packed codes for vLLM and transformers: linear layers, weights only.

    `widen` stores linked layers that differ in the wider of their places, and leaves float what has none.
    """

    widen: bool = False
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
            "dtype": _widest(tensors),
            _SIGN: json.loads(source.plan.to_json()),
        }
        (path / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        write_tensors(tensors, path / TENSORS, {"format": "pt"})
        if source.folder is not None and (source.folder / TOKENIZER).is_file():
            (path / TOKENIZER).write_text(tokenizer_text(source.folder), encoding="utf-8")

    def read(self, path: Path) -> ReadBack:
        """The precisions of the config groups, and every code."""
        with parsing(path / CONFIG, "a configuration as bitplan writes it", "export it again"):
            config = parse_json(read_text(path / CONFIG))["quantization_config"]
            found = {unliteral(name): LEFT_ALONE for name in config["ignore"]}
            tensors, _ = read_safetensors(path / TENSORS)
            codes = {}
            for group in config["config_groups"].values():
                bits = group["weights"]["num_bits"]
                for name in map(unliteral, group["targets"]):
                    found[name] = Precision.weights_only(bits)
                    codes[name] = _unpacked(tensors, name, bits)
        return ReadBack(found, codes)

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """A folder whose configuration has such a quantization and our plan."""
        if not says_network(path):
            return False
        try:
            return _SIGN in parse_json(read_text(path / CONFIG))
        except FileError:
            return False


def _layouts(model: nn.Module, parts: Mapping[str, Part]) -> dict[str, _Layout]:
    """How the weight of every layer lies that has a place there; one whose levels have none is refused by name."""
    quantizers, weights, found = quantizers_of(model), weights_of(model), {}
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
            why = why_no_multiples(quantizer)
        if why:
            raise InputError(
                f"layer {name!r} has no place in a checkpoint for vllm: {why}; plan … --target vllm:size=…"
            )
        found[name] = _Layout(part.precision.weight_bits, size, zeros)
    _check_fused(found)
    return found


def _check_fused(layouts: Mapping[str, _Layout]) -> None:
    """Refuse layers that vLLM runs as one and that lie differently."""
    first: dict[str, str] = {}
    for name, layout in layouts.items():
        one = fused(name)
        other = first.setdefault(one, name) if one else name
        if layouts[other] != layout:
            raise InputError(f"vllm runs {other} and {name} as one, and they differ: {layouts[other]} and {layout}")


def _config(parts: Mapping[str, Part], layouts: Mapping[str, _Layout]) -> dict[str, Any]:
    groups: dict[_Layout, list[str]] = defaultdict(list)
    for name, layout in layouts.items():
        groups[layout].append(literal(name))
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
        "ignore": [literal(name) for name in parts if name not in layouts],
    }


def _tensors(model: nn.Module, layouts: Mapping[str, _Layout]) -> dict[str, Tensor]:
    """What the file holds: codes with what belongs to them, and all else in the narrowest type that has its values."""
    quantizers, codes, weights = quantizers_of(model), integer_weights(model), weights_of(model)
    half = all(_is_half(_steps(quantizers[name].weight, weights[name], layouts[name])) for name in layouts)
    if not half:
        _log.warning("steps are no float16 numbers, so they take 32 bits each: quantize with groups:…,half=true")
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, value in model.state_dict().items():
        layer, place = layer_of(name), (value.data_ptr(), value.shape)
        if layer_of_quantizer(name) is not None or (value.numel() and place in seen):
            continue
        seen.add(place)
        if layer in layouts:
            kind = torch.float16 if half else torch.float32
            found |= _packed(layer, codes[layer], quantizers[layer].weight, weights[layer], layouts[layer], kind)
            continue
        whole = quantizers[layer].weight.values(codes[layer]) if layer in codes else value  # type: ignore[union-attr]
        found[name] = whole.detach().cpu().to(narrow_of(whole.detach().cpu())).contiguous()
    return found


def _packed(
    name: str, codes: Tensor, quantizer: Any, weight: Tensor, layout: _Layout, kind: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of one layer."""
    found = {
        f"{name}.weight_packed": _words(codes.cpu(), layout.bits),
        f"{name}.weight_scale": _steps(quantizer, weight, layout).to(kind),
        f"{name}.weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
    }
    if layout.zeros:
        zero = quantizer.zero.detach().cpu().to(torch.int8)
        found[f"{name}.weight_zero_point"] = _words(zero.t().contiguous(), layout.bits).t().contiguous()
    return found


def _steps(quantizer: WeightQuantizer | None, weight: Tensor, layout: _Layout) -> Tensor:
    """(rows, groups), or (rows, 1)."""
    assert quantizer is not None
    if layout.size:
        return quantizer.in_use(weight).detach().cpu().float().contiguous()
    return quantizer.steps_for(weight).expand(weight.shape)[:, :1].detach().cpu().float().contiguous()


def _is_half(steps: Tensor) -> bool:
    return torch.equal(steps.half().float(), steps)


def _words(codes: Tensor, bits: int) -> Tensor:
    """Signed codes (rows, row) → int32 (rows, words), without gaps in a row, the first in the lowest bits."""
    rows, row = codes.shape
    filled = F.pad(codes, (0, -row % 32))
    packed = pack(filled, bits).view(rows, -1).view(torch.int32)
    return packed[:, : -(-row * bits // 32)].contiguous()


def _unpacked(tensors: Mapping[str, Tensor], name: str, bits: int) -> Tensor:
    packed = tensors[f"{name}.weight_packed"]
    rows, row = tensors[f"{name}.weight_shape"].tolist()
    filled = F.pad(packed, (0, -(-row // 32) * bits - packed.shape[1])).contiguous()
    codes = unpack(filled.view(torch.uint8).flatten(), bits, rows * -(-row // 32) * 32)
    return codes.view(rows, -1)[:, :row].contiguous()


def _widest(tensors: Mapping[str, Tensor]) -> str:
    """The type that a network of these is computed in."""
    kinds = {value.dtype for value in tensors.values() if value.is_floating_point()}
    if torch.float32 in kinds or kinds == {torch.float16, torch.bfloat16}:
        return "float32"
    return "bfloat16" if torch.bfloat16 in kinds else "float16"
