"""The functions whose products of activations can be quantized, as plans name them (no torch here)."""

from __future__ import annotations

ATTENTION = "scaled_dot_product_attention"
MATRIX_PRODUCTS = frozenset({"matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"})
PRODUCT_NAMES = MATRIX_PRODUCTS | {ATTENTION}
