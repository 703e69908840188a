"""Networks of Hugging Face's: a folder of config.json and safetensors, or a GGUF file; with their tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.adapters.gguf import check_gguf
from bitplan.adapters.transformers import network_of, network_with_weights
from bitplan.core.errors import FileError
from bitplan.weights.opened import open_checkpoint
from bitplan.weights.pretrained_folders import says_network

_TOKENS = 128


def load_pretrained(path: str | Path) -> nn.Module:
    """Return the network of a Hugging Face folder or a GGUF file, in float32 for inference.

    Its class is the one that config.json names, if the installed transformers has it. No code of the file runs, and no
    pickle is read. Quantized tensors of a GGUF file become floats.
    """
    place = Path(path)
    if not place.exists():
        raise FileError(f"cannot read {place}: there is no such file or folder")
    if place.is_file():
        return network_with_weights(place, check_gguf(place))
    if not says_network(place):
        raise FileError(f"{place} has no config.json that says which network of transformers' it holds")
    if not any(place.glob("*.safetensors")):
        raise FileError(
            f"{place} has no .safetensors: load it with transformers where you trust it, and write it with "
            "save_pretrained, which makes them"
        )
    opened = open_checkpoint(place)  # what is cut off, lacking or packed is said in one line
    return network_with_weights(place, opened.bytes_held)


def build_pretrained(folder: str | Path) -> tuple[nn.Module, Any]:
    """Return the network that a folder's config.json describes, with random weights, and an example of its input."""
    model = network_of(Path(folder), open_checkpoint(folder).bytes_held)
    return model, example_for(model)


def example_for(model: nn.Module) -> dict[str, Tensor] | None:
    """Return a row of tokens for a network that reads tokens, else None."""
    config: Any = getattr(model, "config", None)
    if not getattr(config, "vocab_size", 0):
        return None
    longest = getattr(config, "max_position_embeddings", None) or _TOKENS
    return {"input_ids": torch.zeros(1, min(_TOKENS, longest), dtype=torch.long)}
