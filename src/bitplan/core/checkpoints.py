"""What a checkpoint folder says about the tensors beside it."""

from __future__ import annotations

from pydantic import JsonValue

from bitplan.core.record import Record
from bitplan.core.records import Plan


class Checkpoint(Record):
    """A model saved by bitplan: its plan (None: a float model), and where both come from.

    `spec` is a name of the zoo, the only way a checkpoint names code. `tied` maps a tensor's name to the one
    it is stored under, where both are the same tensor.
    """

    plan: Plan | None = None
    options: dict[str, JsonValue] = {}
    spec: str | None = None
    graph: str | None = None
    tied: dict[str, str] = {}
    versions: dict[str, str] = {}
