"""What all records have in common: frozen, validated when built, JSON with a version, an id."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer
from pydantic_core import from_json

from bitplan.core.errors import Damaged, FileError, RecordError, suggestion
from bitplan.core.frozen import MAY_HOLD, freeze
from bitplan.core.parsing import parse_json

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
"""The content of a file of an older format → the content of today's."""


class Value(BaseModel):
    """A frozen part of a record, compared by its fields; what they hold is frozen too (`core/frozen.py`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)  # a start builds what it uses
    unless_usual: ClassVar[frozenset[str]] = frozenset()
    """Fields that are written only where they differ from their default: files of before them have the ids they had."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _refusal(error, type(self)) from None

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Read from plain data; a failure is one clear line."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise _refusal(error, cls) from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields changed; what was worked out from the others is forgotten."""
        fresh = super().model_copy(update=update, deep=deep)
        for name in set(fresh.__dict__) - set(type(self).model_fields):
            del fresh.__dict__[name]
        fresh.model_post_init(None)
        return fresh

    def model_post_init(self, _: Any) -> None:
        """Freeze mappings and lists, once all fields are validated."""
        fields = self.__dict__
        for name, value in fields.items():
            if type(value) in MAY_HOLD:
                fields[name] = freeze(value)

    @model_serializer(mode="wrap")
    def _without_the_usual(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = dump(self)
        fields = type(self).model_fields if self.unless_usual else {}
        for name in self.unless_usual:
            if getattr(self, name) == fields[name].default:
                content.pop(name, None)
        return content


class Record(Value):
    """A noun of the flow: one JSON file, one id."""

    format: ClassVar[int] = 2
    """That of files. Format 2 has a checksum, and says what a file belongs to."""
    id_format: ClassVar[int] = 1
    """That of ids: raised only where the content itself means something else, so that ids outlive formats of files."""
    older: ClassVar[Mapping[int, Upgrade]] = {1: dict}
    """Formats of before that are read too, each with what makes its content one of today's."""
    passing: ClassVar[frozenset[int]] = frozenset()
    """Formats of before, without a checksum, that are taken also where files must be sealed."""
    remake: ClassVar[str] = ""
    """What to do about a file whose format is no longer read."""
    again: ClassVar[str] = "delete it, and what made it makes it again"
    """What to do about a file that must be sealed and is not."""
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
        known = self.__dict__.get(_ID)  # worked out once: a run asks for the ids of thousands of trials
        if known is None:
            known = self.__dict__[_ID] = identity(self.model_dump(mode="json"), type(self))
        return str(known)

    def to_json(self, *, of: str | None = None) -> str:
        """Write as JSON that `from_json` reads back equal; `of` says what it belongs to.

        The id names the content. The checksum is of the whole file, run-time facts and `of` included.
        """
        head: dict[str, Any] = {"bitplan": self.kind(), "format": self.format, "id": self.id}
        if of is not None:
            head["of"] = of
        content = self.model_dump(mode="json")
        head["checksum"] = _digest(head | content)[:32]
        return json.dumps(head | content, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, of: str | None = None, sealed: bool = False, without: str = "") -> Self:
        """Read one record; called on `Record` itself, whichever kind the text says it is.

        A file without its id line was edited on purpose and is taken as it is, unless it must be `sealed`: then id and
        checksum must be there. `of` is what it must belong to; formats that did not say so pass, unless sealed. The
        field `without`, a long list, is left empty where the text's seal fits, of which it remains a part.
        """
        intact = cls._intact(text, without)
        if intact is not None:
            _check_owner(*intact, of)
            return intact[0]
        whole = _parse(text, f": {_EDITED}; {cls.again}" if sealed else "")
        if sealed:  # first of all: what damage made of a file says nothing about who wrote it
            _check_checksum(whole, cls.again)
        content = {key: value for key, value in whole.items() if key not in _HEAD}
        target = cls._target(whole.get("bitplan"))
        version = _check_format(target, whole.get("format"))
        advice = target.again if sealed else "make it again, or delete its id line to accept the change"
        if sealed and version == target.format and not {"id", "checksum"} <= whole.keys():
            raise Damaged(f"the {target.kind()} has no id or no checksum: it was edited by hand; {advice}")
        today = content if version == target.format else target.older[version](dict(content))
        record = target.model_validate(today)
        if _HIDDEN.search(str(text)) and not _is_finite(record.model_dump()):
            raise Damaged(f"a number of the {target.kind()} is not finite: {_EDITED}; {advice}")
        if "id" in whole:
            _check_seal(whole, record.id if version == target.format else identity(content, target), advice)
        if version != target.format:  # from before files carried a checksum and said what they belong to
            if sealed and version not in target.passing:
                raise FileError(f"the {target.kind()} is of format {version}, without a checksum: {advice}")
            return record
        _check_owner(record, whole.get("of"), of)
        return record

    def __repr__(self) -> str:
        return f"<{str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        from bitplan.core.summaries import lines_of

        return "\n".join(lines_of(self))

    def _repr_html_(self) -> str | None:
        from bitplan.core.summaries import html_of

        return html_of(self)

    @classmethod
    def _intact(cls, text: str | bytes, without: str) -> tuple[Self, object] | None:
        """The record in a text whose seal fits, of today's format, and what it belongs to."""
        raw = text if isinstance(text, bytes) else text.encode(errors="replace")
        if not _has_seal(raw):
            return None
        try:
            told = _left_out(raw, without) if without else raw
            whole = from_json(told, allow_inf_nan=False)  # four times as fast as ours, which is for what anybody wrote
        except ValueError:  # whoever made the seal did not write a record: ours says what is wrong
            return None
        target = cls._target(whole.get("bitplan"))
        if whole.get("format") != target.format or not _is_id(whole.get("id")):
            return None
        record = target.model_validate({key: value for key, value in whole.items() if key not in _HEAD})
        record.__dict__[_ID] = whole["id"]
        return record, whole.get("of")

    @classmethod
    def _target(cls, kind: object) -> type[Self]:
        """The kind that a file says it is, where it is one that was asked for."""
        target = cls.kinds.get(kind) if isinstance(kind, str) else None
        if target is None:
            says = (
                f"says it is {kind!r}{suggestion(kind, cls.kinds)}" if isinstance(kind, str) else "says not which kind"
            )
            raise FileError(f"not a bitplan record, such as `bitplan steps trace -o` writes: it {says}")
        if not issubclass(target, cls):
            raise FileError(f"this is a {kind}, where a {cls.kind()} is needed")
        return target


_EDITED = "the file was edited by hand or damaged"
_ID = "_id"  # pydantic shows no name like this as a field
_HIDDEN = re.compile(r'"\s*[+-]?(nan|inf)', re.IGNORECASE)  # texts that pydantic takes for numbers
_HEAD = frozenset({"seal", "bitplan", "format", "id", "of", "checksum"})
_HEAD_BYTES = 400  # that they take at most
_SEAL = '{\n "seal": "'
_SEAL_DIGITS = 32
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))  # NaN too: it is looked for, not written


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_CANONICAL.encode(content).encode()).hexdigest()


