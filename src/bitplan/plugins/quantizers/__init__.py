"""Quantizers of the literature beside LSQ and FAQ."""
