"""What all records have in common: frozen, validated when built, JSON with a version and a checksum, an id."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from bitplan.core.errors import Damaged, FileError, RecordError, suggestion
from bitplan.core.frozen import MAY_HOLD, freeze
from bitplan.core.parsing import parse_json

FORMAT = 1
"""The version of files. Others are refused."""


class Value(BaseModel):
    """A frozen part of a record, compared by its fields; what they hold is frozen too (`core/frozen.py`)."""

    # Building a schema only when it is used keeps a start fast. No record holds NaN or infinity: JSON has neither.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _explain(error, type(self)) from None

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Read from plain data; a failure is one clear line."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise _explain(error, cls) from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields changed, without values that were cached from the others."""
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


class Record(Value):
    """A noun of the flow: one JSON file, one id."""

    again: ClassVar[str] = "delete it, and what made it makes it again"
    """Advice for a damaged file of a run."""
    outside_id: ClassVar[frozenset[str]] = frozenset({"seconds", "device", "versions"})
    """Facts about how the record came about; the id covers all other fields."""
    kinds: ClassVar[dict[str, type[Record]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if not cls.__name__.startswith("_"):
            Record.kinds[cls.kind()] = cls

    @classmethod
    def kind(cls) -> str:
        """Return the word that names this kind of record in its file."""
        return cls.__name__.lower()

    @property
    def id(self) -> str:
        """The first 12 hex digits of the SHA-256 of the kind and of all fields but `outside_id`."""
        known = self.__dict__.get(_ID)  # cached: a run asks for the ids of thousands of trials
        if known is None:
            content = self.model_dump(mode="json", exclude=set(self.outside_id)) | {"bitplan": self.kind()}
            known = self.__dict__[_ID] = hashlib.sha256(_CANONICAL.encode(content).encode()).hexdigest()[:12]
        return str(known)

    def to_json(self, *, of: str | None = None) -> str:
        """Write as JSON that `from_json` reads back equal; `of` names the owner of the file.

        The id covers the content. The checksum covers the whole file, run-time facts and `of` included.
        """
        head: dict[str, Any] = {"bitplan": self.kind(), "format": FORMAT, "id": self.id}
        if of is not None:
            head["of"] = of
        return with_checksum(json.dumps(head | self.model_dump(mode="json"), indent=1, allow_nan=False) + "\n")

    @classmethod
    def from_json(cls, text: str | bytes, *, of: str | None = None, sealed: bool = False) -> Self:
        """Read one record; called on `Record` itself, of any kind.

        A file without its id line was edited on purpose and is accepted, unless it must be `sealed`: then the checksum
        must fit. `of` is the owner that the file must name.
        """
        raw = text if isinstance(text, bytes) else text.encode(errors="replace")
        is_intact = _has_checksum(raw)
        content = _parse(text, raw, is_intact=is_intact, advice=f": {_EDITED}; {cls.again}" if sealed else "")
        if sealed and not is_intact:  # checked first: damage to the other fields says nothing about who wrote the file
            raise Damaged(f"the {cls.kind()} has no checksum that fits its content: {_EDITED}; {cls.again}")
        target = cls._find_kind(content.get("bitplan"))
        _check_format(target, content.get("format"))
        record = target.model_validate({key: value for key, value in content.items() if key not in _HEAD})
        if not is_intact and content.get("id", record.id) != record.id:
            stated = content["id"]
            raise FileError(
                f"the {target.kind()}'s id {stated} does not fit its content ({record.id}): {_EDITED}; {_MAKE_AGAIN}"
            )
        if not is_intact and {"id", "checksum"} <= content.keys():
            raise Damaged(f"the {target.kind()}'s checksum does not fit its content: {_EDITED}; {_MAKE_AGAIN}")
        if of is not None and content.get("of") != of:
            raise Damaged(f"the {record.kind()} belongs to {content.get('of')}, not to {of}: files were exchanged")
        return record

    def __repr__(self) -> str:
        return f"<{str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        from bitplan.core.summaries import describe_record

        return "\n".join(describe_record(self))

    def _repr_html_(self) -> str | None:
        from bitplan.core.summaries import render_record

        return render_record(self)

    @classmethod
    def _find_kind(cls, kind: object) -> type[Self]:
        """Return the class that a file names, if it is one that was asked for."""
        if isinstance(kind, str) and kind not in cls.kinds:
            import_all_kinds()
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
_MAKE_AGAIN = "make it again, or delete its id line to accept the change"
_ID = "_id"  # pydantic shows no name like this as a field
_HEAD = frozenset({"checksum", "bitplan", "format", "id", "of"})
_CHECKSUM = re.compile(rb'\s*{\s*"checksum"\s*:\s*"([0-9a-f]{32})"')
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def import_all_kinds() -> None:
    """Import every module that defines records, so that `Record.kinds` lists them all."""
    from bitplan.core import ceilings, jobs, latencies, records, results, studies, trials, verdicts  # noqa: F401


def with_checksum(text: str) -> str:
    """Return a record's JSON with the checksum of its bytes as the first field.

    Blanks do not count, so that a file may be laid out anew, or get the line ends of another system.
    """
    rest = f'",{text.removeprefix("{")}'
    return f'{{\n "checksum": "{_sum_bytes(rest.encode()[1:])}{rest}'


def _sum_bytes(text: bytes) -> str:
    return hashlib.sha256(text.translate(None, b" \t\r\n")).hexdigest()[:32]


def _has_checksum(text: bytes) -> bool:
    """Tell whether a text begins with the checksum of all that follows it."""
    checksum = _CHECKSUM.match(text)
    return checksum is not None and checksum[1].decode() == _sum_bytes(text[checksum.end() :])


def _parse(text: str | bytes, raw: bytes, *, is_intact: bool, advice: str) -> dict[str, Any]:
    content: Any = None
    if is_intact:
        with contextlib.suppress(ValueError):  # if a stranger made the checksum, our parser says what is wrong
            content = from_json(raw, allow_inf_nan=False)  # four times as fast
    if content is None:
        try:
            content = parse_json(text)
        except FileError as error:
            raise Damaged(f"{error}{advice}") from None
    if not isinstance(content, dict):
        raise Damaged(f"not a bitplan record but a JSON {type(content).__name__}")
    return content


def _check_format(target: type[Record], version: object) -> None:
    kind = target.kind()
    if not isinstance(version, int) or isinstance(version, bool):
        raise FileError(f"the {kind} says no format version (expected {FORMAT})")
    if version > FORMAT:
        raise FileError(f"{kind} format {version} is newer than this bitplan reads ({FORMAT}): upgrade bitplan")
    if version < FORMAT:
        raise FileError(f"{kind} format {version} is no longer read (now {FORMAT}): make the {kind} again")


def _explain(error: ValidationError, target: type[BaseModel]) -> RecordError:
    """Return an error in one line that begins with the name of the record, once."""
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
