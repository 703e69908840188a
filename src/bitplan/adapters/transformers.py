"""Hugging Face transformers: models from a configuration, without weights, and its door for quantization methods."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch

from bitplan.adapters import torchvision
from bitplan.adapters.foreign import require
from bitplan.core.errors import InputError


def transformers(purpose: str) -> ModuleType:
    """Import transformers, or say what to install."""
    require("transformers", "text", purpose)
    if torchvision.installed():
        torchvision.torchvision()  # transformers imports it beside its models, and it may need help
    import transformers as module

    return module


class QuantizationDoor(NamedTuple):
    """What a quantization method derives from, and how it is registered under a name."""

    quantizer: Any
    config: Any
    register_quantizer: Any
    register_config: Any


def quantization_door() -> QuantizationDoor:
    """transformers' door for quantization methods; the one before version 5 asks for other things, and is refused."""
    library = transformers("a quantization method of transformers")
    major = library.__version__.partition(".")[0]
    if not major.isdecimal() or int(major) < 5:
        raise InputError(
            f"bitplan.transformers needs transformers 5, this is {library.__version__}: pip install -U transformers, "
            "or without it save_checkpoint and load_checkpoint(folder, model)"
        )
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    return QuantizationDoor(
        HfQuantizer, QuantizationConfigMixin, auto.register_quantizer, auto.register_quantization_config
    )


def bert_for_question_answering(**sizes: int) -> torch.nn.Module:
    """BERT with a span head; attention in its plain form, whose products and softmax can be quantized."""
    library = transformers("BERT")
    config = library.BertConfig(attn_implementation="eager", **sizes)
    model: torch.nn.Module = library.BertForQuestionAnswering(config)
    return model
