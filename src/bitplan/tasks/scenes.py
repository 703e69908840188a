"""Scenes: images whose every pixel has a class; read, cropped at random and put into batches."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bitplan.adapters import pillow
from bitplan.core.errors import FileError, InputError
from bitplan.tasks.encoded import readable
from bitplan.tasks.images import IMAGENET_SCALE, OnCorrupt
from bitplan.tasks.labelled import Labelled

VOID = 255
_REFUSED = 254
_FILL = tuple(round(255 * mean) for mean in IMAGENET_SCALE.mean)  # what is 0 after scaling


@dataclass(frozen=True)
class Scene:
    """uint8 (H, W, 3), and the class of each pixel, uint8 (H, W), 255 where void."""

    pixels: np.ndarray
    classes: np.ndarray


@dataclass(frozen=True)
class SceneFiles:
    """Where a scene is: two names for messages, the path or the bytes of image and label, and what labels mean.

    One that is not of the size asked for is refused, unless it may be `scaled`.
    """

    image_name: str
    label_name: str
    image: str | bytes
    label: str | bytes
    table: np.ndarray
    scaled: bool = False

    def read(self, size: tuple[int, int], on_corrupt: OnCorrupt) -> Scene | None:
        """The scene, (height, width) `size`; None for a damaged one that is to be skipped."""
        image = readable(self.image_name, lambda: pillow.decode(self.image), on_corrupt)
        values = readable(self.label_name, lambda: pillow.decode_classes(self.label), on_corrupt)
        if image is None or values is None:
            return None
        width, height = image.size
        own = (height, width)
        _check_size(self.image_name, own, own if self.scaled else size)
        _check_size(self.label_name, values.shape, own if self.scaled else size)
        scene = Scene(pillow.pixels(image), self._classes(values))
        return scene if own == size else _at(size, scene)

    def _classes(self, values: np.ndarray) -> np.ndarray:
        """What the values of a label mean, (H, W) → (H, W); one that means nothing is refused."""
        classes: np.ndarray = self.table[values]
        refused = classes == _REFUSED
        if refused.any():
            *_, last, void = np.flatnonzero(self.table != _REFUSED)
            raise FileError(
                f"{self.label_name}: there is a pixel {values[refused][0]}, labels have 0 … {last} and {void}; "
                "correct the file"
            )
        return classes


def _at(size: tuple[int, int], scene: Scene) -> Scene:
    """The whole scene at another size; a pixel of the label takes one of the old ones."""
    height, width = scene.classes.shape
    box, wide_high = (0.0, 0.0, float(width), float(height)), (size[1], size[0])
    pixels = pillow.resized_array(scene.pixels, wide_high, box)
    return Scene(pixels, pillow.resized_array(scene.classes, wide_high, box, nearest=True))


def _check_size(name: str, found: tuple[int, ...], wanted: tuple[int, int]) -> None:
    if found != wanted:
        raise FileError(
            f"{name} has {found[1]}×{found[0]} pixels, not {wanted[1]}×{wanted[0]}: all images and labels must "
            "have one size, which the options width and height give"
        )


def label_table(classes: Mapping[int, int]) -> np.ndarray:
    """uint8 (256,): the class of each value in a label, or VOID; a value that is not given is refused."""
    table = np.full(256, _REFUSED, np.uint8)
    table[list(classes)] = list(classes.values())
    return table


@dataclass(frozen=True)
class Crops:
    """A scene scaled by a random factor, of it a random square of `size` pixels, mirrored half the time.

    Where the scaled scene is smaller than the square, the rest is void, of the mean colour.
    """

    size: int
    least: float
    most: float

    def __post_init__(self) -> None:
        are_numbers = type(self.least) in (int, float) and type(self.most) in (int, float)
        if not are_numbers or not 0 < self.least <= self.most < math.inf:
            raise InputError(f"scenes cannot be scaled by {self.least} to {self.most}: give 0 < min_scale ≤ max_scale")

    def __call__(self, scene: Scene, seed: int) -> Scene:
        """(H, W) → (size, size)."""
        draw = random.Random(seed)
        scale = draw.uniform(self.least, self.most)
        height, width = scene.classes.shape
        top, bottom, rows = self._span(height, scale, draw)
        left, right, columns = self._span(width, scale, draw)
        box = left, top, right, bottom
        size = columns.stop - columns.start, rows.stop - rows.start
        pixels = np.full((self.size, self.size, 3), _FILL, np.uint8)
        classes = np.full((self.size, self.size), VOID, np.uint8)
        pixels[rows, columns] = pillow.resized_array(scene.pixels, size, box)
        classes[rows, columns] = pillow.resized_array(scene.classes, size, box, nearest=True)
        if draw.random() < 0.5:
            return Scene(pixels[:, ::-1], classes[:, ::-1])
        return Scene(pixels, classes)

    def _span(self, side: int, scale: float, draw: random.Random) -> tuple[float, float, slice]:
        """Along one side: from where to where in the scene, and where that goes in the square."""
        scaled = max(1, round(scale * side))
        length = min(self.size, scaled)
        start = draw.randint(0, scaled - length)
        place = draw.randint(0, self.size - length)
        return start * side / scaled, (start + length) * side / scaled, slice(place, place + length)


def batch_of(scenes: Sequence[Scene]) -> Labelled:
    """Float (B, 3, H, W) and classes (B, H, W)."""
    pixels = torch.from_numpy(np.stack([scene.pixels for scene in scenes])).permute(0, 3, 1, 2)
    classes = torch.from_numpy(np.stack([scene.classes for scene in scenes]))
    return IMAGENET_SCALE(pixels.contiguous()), classes.long()
