"""What a GGUF file says of its network: sizes by a configuration of Hugging Face's, and the tokenizer beside it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitplan.adapters.gguf import Entry, entry_of
from bitplan.adapters.tokenizers import TOKENIZER
from bitplan.adapters.transformers import CUT
from bitplan.core.errors import InputError
from bitplan.core.parsing import parse_json, parsing
from bitplan.core.store import read_text

_log = logging.getLogger(__name__)
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
    with parsing(path, "a tokenizer", "fetch it again"):
        content = parse_json(read_text(path))
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
