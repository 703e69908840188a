"""What can go wrong, as one tree; every message says what happened and what to do about it.

BitplanError
└── InputError             the user's input cannot be used (the command line exits with 2)
    ├── Untrusted          a file asks for code to be imported, which the user did not
    ├── UnknownName        a gain, cost, model, layer … that does not exist; suggests near names
    ├── FileError          a file is missing, cut off, of the wrong kind or from a newer bitplan
    │   ├── Damaged        a file is not as it was written: cut off, changed, or exchanged with another
    │   └── WriteError     a file cannot be written: full, read-only … (a sweep that it stops exits with 1)
    ├── RecordError        the values of a record contradict each other
    ├── BudgetError        a budget cannot be read or cannot be met
    ├── TraceError         the model cannot be traced with this example input
    ├── Diverged           training gave a loss that is NaN or infinite
    ├── Unfinished         jobs of a method failed; what others did is kept where there is a store
    ├── NothingToChoose    every layer is fixed by a rule, so there is nothing to select
    ├── MissingExtra       an optional library is not installed
    └── NeedsMore          a contract cannot be tried without what only its author has (`bitplan.testing`)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal

Fault = Literal["input", "training", "store", "damage", "worker", "code"]
"""Whose fault a failure is: what was asked for, a loss that became NaN, a disk that takes no more, a file that is not
as it was written, a worker that died, or the code."""


class BitplanError(Exception):
    """The root of everything bitplan raises on purpose."""


class InputError(BitplanError, ValueError):
    """The user's input cannot be used as it is."""


class Untrusted(InputError):
    """A file asks for what only the user may ask for: code to be imported, jobs to be sent away."""


class FileError(InputError):
    """A file cannot be read as what it should be, or cannot be written."""


class Damaged(FileError):
    """A file is not as it was written: cut off, changed, or exchanged with another."""


class WriteError(FileError):
    """A file cannot be written: the disk is full or read-only, or something is in the way."""


class RecordError(InputError):
    """The values of a record are not possible together."""


class BudgetError(InputError):
    """A budget cannot be read or cannot be met."""


class TraceError(InputError):
    """The model could not be run on the shapes of the example input."""


class Diverged(InputError):
    """Training gave a loss that is NaN or infinite."""


class Unfinished(InputError):
    """Some jobs of a method failed, whether by what was asked for, a worker or the code."""


class NothingToChoose(InputError):
    """Every layer is fixed by a rule, so there is nothing to select."""


class MissingExtra(InputError):
    """An optional library is needed and is not installed."""

    def __init__(self, library: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {library}, which is not installed: pip install 'bitplan[{extra}]'")


class UnknownName(InputError):
    """A name that is not among the known ones."""

    def __init__(self, what: str, name: str, known: Iterable[str], hint: str = "") -> None:
        near = suggestion(name, known)
        rest = f"{'' if near.endswith('?') else '.'} {hint}" if hint else ""
        super().__init__(f"unknown {what} {name!r}{near}{rest}")
        self.name = name


def fault_of(error: BaseException) -> Fault:
    """Whose fault an error is."""
    if isinstance(error, WriteError):
        return "store"
    if isinstance(error, Damaged):
        return "damage"
    if isinstance(error, Diverged):
        return "training"
    return "input" if isinstance(error, InputError) else "code"


_LESS_LIKELY = 0.15  # by so much less alike than the best, and a name is not meant


def suggestion(name: str, known: Iterable[str]) -> str:
    """Say which known names are near `name`, or, where none is, which there are."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        best = _likeness(name, close[0])
        return f"; did you mean {' or '.join(one for one in close if _likeness(name, one) > best - _LESS_LIKELY)}?"
    if not names:
        return "; there are none"
    shown = ", ".join(names[:8]) + (f", … ({len(names)} in all)" if len(names) > 8 else "")
    return f"; there is {shown}"


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, name).ratio()
