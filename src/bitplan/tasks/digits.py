"""Handwritten digits, 8×8: small, real, and inside the package, so nothing is downloaded.

`digits.npz` holds the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), from
the UCI Machine Learning Repository (https://doi.org/10.24432/C50P49), licensed under CC BY 4.0. The images are the same
as in scikit-learn's `load_digits`; they were only stored in another format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from bitplan.tasks.base import Split
from bitplan.tasks.images import Classification, Images, Labelled, Scale, Shifts, Splits, batches_of, check_request

_FILE = Path(__file__).with_name("digits.npz")
_SPLIT_SEED = 0
_EVERY = 5  # one image in five is a test image
_TOP = 16  # digits have 17 shades of grey
_SHIFTS = Shifts(1, mirror=False)


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return 1,797 images, uint8 (N, 8, 8) with values 0 … 16, and their digits, int64 (N,)."""
    with np.load(_FILE, allow_pickle=False) as data:
        return data["images"], data["labels"].astype(np.int64)


@final
@dataclass(frozen=True)
class Digits(Splits[Images], Classification):
    """1,437 training and 360 test images, both with every digit in equal shares; (B, 1, 8, 8), mean 0 and deviation 1.

    Training images are shifted by up to one pixel. With `shifted` so are test images: each is there in all nine places,
    3,240 in all, for scores that depend less on single images.
    """

    shifted: bool = False

    name = "digits"
    version = 1

    def example(self) -> Tensor:
        """Return one image."""
        return torch.empty(1, 1, 8, 8, device="meta")

    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterator[Labelled]:
        """Yield one pass over a split."""
        check_request(split, batch_size)
        augment = _SHIFTS if split == "train" else None
        return batches_of(self._data(split), self._scale, batch_size, seed, augment)

    def _read(self, split: Split) -> Images:
        pixels, labels = load_digits()
        ticket = np.random.RandomState(_SPLIT_SEED).permutation(len(labels))  # numpy keeps this stream for ever
        by_digit = np.lexsort((ticket, labels))
        test = np.zeros(len(labels), dtype=bool)
        test[by_digit[::_EVERY]] = True
        rows = test if split == "test" else ~test
        images = Images(torch.from_numpy(pixels[rows])[:, None], torch.from_numpy(labels[rows]))
        return _SHIFTS.everywhere(images) if self.shifted and split == "test" else images

    @cached_property
    def _scale(self) -> Scale:
        shades = self._read("train").pixels.double() / _TOP  # all of them, also where some are held out
        return Scale(_TOP, (float(shades.mean()),), (float(shades.std()),))
