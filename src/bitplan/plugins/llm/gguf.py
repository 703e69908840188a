"""GGUF for llama.cpp: the bytes of its blocks, the quantizer that makes their codes, and the exporter."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, final

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
from bitplan.core.parsing import explain_failures, parse_json
from bitplan.core.precision import LEFT_ALONE_BITS
from bitplan.core.records import Plan
from bitplan.costs.files import FLOAT_BYTES, FileForm, Unquantized
from bitplan.exporters.base import Execution, Exporter, ReadBack, Source
from bitplan.models.file_tensors import narrow_of
from bitplan.plugins.llm.llama import LlamaFile
from bitplan.quant.convert import integer_weights, quantizers_of, weights_of
from bitplan.quant.methods import Quantizer
from bitplan.quant.quantizers import WeightQuantizer, why_not_uniform
from bitplan.quant.scales import ScaleSharing
from bitplan.quant.weight_groups import FIRST_AXIS, HALF, GroupedWeight, Grouping, make_grouped_weight
from bitplan.weights.pretrained_folders import is_gguf

if TYPE_CHECKING:
    from bitplan.quant.methods import QuantizeOptions

_log = logging.getLogger(__name__)
_PLAN = "bitplan.plan"
_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # their tensors are stored as they are, but for llama's queries and keys
_HEAD_COUNTS = {"attn_q": "head_count", "attn_k": "head_count_kv"}
_FLOAT_TYPES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
_LLAMA_LIKE = ("llama", "mistral")  # model types of transformers that are llama in GGUF
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # llama.cpp's kinds of tokens
_SHOWN = 4
_ALIGNMENT = 32  # tensors begin at multiples of so many bytes
_ADVICE = "make a GGUF file of it by llama.cpp's convert_hf_to_gguf.py and give that, --format gguf:origin=FILE.gguf"


class BlockType(NamedTuple):
    """A type of GGUF: the bits of its codes, the weights and the bytes of a block, and if it has zero points."""

    bits: int
    size: int
    bytes: int
    has_zeros: bool = False


BLOCK_TYPES = {
    "TQ2_0": BlockType(2, 256, 66),
    "Q4_0": BlockType(4, 32, 18),
    "Q4_1": BlockType(4, 32, 20, has_zeros=True),
    "Q5_0": BlockType(5, 32, 22),
    "Q5_1": BlockType(5, 32, 24, has_zeros=True),
    "Q8_0": BlockType(8, 32, 34),
}


def align_bytes(size: int) -> int:
    """Return the bytes of a tensor with the padding before the next one."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@final
