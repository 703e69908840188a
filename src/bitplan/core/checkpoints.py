"""What a checkpoint folder says about the tensors beside it."""

from __future__ import annotations

from typing import ClassVar

from pydantic import JsonValue

from bitplan.core.record import Record
from bitplan.core.records import Plan

ENDINGS = (".safetensors", ".pth", ".pt", ".bin", ".th", ".gguf")
"""How files of weights usually end; .gguf is a network of its own (`models/pretrained.py`), not weights for another."""

ABOUT, TENSORS = "checkpoint.json", "model.safetensors"
"""The two files of a checkpoint folder: this record, and the tensors."""


class Checkpoint(Record):
    """A model saved by bitplan: its plan (None: a float model), and where both come from.

    `spec` is a name of the zoo, or "config.json", which then describes a network of transformers' and lies beside it:
    the only ways a checkpoint names code. `tied` maps a tensor's name to the one
    it is stored under, where both are the same tensor. `sha256` is that of the file of tensors; empty in checkpoints
    from before it was written down.
    """

    outside_id: ClassVar[frozenset[str]] = Record.outside_id | {"sha256"}

    plan: Plan | None = None
    options: dict[str, JsonValue] = {}
    spec: str | None = None
    graph: str | None = None
    tied: dict[str, str] = {}
    versions: dict[str, str] = {}
    sha256: str = ""
