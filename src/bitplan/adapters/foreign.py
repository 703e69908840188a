"""Require optional libraries."""

from __future__ import annotations

import importlib.util

from bitplan.core.errors import MissingExtra


def require(module: str, extra: str, purpose: str, *, library: str | None = None) -> None:
    """Raise MissingExtra if a module is not installed, without importing it; `library` is the package's name."""
    if importlib.util.find_spec(module) is None:
        raise MissingExtra(library or module, extra, purpose)
