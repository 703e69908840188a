"""numba: loops are compiled for one signature, and kept in a cache that only the user can write to.

Only this file imports numba. Left alone, numba takes settings from a `.numba_config.yaml` in the current folder, which
may be anybody's, and unpickles what lies in the cache folder that is named there: that is running its code.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bitplan.core.parsing import first_line
from bitplan.core.private_cache import UnsafeFolder, private_cache_folder

_VARIABLE = "NUMBA_CACHE_DIR"
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}

log = logging.getLogger(__name__)
_compiling = threading.RLock()
_told: set[str] = set()


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Let a file in the current folder seem missing: numba looks for its settings while it is imported."""
    exists = os.path.exists
    os.path.exists = lambda path: path != name and exists(path)
    try:
        yield
    finally:
        os.path.exists = exists


_is_imported_already = "numba" in sys.modules  # by the program, with the settings that it wants

with _hidden(".numba_config.yaml"):
    import numba
    from numba import carray as carray  # type: ignore[attr-defined]
    from numba import types as types
    from numba.core import cgutils as cgutils
    from numba.extending import intrinsic as intrinsic

if not _is_imported_already:
    numba.core.config._config_fname = ""  # or numba reads that file whenever it compiles

Function = Callable[..., Any]


def compile_for(signature: Any) -> Callable[[Function], Function]:
    """Return a decorator that compiles a function for a signature, or takes it from the user's cache.

    Without a folder for the cache, or with damaged files in it, the function is compiled anew.
    """

    def compile_function(function: Function) -> Function:
        folder = _cache_folder()
        if folder is not None:
            try:
                with _compiling, _cache_in(folder):
                    return _compile(function, signature, cache=True)
            except Exception as error:  # a damaged pickle raises anything; what is wrong with the function comes again
                said = f"{type(error).__name__}: {first_line(error)}"
                _tell(
                    logging.WARNING, f"loops are compiled anew, since {folder} is damaged or full ({said}): delete it"
                )
        return _compile(function, signature, cache=False)

    return compile_function


def compile_at_call(function: Function) -> Function:
    """Return the function; its first call with arguments of some types compiles it for them."""
    compiled: dict[tuple[Any, ...], Function] = {}

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        signature = tuple(map(numba.typeof, arguments))
        if signature not in compiled:
            with _compiling:
                if signature not in compiled:
                    compiled[signature] = compile_for(signature)(function)
        return compiled[signature](*arguments)

    return call


def inline(function: Function) -> Function:
    """Return a part of a loop, which is compiled with the loop."""
    inlined: Function = numba.njit(inline="always")(function)
    return inlined


def _compile(function: Function, signature: Any, *, cache: bool) -> Function:
    compiled: Function = numba.njit(signature, cache=cache, **_OPTIONS)(function)
    return compiled


def _cache_folder() -> Path | None:
    """Return the folder of the cache; None if there is none that is safe and can be written."""
    try:
        return private_cache_folder("numba", _VARIABLE)
    except OSError as error:
        level = logging.WARNING if isinstance(error, UnsafeFolder) else logging.INFO
        _tell(
            level, f"compiled loops are not kept ({error}), so they are compiled anew; {_VARIABLE} names another folder"
        )
        return None


def _tell(level: int, line: str) -> None:
    """Write a line to the log, once per process."""
    if line not in _told:
        _told.add(line)
        log.log(level, line)


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    """Let numba keep compiled functions in this folder, and nowhere else, whatever its settings say."""
    config: Any = numba.config
    before = config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES
    config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = str(folder), "UserProvidedCacheLocator"
    try:
        yield
    finally:
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before
