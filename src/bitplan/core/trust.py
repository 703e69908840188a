"""What a file may ask for: names of what is installed. Code is imported, and jobs sent away, where the user says so.

This is the one place that imports a module by a name that somebody wrote (`docs/decisions/0018-what-is-trusted.md`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from bitplan.core.errors import InputError, UnknownName, Untrusted
from bitplan.core.studies import Study

_SAY_SO = "if you know what it does, say so with --trust (in Python: trust=True)"


def names_code(name: str) -> bool:
    """Whether the name of a model is `package.module:factory`, which is imported; all others are of what is there."""
    return ":" in name


def check_code(name: str, where: str | Path, *, trust: bool, otherwise: str = "") -> None:
    """Refuse code that a file names, unless it is trusted; `otherwise` is another way to allow it."""
    if names_code(name) and not trust:
        raise Untrusted(
            f"{where} names code to import ({name}), and no file has anything imported unasked: {otherwise}{_SAY_SO}"
        )


def check_study(study: Study, where: str | Path, *, trust: bool) -> None:
    """Refuse what a study asks for beyond what is installed on this machine, unless it is trusted."""
    check_code(study.model, where, trust=trust)
    check_engine(study, where, trust=trust)


def check_engine(study: Study, where: str | Path, *, trust: bool) -> None:
    """Refuse to send jobs where a file says, since whoever answers there sends pickles back.

    Numbers of workers and the like lead nowhere; a text among an engine's options is an address.
    """
    texts = [f"{key}={value}" for key, value in study.engine_options.items() if not isinstance(value, int | float)]
    if texts and not trust:
        raise Untrusted(f"{where} sends its jobs elsewhere (engine {study.engine}, {', '.join(texts)}): {_SAY_SO}")


def import_factory(name: str) -> Callable[[], Any]:
    """The factory that `package.module:factory` names; modules in the current folder are found after installed ones."""
    module_name, _, attribute = name.partition(":")
    _find_in_current_folder(module_name.partition(".")[0])
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise InputError(f"cannot import {module_name!r} of {name}: {type(error).__name__}: {error}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        home = getattr(module, "__file__", None) or module_name
        raise UnknownName(f"factory in {module_name}", attribute, callables, hint=f"It was found in {home}")
    found: Callable[[], Any] = factory
    return found


def _find_in_current_folder(package: str) -> None:
    """Put the current folder onto the path, last, where the package is not found without it.

    There it stays: processes that are started import the same module again, and so may the module itself.
    """
    here = str(Path.cwd())
    known = package in sys.modules or package in sys.builtin_module_names or PathFinder.find_spec(package) is not None
    if not known and here not in sys.path:
        sys.path.append(here)
