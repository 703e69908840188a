"""torchao: the configuration object that a recipe describes."""

from __future__ import annotations

from typing import Any

from bitplan.adapters.foreign import require
from bitplan.core.errors import InputError


def make_config(written: dict[str, Any]) -> Any:
    """Build a configuration from torchao's own form of it in JSON."""
    require("torchao", "export", "a configuration of torchao")
    from torchao.core.config import config_from_dict

    try:
        return config_from_dict(written)
    except (ValueError, TypeError) as error:
        raise InputError(f"this torchao does not know the configuration: {error}") from None
