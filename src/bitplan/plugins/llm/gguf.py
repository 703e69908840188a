"""gguf: a language model for llama.cpp, with the codes as they were trained, each weight in a type that holds them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bitplan.adapters.gguf import (
    Entry,
    GgufTensor,
    check_gguf,
    entry_of,
    floats_of,
    names_in_gguf,
    read_header,
    read_tensors,
    text_entry,
    write_gguf,
)
from bitplan.adapters.tokenizers import TOKENIZER, tokenizer_text
from bitplan.adapters.transformers import CUT
from bitplan.core.errors import FileError, InputError
from bitplan.core.naming import layer_of, layer_of_quantizer
from bitplan.core.parsing import parse_json, parsing
from bitplan.core.records import Plan
from bitplan.costs.files import BLOCKS, BLOCKS_WITH_ZEROS
from bitplan.exporters.base import Execution, Exporter, ReadBack, Source
from bitplan.models.file_tensors import narrow_of
from bitplan.plugins.llm.llama import LlamaFile
from bitplan.quant.convert import integer_weights, quantizers_of, weights_of
from bitplan.quant.quantizers import why_no_multiples
from bitplan.quant.weight_groups import GroupedWeight
from bitplan.weights.pretrained_folders import is_gguf

# --- gguf: a language model for llama.cpp, with the codes as they were trained, each weight in a type that holds
# them.

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


# --- What a GGUF file says of its network: sizes by a configuration of Hugging Face's, and the tokenizer beside it.
LLAMA_LIKE = ("llama", "mistral")
"""Kinds of networks of transformers' that are llama in GGUF: their queries and keys are turned."""
_NORMAL, _CONTROL, _OWN, _UNUSED = 1, 3, 4, 5  # kinds of tokens in llama.cpp
_ADVICE = "make a GGUF file of it by llama.cpp's convert_hf_to_gguf.py and give that, --format gguf:origin=FILE.gguf"


def header_of(config: Any, folder: Path | None, name: str) -> dict[str, Entry]:
    """The entries for a network of transformers' with this configuration, its tokenizer from its folder."""
    kind = getattr(config, "model_type", None)
    if kind not in LLAMA_LIKE:
        raise InputError(f"the sizes of a {kind or 'network'} are not known for GGUF, only llama's: {_ADVICE}")
    told = _sizes(config) | _tokenizer(folder, config.vocab_size, getattr(config, CUT, None))
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    for attribute, called in ids.items():
        value = getattr(config, attribute, None)
        if type(value) is int:
            told[f"tokenizer.ggml.{called}_token_id"] = value
    return {key: entry_of(value) for key, value in ({"general.name": name} | told).items()}


