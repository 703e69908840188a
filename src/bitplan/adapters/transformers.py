"""Hugging Face transformers: models from a configuration, without weights."""

from __future__ import annotations

from types import ModuleType

import torch

from bitplan.adapters import torchvision
from bitplan.adapters.foreign import require


def transformers(purpose: str) -> ModuleType:
    """Import transformers, or say what to install."""
    require("transformers", "text", purpose)
    if torchvision.installed():
        torchvision.torchvision()  # transformers imports it beside its models, and it may need help
    import transformers as module

    return module


def bert_for_question_answering(**sizes: int) -> torch.nn.Module:
    """BERT with a span head; attention in its plain form, whose products and softmax can be quantized."""
    library = transformers("BERT")
    config = library.BertConfig(attn_implementation="eager", **sizes)
    model: torch.nn.Module = library.BertForQuestionAnswering(config)
    return model
