"""The results of a run in one small file: all that its tables, figures and page are made of, without logs and networks.

Trials, and plans, have much in common: what most of them say stands once, in `usual`, and each says what differs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field, JsonValue

from bitplan.core.ceilings import Ceiling
from bitplan.core.record import Record, Value, with_checksum
from bitplan.core.records import Costs, Gains, Graph, Plan
from bitplan.core.studies import Fit, Pairs, Study
from bitplan.core.trials import Result

Kept = TypeVar("Kept", bound=Record)
_LEFT_OUT = {"log", "traceback"}


class PackedRecords(Value):
    """Records of one kind: what is usual among them, and of each the fields that differ from it."""

    usual: dict[str, JsonValue] = {}
    own: tuple[dict[str, JsonValue], ...] = ()

    @classmethod
    def of(cls, records: Iterable[Record]) -> PackedRecords:
        """Pack records. The fields of a result's trial, and a plan's precisions, count as fields of the record."""
        contents = [_flat(record.model_dump(mode="json")) for record in records]
        names = dict.fromkeys(name for content in contents for name in content)
        usual: dict[str, JsonValue] = {}
        for name in names:
            texts = Counter(json.dumps(content[name], sort_keys=True) for content in contents if name in content)
            text, times = texts.most_common(1)[0]
            if times > 1 and sum(texts.values()) == len(contents):  # what some lack is never usual
                usual[name] = json.loads(text)
        own = [
            {name: value for name, value in content.items() if name not in usual or usual[name] != value}
            for content in contents
        ]
        return cls(usual=usual, own=tuple(own))

    def read(self, kind: type[Kept]) -> list[Kept]:
        """Return the records."""
        return [kind.model_validate(_deep(self.usual | content)) for content in self.own]


class RunResults(Record):
    """What a run found. `unfinished` is how many of its trials are neither done nor failed; logs are left out."""

    study: Study
    graph: Graph | None = None
    costs: Costs | None = None
    results: PackedRecords
    plans: PackedRecords
    failures: PackedRecords = PackedRecords()
    gains: dict[str, Gains] = {}
    ceilings: tuple[Ceiling, ...] = ()
    pairs: Pairs | None = None
    fit: Fit | None = None
    unfinished: Annotated[int, Field(ge=0)] = 0

    @classmethod
    def kept(cls, results: Sequence[Result], plans: Mapping[str, Plan], **about: Any) -> RunResults:
        """Pack results and the plans that they use."""
        used = {result.plan for result in results}
        own = [plan for name, plan in plans.items() if name in used]
        return cls(results=PackedRecords.of(results), plans=PackedRecords.of(own), **about)

    def to_json(self, *, of: str | None = None) -> str:
        """Write as JSON with one line for each entry of a list, so that a diff shows which entries changed."""
        content = json.loads(super().to_json(of=of))
        del content["checksum"]
        lines = ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in content.items())
        return with_checksum("{\n" + lines + "\n}\n")


def _lines(value: Any, depth: int = 0) -> str:
    """JSON with line breaks in the upper levels only."""
    if depth > 1 or not isinstance(value, dict | list) or not value:
        return json.dumps(value, separators=(",", ":"))
    margin = " " * (depth + 2)
    if isinstance(value, list):
        parts = [_lines(one, depth + 2) for one in value]
        return "[\n" + ",\n".join(margin + part for part in parts) + "\n" + margin[:-1] + "]"
    parts = [f"{json.dumps(key)}: {_lines(one, depth + 1)}" for key, one in value.items()]
    return "{\n" + ",\n".join(margin + part for part in parts) + "\n" + margin[:-1] + "}"


_PARTS = ("trial", "precisions")


def _flat(content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a record without logs. Those of its trial or precisions are named like "trial/seed"."""
    flat = {name: value for name, value in content.items() if name not in _LEFT_OUT and name not in _PARTS}
    for part in _PARTS:
        flat |= {f"{part}/{name}": value for name, value in content.get(part, {}).items()}
    return flat


def _deep(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested fields of a flat record."""
    content: dict[str, Any] = {}
    for name, value in flat.items():
        part, _, inner = name.partition("/")
        if part in _PARTS and inner:
            content.setdefault(part, {})[inner] = value
        else:
            content[name] = value
    return content
