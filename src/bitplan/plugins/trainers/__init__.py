"""Quantized networks in the training loops of other libraries."""
