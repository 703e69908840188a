"""BERT for question answering (Devlin et al. 2018), as in the paper's third task."""

from __future__ import annotations

import torch
from torch import nn

from bitplan.adapters.transformers import bert_for_question_answering

Example = dict[str, torch.Tensor]
TOKENS = 384  # the window of SQuAD


def bert_base() -> tuple[nn.Module, Example]:
    """12 layers of width 768; 109 million parameters."""
    return bert_for_question_answering(), example()


def bert_large() -> tuple[nn.Module, Example]:
    """24 layers of width 1024; 335 million parameters."""
    sizes = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    }
    return bert_for_question_answering(**sizes), example()


def minilm_l6() -> tuple[nn.Module, Example]:
    """6 layers of width 384; 23 million parameters (MiniLM, Wang et al. 2020, with every second layer left out)."""
    sizes = {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    }
    return bert_for_question_answering(**sizes), example()


def example(tokens: int = TOKENS) -> Example:
    """One window of a question and its context."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="cpu")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
