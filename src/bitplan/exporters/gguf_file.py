"""gguf: a language model for llama.cpp, with the codes as they were trained, each weight in a type that holds them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor, nn

from bitplan.adapters.gguf import (
    Entry,
    GgufTensor,
    check_gguf,
    floats_of,
    names_in_gguf,
    read_header,
    read_tensors,
    text_entry,
    write_gguf,
)
from bitplan.adapters.llama import LlamaFile
from bitplan.adapters.pretrained import is_gguf
from bitplan.core.errors import FileError, InputError
from bitplan.core.naming import layer_of, layer_of_quantizer
from bitplan.core.parsing import parsing
from bitplan.core.records import Plan
from bitplan.exporters.base import Execution, Exporter, ReadBack, Source
from bitplan.exporters.gguf_blocks import BITS, Coded, codes_in
from bitplan.exporters.gguf_header import header_of
from bitplan.models.tensors import narrow_of
from bitplan.quant.convert import integer_weights, quantizers_of, weights_of
from bitplan.quant.methods.groups import GroupedWeight
from bitplan.quant.quantizing import why_no_multiples

_log = logging.getLogger(__name__)
_PLAN = "bitplan.plan"
_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # whose tensors are the network's own, but for what llama turns
_TURNED = {"attn_q": "head_count", "attn_k": "head_count_kv"}
_FLOATS = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
_SHOWN = 4


@final
@dataclass(frozen=True)
class Gguf(Exporter):
    """GGUF with codes in Q8_0, Q5_0, Q4_0, Q4_1, Q5_1 and TQ2_0, steps and all, as llama.cpp runs them.

    `origin` is the GGUF file that the network was read from, or another of the same network: its header and tokenizer
    are taken, and its types where nothing is quantized. Without one, both are made of the checkpoint's folder. `widen`
    stores what no such type holds in a wider one, or as floats.
    """

    origin: str = ""
    widen: bool = False
    needs_model: ClassVar[bool] = True
    suffix: ClassVar[str] = ".gguf"

    def write(self, source: Source, path: Path) -> None:
        """Write every tensor of the network, and in the header the plan."""
        model = source.model
        assert model is not None
        header, given = self._header(source), self._given()
        names = _TensorNames(header, model)
        coded = _coded(model)
        kinds = _kinds(coded, widen=self.widen)
        tensors = {}
        for name, value in _state(model):
            own, layer = names[name], layer_of(name)
            turned = names.turned(own, value)
            kind = kinds.get(layer)
            if kind is None:
                tensors[own] = _left(turned, given.get(own))
            else:
                rows = names.turn(own, torch.arange(len(value))).numpy()
                moved = coded[layer].moved(rows)
                tensors[own] = GgufTensor(kind, tuple(value.shape), moved.blocks(kind))
        plan = json.dumps(json.loads(source.plan.to_json()))
        write_gguf(path, header | {_PLAN: text_entry(plan)}, tensors)

    def _header(self, source: Source) -> dict[str, Entry]:
        if self.origin:
            place = Path(self.origin)
            if not place.is_file() or not is_gguf(place):
                raise FileError(f"origin={self.origin} is no GGUF file, whose header could be taken")
            check_gguf(place)
            header = read_header(place)
            return {key: entry for key, entry in header.items() if not key.startswith(("split.", "bitplan."))}
        config = getattr(source.model, "config", None)
        if not hasattr(config, "model_type"):
            raise InputError(
                f"gguf holds language models of transformers', and {source.plan.model} has no configuration of one, so "
                "every layer of it lacks a name there: export it as packed or onnx"
            )
        return header_of(config, source.folder, source.plan.model)

    def _given(self) -> Mapping[str, GgufTensor]:
        return read_tensors(Path(self.origin)) if self.origin else {}

    def read(self, path: Path) -> ReadBack:
        """The plan in the header, and the codes of every weight that has some."""
        with parsing(path, "a GGUF file as bitplan writes it", "export it again"):
            header, held = read_header(path), read_tensors(path)
            if _PLAN not in header:
                raise FileError(f"{path} is a GGUF file, but not one that bitplan wrote")
            plan = Plan.from_json(header[_PLAN].value)
            names = _TensorNames(header, None, [f"{layer}.weight" for layer in plan.precisions])
            codes = {}
            for layer, precision in plan.precisions.items():
                own = names.found.get(f"{layer}.weight", "")
                if own in held and held[own].kind in BITS and precision.quantizes_weights:
                    found = codes_in(held[own].data, held[own].kind, precision.weight_bits)
                    codes[layer] = names.turn(own, torch.from_numpy(found), back=True)
        return ReadBack(plan.precisions, codes)

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """A GGUF file whose header has a plan."""
        return path.is_file() and is_gguf(path) and _PLAN in read_header(path)

    def opened(self, path: Path, model: nn.Module) -> Execution:
        """By llama.cpp, which rounds what layers read to 8 bits, so that outputs are near and not equal."""
        why = "llama.cpp rounds activations to 8 bits and keeps keys and values in float16"
        return Execution(_LlamaRun(path), float_inputs=True, rounds=why, axis=-1)


class _LlamaRun(nn.Module):
    """A GGUF file called as the network is: (B, tokens) → (B, tokens, words)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._file: LlamaFile | None = None

    def forward(self, input_ids: Tensor) -> Tensor:
        """Row by row; a longer one opens the file anew."""
        if self._file is None or self._file.tokens < input_ids.shape[1]:
            if self._file is not None:
                self._file.close()
            self._file = LlamaFile(self.path, tokens=input_ids.shape[1], threads=torch.get_num_threads())
        file = self._file
        return torch.stack([torch.from_numpy(file(row.numpy())) for row in input_ids.cpu()])


