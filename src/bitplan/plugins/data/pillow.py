"""Pillow: image files to pixels."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from bitplan.adapters.foreign import require
from bitplan.core.errors import FileError
from bitplan.core.parsing import first_line
from bitplan.store.files import open_file

if TYPE_CHECKING:
    from PIL.Image import Image as Image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF", "JPEG2000")
"""What is read; of others, pillow runs a program (Ghostscript) for some."""
T = TypeVar("T")
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def decode(source: bytes | str) -> Image:
    """The RGB image in some bytes or at a path; the error for a damaged one says why, the caller adds its name."""
    return _read(source, lambda image: image.convert("RGB"))


def decode_classes(source: bytes | str) -> np.ndarray:
    """uint8 (H, W): the bytes of an image that has one per pixel, such as a label; errors as for `decode`."""
    return _read(source, _bytes)


def _bytes(image: Image) -> np.ndarray:
    if image.mode not in ("L", "P"):  # grey, or numbers of colours in a palette
        raise FileError(f"its pixels are {image.mode}, not one byte each")
    return pixels(image)


def _read(source: bytes | str, use: Callable[[Image], T]) -> T:
    require("PIL", "vision", "decoding images", library="pillow")
    import PIL.Image

    try:
        with (
            io.BytesIO(source) if isinstance(source, bytes) else open_file(source) as file,
            PIL.Image.open(file, formats=FORMATS) as image,  # refuses images of more than 179 million pixels
        ):
            return use(image)
    except FileError:
        raise
    except PIL.UnidentifiedImageError:
        raise FileError("not an image in a known format") from None
    except Exception as error:  # pillow's readers raise many kinds on a damaged file
        raise FileError(first_line(error) or type(error).__name__) from None


def pixels(image: Image) -> np.ndarray:
    """uint8 (H, W, 3), or (H, W) of a grey one; writable."""
    return np.array(image, dtype=np.uint8)


def resized(image: Image, size: tuple[int, int], box: Box | None = None, *, nearest: bool = False) -> Image:
    """The part in the box, or all of it, at (width, height) `size`; bilinear and antialiased, as in torchvision.

    `nearest` takes one pixel each instead, for classes, which have no middle.
    """
    from PIL.Image import Resampling

    return image.resize(size, Resampling.NEAREST if nearest else Resampling.BILINEAR, box=box)


def resized_array(values: np.ndarray, size: tuple[int, int], box: Box, *, nearest: bool = False) -> np.ndarray:
    """The same for uint8 (H, W, 3) or (H, W) in memory."""
    import PIL.Image

    return pixels(resized(PIL.Image.fromarray(values), size, box, nearest=nearest))
