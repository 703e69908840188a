"""Files that are whole or not there: atomic writing, and reading with one clear line on failure."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import TypeVar

from bitplan.core.errors import FileError, InputError, WriteError
from bitplan.core.record import Record

AnyRecord = TypeVar("AnyRecord", bound=Record)


def write_text(path: str | Path, text: str) -> Path:
    """Write a text file (UTF-8), whole or not at all."""
    return write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> Path:
    """Write under a temporary name and rename, so that a kill or a full disk leaves no half file."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise WriteError(f"cannot write {target}: {error.strerror or error}") from None
    return target


def read_text(path: str | Path) -> str:
    """Read a text file; what prevents it is said in one line."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise FileError(f"{path} is not a text file (UTF-8)") from None
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from None


def save(record: Record, path: str | Path) -> Path:
    """Write a record as its JSON file."""
    return write_text(path, record.to_json())


def load(path: str | Path, kind: type[AnyRecord], *, of: str | None = None, sealed: bool = False) -> AnyRecord:
    """Read a record of the given kind (`Record` itself: of any kind); `of` and `sealed` as for `from_json`."""
    text = read_text(path)
    try:
        return kind.from_json(text, of=of, sealed=sealed)
    except InputError as error:
        raise FileError(f"{path}: {error}") from None
