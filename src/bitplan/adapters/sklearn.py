"""scikit-learn's handwritten digits, which come inside the package."""

from __future__ import annotations

import numpy as np


def digits() -> tuple[np.ndarray, np.ndarray]:
    """1,797 images, uint8 (N, 8, 8) with values 0 … 16, and their digits, int64 (N,)."""
    from sklearn.datasets import load_digits  # here, since it takes a second

    data = load_digits()
    return data.images.astype(np.uint8), data.target.astype(np.int64)