def identity(content: Mapping[str, Any], target: type[Record]) -> str:
    """The id of content as it stands in a file."""
    told = {key: value for key, value in content.items() if key not in target.outside_id}
    return _digest(told | {"bitplan": target.kind(), "format": target.id_format})[:12]


def sealed(text: str) -> str:
    """A record's JSON with a seal of its very bytes before all else, so that thousands are checked in a second.

    A file whose seal fits is as it was written, and neither its checksum nor its id is worked out again.
    """
    rest = f'",{text.removeprefix("{")}'
    return f"{_SEAL}{_seal_of(rest.encode())}{rest}"


def is_intact(text: bytes, *, of: str) -> bool:
    """Whether a file is as it was written for `of`; where not, only `from_json` can tell what it is."""
    return _has_seal(text) and f'"of": {json.dumps(of)}'.encode() in text[:_HEAD_BYTES]


def _is_id(value: object) -> bool:
    return isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{12}", value))


def _seal_of(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:_SEAL_DIGITS]


def _has_seal(text: bytes) -> bool:
    """Whether a text begins with the seal of all that follows it."""
    begin, end = len(_SEAL), len(_SEAL) + _SEAL_DIGITS
    return text.startswith(_SEAL.encode()) and text[begin:end] == _seal_of(text[end:]).encode()


def _left_out(text: bytes, field: str) -> bytes:
    """A sealed text with an empty list in place of a field's: a tenth is left to parse of a result with its log.

    Its lines are as `to_json` wrote them: one blank before the names and the ends of fields, and more within them.
    """
    name = f'\n "{field}": [\n'.encode()
    begin = text.find(name) + len(name)
    end = text.find(b"\n ]", begin) if begin >= len(name) else -1
    return text if end < 0 else text[:begin] + text[end:]


def _check_owner(record: Record, found: object, of: str | None) -> None:
    if of is not None and found != of:
        raise Damaged(f"the {record.kind()} belongs to {found}, not to {of}: files were exchanged")


def _check_seal(whole: Mapping[str, Any], own: str, advice: str) -> None:
    """Refuse a file whose content is not the one that its id or its checksum was made of."""
    if whole["id"] != own:
        kind = whole["bitplan"]
        raise FileError(f"the {kind}'s id {whole['id']} does not fit its content ({own}): {_EDITED}; {advice}")
    _check_checksum(whole, advice)


def _check_checksum(whole: Mapping[str, Any], advice: str) -> None:
    """Refuse a file whose checksum is of another one; without an id line it was edited on purpose."""
    rest = {key: value for key, value in whole.items() if key not in ("seal", "checksum")}
    if {"id", "checksum"} <= whole.keys() and whole["checksum"] != _digest(rest)[:32]:
        raise Damaged(f"the {whole.get('bitplan')}'s checksum does not fit its content: {_EDITED}; {advice}")


def _parse(text: str | bytes, advice: str) -> dict[str, Any]:
    try:
        content = parse_json(text)
    except FileError as error:
        raise Damaged(f"{error}{advice}") from None
    if not isinstance(content, dict):
        raise Damaged(f"not a bitplan record but a JSON {type(content).__name__}")
    return content


def _is_finite(value: Any) -> bool:
    """Whether all numbers in a value are; others could not be written again."""
    if isinstance(value, dict | list | tuple):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _check_format(target: type[Record], version: object) -> int:
    """The format of a file, where this bitplan reads it."""
    kind, known = target.kind(), target.format
    if not isinstance(version, int) or isinstance(version, bool):
        raise FileError(f"the {kind} says no format version (expected {known})")
    if version > known:
        raise FileError(f"{kind} format {version} is newer than this bitplan reads ({known}): upgrade bitplan")
    if version < known and version not in target.older:
        advice = target.remake or f"make the {kind} again"
        raise FileError(f"{kind} format {version} is no longer read (now {known}): {advice}")
    return version


def _refusal(error: ValidationError, target: type[BaseModel]) -> RecordError:
    """What is wrong, behind the name of what it is wrong of; one that was built inside has put it there before."""
    name = f"{target.__name__}: "
    return RecordError(name + _one_line(error, target).removeprefix(name))


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
