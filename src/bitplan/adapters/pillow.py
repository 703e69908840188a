"""Pillow: image files to pixels."""

from __future__ import annotations

import importlib.util
import io
from typing import TYPE_CHECKING

import numpy as np

from bitplan.core.errors import FileError, MissingExtra

if TYPE_CHECKING:
    from PIL.Image import Image as Image

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def decode(source: bytes | str) -> Image:
    """The RGB image in some bytes or at a path; the error for a damaged one says why, the caller adds its name."""
    if importlib.util.find_spec("PIL") is None:
        raise MissingExtra("pillow", "vision", "decoding images")
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return image.convert("RGB")
    except Exception as error:  # pillow's readers raise many kinds on a damaged file
        why = "not an image in a known format" if isinstance(error, PIL.UnidentifiedImageError) else str(error)
        raise FileError(why.partition("\n")[0][:120] or type(error).__name__) from None


def pixels(image: Image) -> np.ndarray:
    """uint8 (H, W, 3), writable."""
    return np.array(image, dtype=np.uint8)


def resized(image: Image, size: tuple[int, int], box: Box | None = None) -> Image:
    """The part in the box, or all of it, at (width, height) `size`; bilinear and antialiased, as in torchvision."""
    from PIL.Image import Resampling

    return image.resize(size, Resampling.BILINEAR, box=box)
