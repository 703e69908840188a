"""What holds where nothing else is said; plain values, so that `--help` can show them and imports nothing."""

from __future__ import annotations

CHOICES = "w2a2,w4a4"
"""The precisions to choose from."""

AUTO = "auto"
"""The method, written instead of one by name: the best for what is there (`gains/auto.py`)."""

COST = "bmac"
"""What a budget limits that names no cost."""

END = "w8a8"
"""The precision of the first and of the last layer."""

NARROW = 128
"""Layers with fewer input features are fixed …"""

NARROW_AT = "w4a4"
"""… at the highest choice, or at this precision if the choices are not known."""

INSIDE = "w8a8"
"""The precision of embeddings and of products of activations."""
