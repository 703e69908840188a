"""llama.cpp: the file for `llama-quantize --tensor-type-file`, one `pattern=type` a line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

from bitplan.core.errors import FileError, InputError
from bitplan.core.precision import LEFT_ALONE_BITS, Precision
from bitplan.exporters.base import ReadBack, Source
from bitplan.plugins.runtimes.recipes import Expressible, Part, RecipeExporter, fit
from bitplan.store.files import read_text

_NAME = "llama.cpp"

# Bits → type, for rows of whole blocks of 256 weights, and for those of whole blocks of 32 only.
_BLOCKS_256 = {2: "q2_K", 3: "q3_K", 4: "q4_K", 5: "q5_K", 6: "q6_K", 8: "q8_0", LEFT_ALONE_BITS: "f16"}
_BLOCKS_32 = {4: "q4_0", 5: "q5_0", 8: "q8_0", LEFT_ALONE_BITS: "f16"}
_BITS = {kind: bits for types in (_BLOCKS_256, _BLOCKS_32) for bits, kind in types.items()}

_ENDS = {
    r"(model\.)?embed_tokens|(transformer\.)?wte|tok_embeddings": "token_embd",
    r"lm_head|output": "output",
}
_IN_BLOCK = {
    r"(self_attn|attention|attn)\.(q_proj|wq)": "attn_q",
    r"(self_attn|attention|attn)\.(k_proj|wk)": "attn_k",
    r"(self_attn|attention|attn)\.(v_proj|wv)": "attn_v",
    r"(self_attn|attention|attn)\.(o_proj|wo|c_proj)": "attn_output",
    r"(self_attn\.qkv_proj|attn\.c_attn)": "attn_qkv",
    r"(mlp\.gate_proj|feed_forward\.w1)": "ffn_gate",
    r"(mlp\.down_proj|feed_forward\.w2|mlp\.c_proj)": "ffn_down",
    r"(mlp\.up_proj|feed_forward\.w3|mlp\.c_fc|mlp\.gate_up_proj)": "ffn_up",
    r"(mlp|block_sparse_moe)\.experts\.(\d+\.)?(gate_proj|w1)": "ffn_gate_exps",
    r"(mlp|block_sparse_moe)\.experts\.(\d+\.)?(down_proj|w2)": "ffn_down_exps",
    r"(mlp|block_sparse_moe)\.experts\.(\d+\.)?(up_proj|w3)": "ffn_up_exps",
    r"mlp\.shared_experts?\.gate_proj": "ffn_gate_shexp",
    r"mlp\.shared_experts?\.down_proj": "ffn_down_shexp",
    r"mlp\.shared_experts?\.up_proj": "ffn_up_shexp",
    r"(mlp|block_sparse_moe)\.gate": "ffn_gate_inp",
}
_BLOCK = re.compile(r"(?:(?:language_)?model\.|transformer\.)*(?:layers|h)\.(\d+)\.(.+)")
_OWN = re.compile(r"blk\.\d+\.[a-z0-9_]+|token_embd|output")
_NEVER = ("ffn_gate_inp",)  # llama-quantize leaves it as it is


def tensor_of(layer: str) -> str | None:
    """Return the tensor of a layer in a GGUF file, without ".weight", for llama-like models and GPT-2, or None."""
    if _OWN.fullmatch(layer):
        return layer
    block = _BLOCK.fullmatch(layer)
    if block:
        inside = next((tensor for pattern, tensor in _IN_BLOCK.items() if re.fullmatch(pattern, block[2])), None)
        return inside and f"blk.{int(block[1])}.{inside}"
    return next((tensor for pattern, tensor in _ENDS.items() if re.fullmatch(pattern, layer)), None)


def _types(part: Part) -> dict[int, str]:
    """Return the types that rows of this length can have; for an unknown length, those of most models."""
    if (tensor_of(part.name) or "").endswith(_NEVER) or part.row % 32:
        return {LEFT_ALONE_BITS: "f16"}
    return _BLOCKS_32 if part.row % 256 else _BLOCKS_256


TARGET = Expressible(
    _NAME,
    weight_bits=lambda part: tuple(_types(part)),
    kinds=("linear", "embedding", "(in, out) matrix", "stack of experts"),
    one=tensor_of,
)


@final
@dataclass(frozen=True)
class LlamaCpp(RecipeExporter):
    """Weights only: k-quants where the rows allow them, else the older types of as many bits."""

    widen: bool = False
    suffix: ClassVar[str] = ".txt"
    starts_with: ClassVar[bytes] = b"^"

    def write(self, source: Source, path: Path) -> None:
        """Write lines such as `^blk\\.0\\.attn_q\\.weight$=q4_K`."""
        parts = fit(source, TARGET, widen=self.widen)
        unknown = [part.name for part in parts if tensor_of(part.name) is None]
        if unknown:
            shown = ", ".join(unknown[:4]) + (f" and {len(unknown) - 4} more" if len(unknown) > 4 else "")
            raise InputError(
                f"no tensor of llama.cpp is known for {shown}: bitplan knows the names of llama-like models"
            )
        lines = {f"^{re.escape(f'{tensor_of(part.name)}.weight')}$={self._type(part)}" for part in parts}
        path.write_text("".join(f"{line}\n" for line in sorted(lines)), encoding="utf-8")

    def _type(self, part: Part) -> str:
        return _types(part)[part.precision.weight_bits]

    def read(self, path: Path) -> ReadBack:
        """Return the precisions of the types, by the names of tensors in GGUF."""
        found: dict[str, Precision] = {}
        for line in read_text(path).split():
            pattern, _, kind = line.partition("=")
            name = re.fullmatch(r"\^(.+)\\\.weight\$", pattern)
            if name is None or kind not in _BITS:
                raise FileError(f"{path} is not a recipe for {_NAME} as bitplan writes it: {line!r}")
            bits = _BITS[kind]
            found[name[1].replace("\\", "")] = Precision.weights_only(bits)
        return ReadBack(found)