def _sizes(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    scaled = rope.get("rope_type", "default")
    if scaled != "default" or "rope_theta" not in rope:
        raise InputError(f"its positions are scaled ({scaled}), which needs more than its sizes: {_ADVICE}")
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": width,
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    return {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in sizes.items()}


def _tokenizer(folder: Path | None, words: int, cut: str | None) -> dict[str, Any]:
    """Byte pairs as llama.cpp has them; of other tokenizers the file says nothing, and is run on tokens.

    `cut` is how a text is cut before, as the GGUF file said that the network was read from.
    """
    path = None if folder is None else folder / TOKENIZER
    none = {"tokenizer.ggml.model": "no_vocab"}
    if path is None or not path.is_file():
        _log.warning("there is no %s beside the network, so the GGUF file has no tokenizer", TOKENIZER)
        return none
    text = tokenizer_text(path.parent)
    with parsing(path, "a tokenizer", "fetch it again"):
        content = parse_json(text)
        model, before = content["model"], _steps(content.get("pre_tokenizer"))
        if model.get("type") != "BPE" or not any(step["type"] == "ByteLevel" for step in before):
            _log.warning("%s is no tokenizer of byte pairs, so the GGUF file has none: %s", path, _ADVICE)
            return none
        tokens, kinds = _tokens(model["vocab"], content.get("added_tokens") or [], words)
        merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    told = {
        "model": "gpt2",
        "pre": cut or _cut(before),
        "tokens": tokens,
        "token_type": kinds,
        "merges": merges or [""],
    }
    return {f"tokenizer.ggml.{key}": value for key, value in told.items()} | {"tokenizer.ggml.add_bos_token": False}


def _tokens(vocabulary: Mapping[str, int], added: list[dict[str, Any]], words: int) -> tuple[list[str], list[int]]:
    tokens, kinds = [f"[PAD{place}]" for place in range(words)], [_UNUSED] * words
    told = {place: (token, _NORMAL) for token, place in vocabulary.items()}
    told |= {one["id"]: (one["content"], _CONTROL if one.get("special") else _OWN) for one in added}
    for place, (token, kind) in told.items():
        if place < words:
            tokens[place], kinds[place] = token, kind
    return tokens, kinds


def _steps(before: Any) -> list[dict[str, Any]]:
    """The steps of a pre-tokenizer."""
    if before is None:
        return []
    steps: list[dict[str, Any]] = before["pretokenizers"] if before["type"] == "Sequence" else [before]
    return steps


def _cut(before: list[dict[str, Any]]) -> str:
    """llama.cpp's name of how a text is cut before pairs are joined."""
    patterns = [str(step.get("pattern")) for step in before if step["type"] == "Split"]
    if any(r"\p{N}{1,3}" in pattern for pattern in patterns):
        return "llama-bpe"
    if patterns:
        return "qwen2"
    return "smollm" if any(step["type"] == "Digits" for step in before) else "gpt-2"


# --- Codes in the blocks of GGUF's types, and back: a row of weights is a row of blocks, each with a float16 step.

Bytes = NDArray[np.uint8]
BITS = {kind: bits for table in (BLOCKS, BLOCKS_WITH_ZEROS) for bits, (kind, _, _) in table.items()}
"""Type → the bits of its codes."""
SIZES = {kind: (size, each) for table in (BLOCKS, BLOCKS_WITH_ZEROS) for kind, size, each in table.values()}
"""Type → weights and bytes of a block."""


class Coded(NamedTuple):
    """A weight as codes (rows, row), a step for each, and a zero point for each where there are any."""

    codes: NDArray[np.int8]
    steps: NDArray[np.float32]
    zeros: NDArray[np.float32] | None
    bits: int

    def holds(self, kind: str) -> bool:
        """Whether a type holds it exactly: rows of whole blocks, one step and one zero point in each, float16 both."""
        size, _ = SIZES[kind]
        with_zeros = kind.endswith("_1")
        if BITS[kind] < self.bits or self.codes.shape[1] % size or with_zeros != (self.zeros is not None):
            return False
        each = [self.steps] if self.zeros is None else [self.steps, self.zeros]
        if any((cut(one, size) != cut(one, size)[..., :1]).any() for one in each):
            return False
        steps = cut(self.steps, size)[..., 0]
        if not _is_half(steps):
            return False
        return self.zeros is None or _is_half(self._lowest(size))

    def _lowest(self, size: int) -> NDArray[np.float32]:
        """m of types with zero points: what the code of all zeros stands for."""
        assert self.zeros is not None
        steps, zeros = cut(self.steps, size)[..., 0], cut(self.zeros, size)[..., 0]
        return -(zeros + 2 ** (self.bits - 1)) * steps

    def moved(self, rows: NDArray[np.int64]) -> Coded:
        """The same with its rows in this order."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return Coded(self.codes[rows], self.steps[rows], zeros, self.bits)

    def blocks(self, kind: str) -> Bytes:
        """The bytes of every row."""
        size, _ = SIZES[kind]
        codes, steps = cut(self.codes, size).astype(np.int16), cut(self.steps, size)[..., 0]
        rows = len(codes)
        if kind == "TQ2_0":
            made = np.concatenate([_pairs_of_bits(1 - codes), _half(-steps)], -1)
        elif kind == "Q8_0":
            made = np.concatenate([_half(steps), codes.astype(np.int8).view(np.uint8)], -1)
        else:
            lowest = 2 ** (self.bits - 1) if kind.endswith("_1") else 2 ** (BITS[kind] - 1)
            whole = (codes + lowest).astype(np.uint8)
            parts = [_half(steps)]
            parts += [_half(self._lowest(size))] if kind.endswith("_1") else []
            parts += [_fifth_bits(whole)] if BITS[kind] == 5 else []
            made = np.concatenate([*parts, _nibbles(whole & 15)], -1)
        return made.reshape(rows, -1)


def codes_in(blocks: Bytes, kind: str, bits: int) -> NDArray[np.int8]:
    """The codes in rows of blocks (rows, bytes), of a weight that has so many bits."""
    size, each = SIZES[kind]
    cut_up = blocks.reshape(len(blocks), -1, each)
    if kind == "TQ2_0":
        spread = cut_up[..., : size // 4].reshape(*cut_up.shape[:2], -1, 1, 32) >> _SHIFTS
        found = 1 - (spread & 3).astype(np.int16)
    elif kind == "Q8_0":
        found = cut_up[..., 2:].view(np.int8).astype(np.int16)
    else:
        lowest = 2 ** (bits - 1) if kind.endswith("_1") else 2 ** (BITS[kind] - 1)
        nibbles = cut_up[..., -16:]
        whole = np.concatenate([nibbles & 15, nibbles >> 4], -1).astype(np.int16)
        if BITS[kind] == 5:
            fifth = np.unpackbits(cut_up[..., -20:-16], axis=-1, bitorder="little")
            whole += fifth.astype(np.int16) << 4
        found = whole - lowest
    return found.reshape(len(blocks), -1).astype(np.int8)


_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(4, 1)


def _pairs_of_bits(whole: NDArray[np.int16]) -> Bytes:
    """(…, 256) of 0 to 3 → 64 bytes: four rows of 32 in a byte's pairs of bits, twice."""
    quarters = whole.astype(np.uint8).reshape(*whole.shape[:-1], -1, 4, 32) << _SHIFTS
    joined: Bytes = np.bitwise_or.reduce(quarters, axis=-2).reshape(*whole.shape[:-1], -1)
    return joined


def _nibbles(whole: Bytes) -> Bytes:
    """(…, 32) of 0 to 15 → 16 bytes: the first half low, the second high."""
    joined: Bytes = whole[..., :16] | whole[..., 16:] << np.uint8(4)
    return joined


def _fifth_bits(whole: Bytes) -> Bytes:
    """(…, 32) → the fifth bits in 4 bytes."""
    return np.packbits(whole >> 4, axis=-1, bitorder="little")


def _half(values: NDArray[np.float32]) -> Bytes:
    """(…) → the two bytes of each as float16."""
    return np.ascontiguousarray(values[..., None].astype("<f2")).view(np.uint8)


def _is_half(values: NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16).astype(np.float32) == values).all())


def cut(values: NDArray[Any], size: int) -> NDArray[Any]:
    """(rows, row) → (rows, blocks, size)."""
    return values.reshape(len(values), -1, size)
