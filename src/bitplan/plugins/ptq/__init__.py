"""Post-training quantization beyond compensated rounding: block-wise tuning."""