@dataclass(frozen=True)
class GgufForm(FileForm):
    """llama.cpp's blocks: Q8_0, Q5_0, Q4_0, and TQ2_0 if rows are multiples of 256; `zeros` takes Q4_1 and Q5_1."""

    name: ClassVar[str] = "gguf"
    zeros: bool = False

    @property
    def method(self) -> str:
        """`GgufBlocks` with the same zero points."""
        return "gguf:zeros=true" if self.zeros else "gguf"

    def _type_for(self, row: int, bits: int) -> BlockType | None:
        """Return the narrowest type whose blocks fill rows of this length."""
        lacking = {2: False, 8: False}  # these bits have one type each, without zero points
        types = [kind for kind in BLOCK_TYPES.values() if kind.has_zeros == lacking.get(kind.bits, self.zeros)]
        return next((kind for kind in types if kind.bits >= bits and row % kind.size == 0), None)

    def place(self, row: int, bits: int) -> int:
        """Return the bits of the narrowest type whose blocks fill rows of this length."""
        kind = self._type_for(row, bits)
        return LEFT_ALONE_BITS if kind is None else kind.bits

    def taken(self, rows: int, row: int, bits: int) -> int:
        """Return the bytes of the blocks and the padding behind them."""
        kind = self._type_for(row, bits)
        assert kind is not None
        return align_bytes(rows * (row // kind.size) * kind.bytes)

    def left(self, tensor: Unquantized) -> int:
        """Return the bytes as in the file that it comes from; vectors are float32, as llama.cpp wants them."""
        if len(tensor.shape) < 2:
            return align_bytes(tensor.size * FLOAT_BYTES)
        return align_bytes(tensor.size * tensor.narrow if tensor.raw is None else tensor.raw)

    def why_not(self, row: int) -> str:
        """Say that blocks have 32 weights."""
        return f"blocks of gguf have 32 weights, of which rows of {row} are no multiple"


@final
@dataclass(frozen=True)
class GgufBlocks(Quantizer):
    """The blocks of GGUF's types: 256 inputs share a float16 step at 2 bits, 32 at 4, 5 and 8.

    `zeros` gives blocks of 4 and 5 bits a zero point (Q4_1, Q5_1); their steps are so short that float16 holds their
    products with zero points too. Codes of 3, 6 and 7 bits lie in the places of 4 and 8.
    """

    source: ClassVar[str] = "block types of llama.cpp's GGUF: TQ2_0, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0; ours: the fit"
    rows: ClassVar[bool] = True
    anew: ClassVar[bool] = True
    weight_bits: ClassVar[Sequence[int]] = range(2, 9)

    zeros: bool = False

    def weight(self, weight: Tensor, bits: int, shared: ScaleSharing, options: QuantizeOptions) -> WeightQuantizer:
        """Steps with the least squared error; 2 bits in rows that no block of 256 fits have blocks of 32."""
        channels = shared.channels or FIRST_AXIS
        inputs = Grouping(1, channels).rows(weight).shape[1]
        blocks = Grouping(256 if bits == 2 and inputs % 256 == 0 else 32, channels)
        zeros = self.zeros and bits in (3, 4, 5)
        return make_grouped_weight(weight, bits, blocks, zeros=zeros, digits=HALF - max(bits, 4) if zeros else HALF)


@final
@dataclass(frozen=True)
class Gguf(Exporter):
    """GGUF with codes in Q8_0, Q5_0, Q4_0, Q4_1, Q5_1 and TQ2_0, steps and all, as llama.cpp runs them.

    `origin` is the GGUF file that the network was read from, or another of the same network. Its header and tokenizer
    are taken, and its types for tensors that are not quantized. Without it, both come from the checkpoint's folder.
    `widen` stores weights that fit no such type in a wider one, or as floats.
    """

    origin: str = ""
    widen: bool = False
    form: ClassVar[type[GgufForm]] = GgufForm
    needs_model: ClassVar[bool] = True
    suffix: ClassVar[str] = ".gguf"

    def write(self, source: Source, path: Path) -> None:
        """Write every tensor of the network, and in the header the plan."""
        model = source.model
        assert model is not None
        header = self._header(source)
        originals = read_tensors(Path(self.origin)) if self.origin else {}
        state = _unique_tensors(model)
        names = _TensorNames(header, list(state))
        coded = _read_codes(model)
        types = _choose_types(coded, widen=self.widen)
        tensors = {}
        for name, value in state.items():
            stored_name, layer = names[name], layer_of(name)
            if layer in types:
                order = names.reorder(stored_name, torch.arange(len(value))).numpy()
                blocks = coded[layer].reordered(order).blocks(types[layer])
                tensors[stored_name] = GgufTensor(types[layer], tuple(value.shape), blocks)
            else:
                rows = names.reorder(stored_name, value.detach().cpu())
                tensors[stored_name] = _store_floats(rows, originals.get(stored_name))
        plan = json.dumps(json.loads(source.plan.to_json()))
        write_gguf(path, header | {_PLAN: text_entry(plan)}, tensors)

    def _header(self, source: Source) -> dict[str, Entry]:
        if self.origin:
            origin = Path(self.origin)
            if not origin.is_file() or not is_gguf(origin):
                raise FileError(f"origin={self.origin} is no GGUF file, whose header could be taken")
            check_gguf(origin)
            entries = read_header(origin)
            return {key: entry for key, entry in entries.items() if not key.startswith(("split.", "bitplan."))}
        config = getattr(source.model, "config", None)
        if not hasattr(config, "model_type"):
            raise InputError(
                f"gguf holds language models of transformers', and {source.plan.model} has no configuration of one, so "
                "every layer of it lacks a name there: export it as packed or onnx"
            )
        return _make_header(config, source.folder, source.plan.model)

    def read(self, path: Path) -> ReadBack:
        """Return the plan in the header, and the codes of the quantized weights."""
        with explain_failures(path, "a GGUF file as bitplan writes it", "export it again"):
            header, tensors = read_header(path), read_tensors(path)
            if _PLAN not in header:
                raise FileError(f"{path} is a GGUF file, but not one that bitplan wrote")
            plan = Plan.from_json(header[_PLAN].value)
            names = _TensorNames(header, [f"{layer}.weight" for layer in plan.precisions])
            codes = {}
            for layer, precision in plan.precisions.items():
                stored_name = names.stored.get(f"{layer}.weight", "")
                tensor = tensors.get(stored_name)
                if tensor is not None and tensor.kind in BLOCK_TYPES and precision.quantizes_weights:
                    rows = torch.from_numpy(codes_in(tensor.data, tensor.kind, precision.weight_bits))
                    codes[layer] = names.reorder(stored_name, rows, back=True)
        return ReadBack(plan.precisions, codes)

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """Return True for a GGUF file whose header has a plan."""
        return path.is_file() and is_gguf(path) and _PLAN in read_header(path)

    def opened(self, path: Path, model: nn.Module) -> Execution:
        """Run it by llama.cpp, which rounds the inputs of layers to 8 bits, so outputs are near and not equal."""
        why = "llama.cpp rounds activations to 8 bits and keeps keys and values in float16"
        return Execution(_LlamaRun(path), float_inputs=True, rounds=why, axis=-1)


class _LlamaRun(nn.Module):
    """A GGUF file called as the network is: (B, tokens) → (B, tokens, words)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._file: LlamaFile | None = None

    def forward(self, input_ids: Tensor) -> Tensor:
        """Run row by row; a longer row opens the file again."""
        if self._file is None or self._file.tokens < input_ids.shape[1]:
            if self._file is not None:
                self._file.close()
            self._file = LlamaFile(self.path, tokens=input_ids.shape[1], threads=torch.get_num_threads())
        file = self._file
        return torch.stack([torch.from_numpy(file(row.numpy())) for row in input_ids.cpu()])


class _TensorNames:
    """The names of a network's tensors in the file, and the order of rows there."""

    def __init__(self, header: Mapping[str, Entry], names: Sequence[str]) -> None:
        self.header = header
        self.architecture = str(header["general.architecture"].value)
        if self.architecture not in _ARCHITECTURES:
            raise InputError(
                f"the network is a {self.architecture} in GGUF, whose tensors may be changed there: bitplan writes "
                f"{', '.join(_ARCHITECTURES)}"
            )
        self.stored = names_in_gguf(self.architecture, self._number("block_count"), names)

    def __getitem__(self, name: str) -> str:
        if name not in self.stored:
            raise InputError(f"no tensor of a {self.architecture} in GGUF is known for {name!r}")
        return self.stored[name]

    def reorder(self, stored_name: str, rows: Tensor, *, back: bool = False) -> Tensor:
        """Return the rows of queries and keys in the file's order.

        Hugging Face keeps the features of a head in halves, llama.cpp in pairs.
        """
        key = _HEAD_COUNTS.get(stored_name.split(".")[-2] if stored_name.startswith("blk.") else "")
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


def _unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the network without its quantizers; a tied one stands under its first name."""
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, value in model.state_dict().items():
        place = (value.data_ptr(), value.shape)
        if layer_of_quantizer(name) is None and not (value.numel() and place in seen):
            seen.add(place)
            tensors[name] = value
    return tensors


def _read_codes(model: nn.Module) -> dict[str, Coded]:
    """Return the codes of every quantized weight with its steps and zero points."""
    quantizers, weights = quantizers_of(model), weights_of(model)
    coded: dict[str, Coded] = {}
    for layer, codes in integer_weights(model).items():
        quantizer, weight = quantizers[layer].weight, weights[layer]
        assert quantizer is not None
        why, zeros = "", None
        if not isinstance(quantizer, GroupedWeight):
            why = why_not_uniform(quantizer)
        elif quantizer.zero is not None:
            zeros = quantizer.blocks.spread(quantizer.zero, weight).cpu().numpy()
        if why or weight.dim() != 2:
            raise InputError(f"layer {layer!r} has no place in GGUF: {why or f'its weight is {tuple(weight.shape)}'}")
        steps = quantizer.steps_for(weight).expand(weight.shape)
        coded[layer] = Coded(codes.cpu().numpy(), steps.cpu().numpy(), zeros, quantizer.bits)
    return coded


def _choose_types(coded: Mapping[str, Coded], *, widen: bool) -> dict[str, str]:
    """Return the type of every quantized weight; raise if no type of its bits holds it exactly, unless `widen`."""
    types: dict[str, str] = {}
    widened: list[str] = []
    for layer, weight in coded.items():
        fitting = sorted((kind.bits, name) for name, kind in BLOCK_TYPES.items() if weight.fits(name))
        if fitting:
            types[layer] = fitting[0][1]
        if not fitting or fitting[0][0] != weight.bits:
            row = weight.codes.shape[1]
            widened.append(f"{layer} at {weight.bits} bits in rows of {row} as {types.get(layer, 'floats')}")
    shown = "; ".join(widened[:_SHOWN]) + (f" and {len(widened) - _SHOWN} more" if len(widened) > _SHOWN else "")
    if widened and not widen:
        raise InputError(
            f"GGUF has no type that holds exactly: {shown}. Quantize for it (bitplan plan … --target gguf, or "
            "--quantizer gguf), or give --widen (widen=True) to store them so"
        )
    if widened:
        _log.warning("widened for gguf: %s", shown)
    return types


def _store_floats(value: Tensor, original: GgufTensor | None) -> GgufTensor:
    """Return a tensor without codes: the original if it has the same values, else in the narrowest exact type."""
    if original is not None and original.shape == tuple(value.shape) and _holds(original, value):
        return original
    kind = torch.float32 if value.dim() < 2 else narrow_of(value.float())
    stored = value.to(kind).contiguous()
    data = stored.view(torch.uint8) if kind == torch.bfloat16 else stored  # numpy has no bfloat16
    return GgufTensor(_FLOAT_TYPES[kind], tuple(value.shape), data.numpy())


def _holds(tensor: GgufTensor, values: Tensor) -> bool:
    return torch.equal(torch.from_numpy(np.array(floats_of(tensor))), values.float())


# Blocks: a row of weights is a row of blocks, each with a float16 step.

Bytes = NDArray[np.uint8]
_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(4, 1)


class Coded(NamedTuple):
    """A weight as codes (rows, row), a step for each, a zero point for each or None, and the bits of a code."""

    codes: NDArray[np.int8]
    steps: NDArray[np.float32]
    zeros: NDArray[np.float32] | None
    bits: int

    def fits(self, name: str) -> bool:
        """Return True if a type holds it exactly: whole blocks, each with one step and zero point in float16."""
        kind = BLOCK_TYPES[name]
        if kind.bits < self.bits or self.codes.shape[1] % kind.size or kind.has_zeros != (self.zeros is not None):
            return False
        for values in (self.steps,) if self.zeros is None else (self.steps, self.zeros):
            blocks = split_blocks(values, kind.size)
            if (blocks != blocks[..., :1]).any():
                return False
        if not _is_half(split_blocks(self.steps, kind.size)[..., 0]):
            return False
        return self.zeros is None or _is_half(self._minima(kind.size))

    def _minima(self, size: int) -> NDArray[np.float32]:
        """Return the value of the lowest code in each block, which types with zero points store."""
        assert self.zeros is not None
        steps, zeros = split_blocks(self.steps, size)[..., 0], split_blocks(self.zeros, size)[..., 0]
        return -(zeros + 2 ** (self.bits - 1)) * steps

    def reordered(self, order: NDArray[np.int64]) -> Coded:
        """Return the weight with its rows in this order."""
        zeros = None if self.zeros is None else self.zeros[order]
        return Coded(self.codes[order], self.steps[order], zeros, self.bits)

    def blocks(self, name: str) -> Bytes:
        """Return the bytes of every row (rows, bytes)."""
        kind = BLOCK_TYPES[name]
        codes, steps = split_blocks(self.codes, kind.size).astype(np.int16), split_blocks(self.steps, kind.size)[..., 0]
        if name == "TQ2_0":
            parts = [_pack_pairs(1 - codes), _half_bytes(-steps)]
        elif name == "Q8_0":
            parts = [_half_bytes(steps), codes.astype(np.int8).view(np.uint8)]
        else:
            unsigned: Bytes = (codes + _lowest(kind, self.bits)).astype(np.uint8)
            parts = [_half_bytes(steps)]
            if kind.has_zeros:
                parts.append(_half_bytes(self._minima(kind.size)))
            if kind.bits == 5:
                parts.append(np.packbits(unsigned >> 4, axis=-1, bitorder="little"))  # the fifth bits in 4 bytes
            parts.append(_pack_nibbles(unsigned & np.uint8(15)))
        return np.concatenate(parts, -1).reshape(len(codes), -1)


def codes_in(blocks: Bytes, name: str, bits: int) -> NDArray[np.int8]:
    """Return the codes in rows of blocks (rows, bytes), for a weight of so many bits."""
    kind = BLOCK_TYPES[name]
    blocks = blocks.reshape(len(blocks), -1, kind.bytes)
    if name == "TQ2_0":
        shifted = blocks[..., : kind.size // 4].reshape(*blocks.shape[:2], -1, 1, 32) >> _SHIFTS
        codes = 1 - (shifted & 3).astype(np.int16)
    elif name == "Q8_0":
        codes = blocks[..., 2:].view(np.int8).astype(np.int16)
    else:
        nibbles = blocks[..., -16:]
        unsigned = np.concatenate([nibbles & 15, nibbles >> 4], -1).astype(np.int16)
        if kind.bits == 5:
            fifth = np.unpackbits(blocks[..., -20:-16], axis=-1, bitorder="little")
            unsigned += fifth.astype(np.int16) << 4
        codes = unsigned - _lowest(kind, bits)
    return codes.reshape(len(blocks), -1).astype(np.int8)


def _lowest(kind: BlockType, bits: int) -> int:
    """Return the distance of the lowest code from 0: types with zero points count from the weight's own bits."""
    return 2 ** ((bits if kind.has_zeros else kind.bits) - 1)


def _pack_pairs(unsigned: NDArray[np.int16]) -> Bytes:
    """(…, 256) of 0 to 3 → 64 bytes: four rows of 32 in a byte's pairs of bits, twice."""
    quarters = unsigned.astype(np.uint8).reshape(*unsigned.shape[:-1], -1, 4, 32) << _SHIFTS
    packed: Bytes = np.bitwise_or.reduce(quarters, axis=-2).reshape(*unsigned.shape[:-1], -1)
    return packed


def _pack_nibbles(unsigned: Bytes) -> Bytes:
    """(…, 32) of 0 to 15 → 16 bytes: the first half low, the second high."""
    packed: Bytes = unsigned[..., :16] | unsigned[..., 16:] << np.uint8(4)
    return packed


def _half_bytes(values: NDArray[np.float32]) -> Bytes:
    """(…) → the two bytes of each as float16."""
    return np.ascontiguousarray(values[..., None].astype("<f2")).view(np.uint8)


def _is_half(values: NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16).astype(np.float32) == values).all())


