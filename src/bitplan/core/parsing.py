"""The door behind which files are parsed: whatever a parser throws is the file's fault, said in one line with its name.

Files come from strangers, and parsers of json, pickles, protocol buffers, images … raise nearly every kind of error on
a damaged one. Inside `parsing` all of them count as the file's fault, running out of memory and of stack included,
except those that no content can cause: a name or a module that does not exist, and a failed `assert` of bitplan's own.
These, and everything after the block, remain bugs and show a traceback. So a block holds the parser, and what of ours
looks into what it gave; nothing that works with the result.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from bitplan.core.errors import FileError, InputError
from bitplan.core.memory import VARIABLE

_OWN = str(Path(__file__).parents[1])
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")
_MOST_DIGITS = 20  # of a whole number: those of 64 bits


@contextmanager
def parsing(path: str | Path, what: str, advice: str) -> Iterator[None]:
    """Say in one line that a file is not `what` it should be, and what to do about it."""
    try:
        with named(path, advice):
            yield
    except InputError:
        raise
    except OSError as error:
        if error.errno is None:  # of a library, about the content
            raise _refusal(path, what, advice, error) from error
        raise FileError(f"cannot read {path}: {error.strerror}") from None
    except Exception as error:
        if _is_bug(error):
            raise
        if isinstance(error, MemoryError) or "allocate" in str(error):  # as libraries say it
            raise FileError(
                f"{path} claims more memory than there is or a file may take: it is not {what}; {advice}, or if you "
                f"trust it, raise the limit with {VARIABLE}=64GB"
            ) from error
        raise _refusal(path, what, advice, error) from error


@contextmanager
def named(path: str | Path, advice: str = "") -> Iterator[None]:
    """Put the name of a file before an error of ours that does not say it, where its content is used."""
    try:
        yield
    except InputError as error:
        if str(path) in str(error):
            raise
        raise FileError(f"{path}: {error}{advice and '; '}{advice}") from None


def parse_json(text: str | bytes) -> Any:
    """JSON as the standard has it, and strictly: no name twice in an object, no NaN, no number that cannot be kept."""
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        content = json.loads(
            decoded,
            object_pairs_hook=_without_twins,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_whole,
        )
        if _HALF_CHARACTER.search(decoded):
            json.dumps(content, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
        raise FileError(f"{'cut off' if cut else 'not JSON'} ({error})") from None
    except UnicodeError as error:
        raise FileError(f"not JSON ({first_line(error)})") from None
    except RecursionError:
        raise FileError("not JSON (nested too deeply)") from None
    return content


def parse_toml(text: str) -> dict[str, Any]:
    """TOML whose numbers can be kept: no NaN, none of thousands of digits."""
    try:
        content = tomllib.loads(text, parse_float=_finite)
        json.dumps(content, default=str)  # refuses what no record can hold
    except FileError:
        raise
    except RecursionError:
        raise FileError("not TOML (nested too deeply)") from None
    except ValueError as error:
        raise FileError(f"not TOML ({first_line(error)})") from None
    return content


def first_line(error: BaseException, most: int = 120) -> str:
    """The beginning of what an error says."""
    return str(error).strip().partition("\n")[0][:most]


def _refusal(path: str | Path, what: str, advice: str, error: Exception) -> FileError:
    said = "nested too deeply" if isinstance(error, RecursionError) else first_line(error) or type(error).__name__
    return FileError(f"{path} is cut off or not {what} ({said}): {advice}")


def _is_bug(error: Exception) -> bool:
    """Whether no content of a file can be the cause: see the top of this file."""
    if not isinstance(error, AssertionError):
        return isinstance(error, NameError | ImportError)
    place: TracebackType | None = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_code.co_filename.startswith(_OWN)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of an object as a dict; json itself would keep the last of two that have one name."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FileError(f"{twice[:60]!r} stands twice in one object")
    return content


def _refuse_constant(name: str) -> None:
    raise FileError(f"the number {name} is not finite")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise FileError(f"the number {text[:20]} is not finite")
    return value


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise FileError(f"the number {text[:10]}… of {len(text)} digits is too large")
    return int(text)
