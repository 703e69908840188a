"""What a file may ask for: names of what is installed. Code is imported, and jobs sent away, where the user says so.

This is the one place that imports a module by a name that somebody wrote (`docs/decisions/trust.md`).
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from bitplan.core.errors import InputError, UnknownName, Untrusted
from bitplan.core.parsing import first_line
from bitplan.core.studies import Study

_SAY_SO = "if you know what it does, say so with --trust (in Python: trust=True)"


def names_code(name: str) -> bool:
    """Whether a model's or task's name is `package.module:factory`, which is imported; others are of what is there."""
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
    check_code(study.task, where, trust=trust)
    check_engine(study, where, trust=trust)


def check_engine(study: Study, where: str | Path, *, trust: bool) -> None:
    """Refuse to send jobs where a file says, since whoever answers there sends pickles back.

    Numbers of workers and the like lead nowhere; a text among an engine's options is an address.
    """
    texts = [f"{key}={value}" for key, value in study.engine_options.items() if not isinstance(value, int | float)]
    if texts and not trust:
        raise Untrusted(f"{where} sends its jobs elsewhere (engine {study.engine}, {', '.join(texts)}): {_SAY_SO}")


def import_factory(name: str) -> Callable[..., Any]:
    """The factory that `package.module:factory` names; modules in the current folder are found after installed ones."""
    found: Callable[..., Any] = _imported(name, "factory", callable)
    return found


def import_data(name: str) -> Any:
    """The data that `package.module:loader` names: the thing itself, or what a function gives that takes nothing."""
    found = _imported(name, "data", lambda thing: thing is not None)
    if not inspect.isroutine(found):
        return found
    try:
        given = found()
    except Exception as error:
        raise InputError(
            f"{name} gives no data, its code raised {type(error).__name__}: {first_line(error)}; it is called without "
            "arguments"
        ) from error
    if given is None:
        raise InputError(f"{name} returned None: let it return a DataLoader, a Dataset or batches")
    return given


def _imported(name: str, what: str, is_one: Callable[[Any], bool]) -> Any:
    module_name, _, attribute = name.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        stem = Path(module_name).name.removesuffix(".py")
        raise InputError(f"{name} names a file, not a module: go to its folder and write {stem}:{attribute}")
    _find_in_current_folder(module_name.partition(".")[0])
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise InputError(f"cannot import {module_name!r} of {name}: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if not is_one(found):
        others = [key for key, value in vars(module).items() if is_one(value) and not key.startswith("_")]
        home = getattr(module, "__file__", None) or module_name
        raise UnknownName(f"{what} in {module_name}", attribute, others, hint=f"It was found in {home}")
    return found


def is_looked_into(folder: str) -> bool:
    """Whether this process looks for modules in a folder."""
    return str(Path(folder).absolute()) in {str(Path(one).absolute()) for one in sys.path}


def _find_in_current_folder(package: str) -> None:
    """Put the current folder onto the path, last, where the package is not found without it.

    There it stays: processes that are started import the same module again, and so may the module itself.
    """
    here = str(Path.cwd())
    known = package in sys.modules or package in sys.builtin_module_names or PathFinder.find_spec(package) is not None
    if not known and here not in sys.path:
        sys.path.append(here)