def split_blocks(values: NDArray[Any], size: int) -> NDArray[Any]:
    """(rows, row) → (rows, blocks, size)."""
    return values.reshape(len(values), -1, size)


# The header: sizes from a configuration of Hugging Face's, and the tokenizer beside it.


def _make_header(config: Any, folder: Path | None, name: str) -> dict[str, Entry]:
    """Return the entries for a network of transformers' with this configuration and the tokenizer of its folder."""
    kind = getattr(config, "model_type", None)
    if kind not in _LLAMA_LIKE:
        raise InputError(f"the sizes of a {kind or 'network'} are not known for GGUF, only llama's: {_ADVICE}")
    entries = {"general.name": name} | _sizes(config)
    entries |= _tokenizer_entries(folder, config.vocab_size, getattr(config, CUT, None))
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    for attribute, gguf_name in ids.items():
        value = getattr(config, attribute, None)
        if type(value) is int:
            entries[f"tokenizer.ggml.{gguf_name}_token_id"] = value
    return {key: entry_of(value) for key, value in entries.items()}


def _sizes(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    scaling = rope.get("rope_type", "default")
    if scaling != "default" or "rope_theta" not in rope:
        raise InputError(f"its positions are scaled ({scaling}), which needs more than its sizes: {_ADVICE}")
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


def _tokenizer_entries(folder: Path | None, words: int, pre_tokenizer: str | None) -> dict[str, Any]:
    """Return the entries of a byte-pair tokenizer; for others the file has none, and is run on tokens.

    `pre_tokenizer` is llama.cpp's name from the GGUF file that the network was read from.
    """
    path = None if folder is None else folder / TOKENIZER
    without_tokenizer = {"tokenizer.ggml.model": "no_vocab"}
    if path is None or not path.is_file():
        _log.warning("there is no %s beside the network, so the GGUF file has no tokenizer", TOKENIZER)
        return without_tokenizer
    text = tokenizer_text(path.parent)
    with explain_failures(path, "a tokenizer", "fetch it again"):
        content = parse_json(text)
        model, steps = content["model"], _pre_tokenizer_steps(content.get("pre_tokenizer"))
        if model.get("type") != "BPE" or not any(step["type"] == "ByteLevel" for step in steps):
            _log.warning("%s is no tokenizer of byte pairs, so the GGUF file has none: %s", path, _ADVICE)
            return without_tokenizer
        tokens, kinds = _list_tokens(model["vocab"], content.get("added_tokens") or [], words)
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    entries = {
        "model": "gpt2",
        "pre": pre_tokenizer or _name_pre_tokenizer(steps),
        "tokens": tokens,
        "token_type": kinds,
        "merges": merges or [""],
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in entries.items()}


def _list_tokens(vocabulary: Mapping[str, int], added: list[dict[str, Any]], words: int) -> tuple[list[str], list[int]]:
    """Return the text and the kind of each token; numbers without a token are padding."""
    tokens, kinds = [f"[PAD{number}]" for number in range(words)], [_UNUSED] * words
    entries = {number: (token, _NORMAL) for token, number in vocabulary.items()}
    entries |= {token["id"]: (token["content"], _CONTROL if token.get("special") else _USER_DEFINED) for token in added}
    for number, (token, kind) in entries.items():
        if number < words:
            tokens[number], kinds[number] = token, kind
    return tokens, kinds


def _pre_tokenizer_steps(pre_tokenizer: Any) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    return pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]


def _name_pre_tokenizer(steps: list[dict[str, Any]]) -> str:
    """Return llama.cpp's name of the way a text is split before pairs are merged."""
    patterns = [str(step.get("pattern")) for step in steps if step["type"] == "Split"]
    if any(r"\p{N}{1,3}" in pattern for pattern in patterns):
        return "llama-bpe"
    if patterns:
        return "qwen2"
    return "smollm" if any(step["type"] == "Digits" for step in steps) else "gpt-2"