class _TensorNames:
    """The names of a network's tensors in the file, and how llama.cpp turns the rows of queries and keys."""

    def __init__(self, header: Mapping[str, Entry], model: nn.Module | None, names: list[str] | None = None) -> None:
        self.architecture = str(header["general.architecture"].value)
        if self.architecture not in _ARCHITECTURES:
            raise InputError(
                f"the network is a {self.architecture} in GGUF, whose tensors may be changed there: bitplan writes "
                f"{', '.join(_ARCHITECTURES)}"
            )
        self.header = header
        asked = names if model is None else [name for name, _ in _state(model)]
        self.found = names_in_gguf(self.architecture, self._number("block_count"), asked or [])

    def __getitem__(self, name: str) -> str:
        if name not in self.found:
            raise InputError(f"no tensor of a {self.architecture} in GGUF is known for {name!r}")
        return self.found[name]

    def turned(self, own: str, value: Tensor) -> Tensor:
        """A tensor as the file has it."""
        return self.turn(own, value.detach().cpu())

    def turn(self, own: str, rows: Tensor, *, back: bool = False) -> Tensor:
        """Rows of queries and keys: Hugging Face keeps the features of a head in halves, llama.cpp in pairs."""
        key = _TURNED.get(own.split(".")[-2] if own.startswith("blk.") else "")
        if key is None or self.architecture != "llama":
            return rows
        heads = self._number(f"attention.{key}")
        shape = (heads, -1, 2) if back else (heads, 2, -1)
        return rows.unflatten(0, shape).transpose(1, 2).flatten(0, 2)

    def _number(self, key: str) -> int:
        entry = self.header.get(f"{self.architecture}.{key}")
        if entry is None or not isinstance(entry.value, int):
            raise InputError(f"the header of the GGUF file does not say {self.architecture}.{key}")
        return entry.value


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the network itself, each once: a tied one under its first name."""
    seen: set[tuple[int, torch.Size]] = set()
    for name, value in model.state_dict().items():
        place = (value.data_ptr(), value.shape)
        if layer_of_quantizer(name) is None and not (value.numel() and place in seen):
            seen.add(place)
            yield name, value


def _coded(model: nn.Module) -> dict[str, Coded]:
    """The codes of every quantized weight with its steps and zero points."""
    quantizers, weights, found = quantizers_of(model), weights_of(model), {}
    for layer, codes in integer_weights(model).items():
        quantizer, weight = quantizers[layer].weight, weights[layer]
        assert quantizer is not None
        zero = quantizer.zero if isinstance(quantizer, GroupedWeight) else None
        why = "" if isinstance(quantizer, GroupedWeight) else why_no_multiples(quantizer)
        if why or weight.dim() != 2:
            raise InputError(f"layer {layer!r} has no place in GGUF: {why or f'its weight is {tuple(weight.shape)}'}")
        steps = quantizer.steps_for(weight).expand(weight.shape)
        spread = None if zero is None else quantizer.blocks.spread(zero, weight)  # type: ignore[union-attr, operator]
        zeros = None if spread is None else spread.cpu().numpy()
        found[layer] = Coded(codes.cpu().numpy(), steps.cpu().numpy(), zeros, quantizer.bits)
    return found


def _kinds(coded: Mapping[str, Coded], *, widen: bool) -> dict[str, str]:
    """The type of every quantized weight; one that no type of its bits holds is refused by name, or widened aloud."""
    kinds: dict[str, str] = {}
    odd: list[str] = []
    for layer, one in coded.items():
        fitting = sorted((BITS[kind], kind) for kind in BITS if one.holds(kind))
        if fitting:
            kinds[layer] = fitting[0][1]
        if not fitting or fitting[0][0] != one.bits:
            odd.append(f"{layer} at {one.bits} bits in rows of {one.codes.shape[1]} as {kinds.get(layer, 'floats')}")
    shown = "; ".join(odd[:_SHOWN]) + (f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else "")
    if odd and not widen:
        raise InputError(
            f"GGUF has no type that holds exactly: {shown}. Quantize for it (bitplan plan … --target gguf, or "
            "--quantizer gguf), or give --widen (widen=True) to store them so"
        )
    if odd:
        _log.warning("widened for gguf: %s", shown)
    return kinds


def _left(value: Tensor, given: GgufTensor | None) -> GgufTensor:
    """A tensor without codes: as the source has it, where that is the same; vectors are float32."""
    if given is not None and given.shape == tuple(value.shape):
        same = torch.from_numpy(np.array(floats_of(given)))
        if torch.equal(same, value.float()):
            return given
    kind = torch.float32 if value.dim() < 2 else narrow_of(value.float())
    made = value.to(kind).contiguous()
    if kind == torch.bfloat16:
        return GgufTensor("BF16", tuple(value.shape), made.view(torch.uint8).numpy())
    return GgufTensor(_FLOATS[kind], tuple(value.shape), made.numpy())
