"""What all records have in common: frozen, validated when built, JSON with a version, an id."""

from __future__ import annotations

import hashlib
import json
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from bitplan.core.errors import FileError, RecordError, suggestion


class Value(BaseModel):
    """A frozen part of a record, compared by its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise RecordError(f"{type(self).__name__}: {_one_line(error, type(self))}") from None

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Read from plain data; a failure is one clear line."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise RecordError(f"{cls.__name__}: {_one_line(error, cls)}") from None


class Record(Value):
    """A noun of the flow: one JSON file, one id."""

    format: ClassVar[int] = 1
    outside_id: ClassVar[frozenset[str]] = frozenset({"seconds", "device", "versions"})
    kinds: ClassVar[dict[str, type[Record]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if not cls.__name__.startswith("_"):
            Record.kinds[cls.kind()] = cls

    @classmethod
    def kind(cls) -> str:
        """The word that names this kind of record in its file."""
        return cls.__name__.lower()

    @property
    def id(self) -> str:
        """First 12 hex digits of the SHA-256 of the canonical JSON, run-time facts left out."""
        content = self.model_dump(mode="json", exclude=set(self.outside_id))
        content |= {"bitplan": self.kind(), "format": self.format}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """Write as JSON that `from_json` reads back equal."""
        head = {"bitplan": self.kind(), "format": self.format, "id": self.id}
        return json.dumps(head | self.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read one record; called on `Record` itself, whichever kind the text says it is."""
        content = _parse(text)
        kind = content.pop("bitplan", None)
        target = cls.kinds.get(kind) if isinstance(kind, str) else None
        if target is None:
            raise FileError(f"not a bitplan record: it says {kind!r}{suggestion(str(kind), cls.kinds)}")
        if not issubclass(target, cls):
            raise FileError(f"this is a {kind}, where a {cls.kind()} is needed")
        _check_format(target, content.pop("format", None))
        written_id = content.pop("id", None)
        record = target.model_validate(content)
        if written_id is not None and written_id != record.id:
            raise FileError(
                f"the {kind}'s id {written_id} does not fit its content ({record.id}): the file was "
                "edited by hand; make it again, or delete its id line to accept the change"
            )
        return record


def _parse(text: str | bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        cut = isinstance(error, json.JSONDecodeError) and (
            error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
        )
        raise FileError(f"{'cut off' if cut else 'not JSON'} ({error})") from None
    if not isinstance(content, dict):
        raise FileError(f"not a bitplan record but a JSON {type(content).__name__}")
    return content


def _check_format(target: type[Record], version: object) -> None:
    kind, known = target.kind(), target.format
    if not isinstance(version, int) or isinstance(version, bool):
        raise FileError(f"the {kind} says no format version (expected {known})")
    if version > known:
        raise FileError(f"{kind} format {version} is newer than this bitplan reads ({known}): upgrade bitplan")
    if version < known:
        raise FileError(f"{kind} format {version} is no longer read (now {known}): make the {kind} again")


def _one_line(error: ValidationError, target: type[BaseModel]) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if first["type"] == "extra_forbidden":
        message = f"unknown key{suggestion(str(first['loc'][-1]), target.model_fields)}"
    elif first["type"] == "missing":
        message = "is missing"
    elif not first["type"].startswith("value_error"):
        message = f"{message}, got {first['input']!r:.60}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}: {message}{more}" if where else f"{message}{more}"
