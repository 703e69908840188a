"""Integer execution inside PyTorch: a copy of a quantized network that computes from codes."""

from __future__ import annotations

from bitplan.plugins.integer.integer_copy import IntegerLayers, integer, integer_layers

__all__ = ["IntegerLayers", "integer", "integer_layers"]
