"""What libraries of others have in common: they may be missing, and their errors run over several lines."""

from __future__ import annotations

import importlib.util

from bitplan.core.errors import MissingExtra


def require(module: str, extra: str, purpose: str, *, library: str | None = None) -> None:
    """Refuse where a module is not installed, without importing it; `library` is its name where that differs."""
    if importlib.util.find_spec(module) is None:
        raise MissingExtra(library or module, extra, purpose)
