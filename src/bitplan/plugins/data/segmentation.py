"""Segmentation tasks: the loss, the mean IoU, and scenes; void pixels count in neither."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.core.errors import FileError, InputError
from bitplan.plugins.data import pillow
from bitplan.plugins.data.encoded_images import readable
from bitplan.tasks.images import IMAGENET_SCALE, Labelled, LabelledImages, OnCorrupt

AUXILIARY = 0.4  # the share of the auxiliary head's loss, as for PSPNet


class Segmentation(LabelledImages):
    """A segmentation task but its data: a frozen dataclass derived from it brings `example`, `size` and `batches`.

    Labels are the classes of the pixels, (B, H, W), and 255 where void. A model returns scores (B, classes, H, W), in
    training also a tuple of them and those of auxiliary heads. Distillation compares the first scores, at void pixels
    too: there is no truth, but the teacher has an opinion there as elsewhere.
    """

    name: str
    metric = "mean IoU"
    class_names: tuple[str, ...]

    def loss(self, outputs: Any, batch: Labelled) -> Tensor:
        """Return cross-entropy, a mean over the pixels that are not void; plus 0.4 of that of each auxiliary head."""
        _, labels = batch
        main, *auxiliary = [_cross_entropy(self._check_scores(scores, labels), labels) for scores in _tuple(outputs)]
        return main + AUXILIARY * sum(auxiliary)

    def batch_score(self, outputs: Any, batch: Labelled) -> float:
        """Return the mean IoU of a batch, in percent; NaN if all is void."""
        return _mean(intersection_over_union(self._confusion(self.logits(outputs)[0], batch[1])))

    def score(self, model: nn.Module) -> float:
        """Return the mean IoU over the pixels of the whole test split, in percent."""
        return _mean(self._ious(model))

    def scores(self, model: nn.Module) -> dict[str, float]:
        """Return the mean IoU, and the IoU of each class that occurs, in percent."""
        ious = self._ious(model)
        named = zip(self.class_names, ious.tolist(), strict=True)
        return {self.metric: _mean(ious)} | {name: value for name, value in named if not math.isnan(value)}

    def _ious(self, model: nn.Module) -> Tensor:
        matrix = torch.stack(self._measure_batches(model, self._confusion)).sum(0)
        if not matrix.any():
            raise InputError("every pixel of the test split is void, so there is no score: look at the labels")
        return intersection_over_union(matrix)

    def _confusion(self, scores: Tensor, labels: Tensor) -> Tensor:
        return confusion(self._check_scores(scores, labels).argmax(1), labels, len(self.class_names))

    def _check_scores(self, scores: Tensor, labels: Tensor) -> Tensor:
        expected = (labels.shape[0], len(self.class_names), *labels.shape[1:])
        if scores.shape == expected:
            return scores
        if scores.dim() == 4 and scores.shape[1] != expected[1]:
            raise InputError(
                f"the model gives scores for {scores.shape[1]} classes, task {self.name} has {expected[1]}: "
                "take a model that was made for this task"
            )
        raise InputError(f"the model's scores are {tuple(scores.shape)}, task {self.name} needs {expected}")


def confusion(guesses: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return (classes, classes): how many pixels of each class (rows) were taken for each (columns), without void."""
    known = labels != VOID
    pairs = labels[known] * classes + guesses[known]
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def intersection_over_union(matrix: Tensor) -> Tensor:
    """Return (classes,), in percent, of a confusion matrix; NaN for a class that neither occurs nor is guessed."""
    counts = matrix.double()
    both = counts.diagonal()
    return 100 * both / (counts.sum(0) + counts.sum(1) - both)


def _mean(ious: Tensor) -> float:
    return float(ious.nanmean())


def _cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy; 0 if all is void, since a mean over nothing is not a number."""
    total = F.cross_entropy(scores, labels, ignore_index=VOID, reduction="sum")
    return total / (labels != VOID).sum().clamp(min=1)


def _tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


# Scenes: images with a class for every pixel; read, cropped at random and put into batches.

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
    """The files of a scene: names for messages, path or bytes of image and label, and the classes of values.

    A scene of another size than asked for is refused, unless it may be `scaled`.
    """

    image_name: str
    label_name: str
    image: str | bytes
    label: str | bytes
    table: np.ndarray
    scaled: bool = False

    def read(self, size: tuple[int, int], on_corrupt: OnCorrupt) -> Scene | None:
        """Return the scene, (height, width) `size`; None for a damaged one that is to be skipped."""
        image = readable(self.image_name, lambda: pillow.decode(self.image), on_corrupt)
        values = readable(self.label_name, lambda: pillow.decode_classes(self.label), on_corrupt)
        if image is None or values is None:
            return None
        width, height = image.size
        own = (height, width)
        _check_size(self.image_name, own, own if self.scaled else size)
        _check_size(self.label_name, values.shape, own if self.scaled else size)
        scene = Scene(pillow.pixels(image), self._classes(values))
        return scene if own == size else _resize(size, scene)

    def _classes(self, values: np.ndarray) -> np.ndarray:
        """Return the classes of a label's values, (H, W) → (H, W); a value without a class is refused."""
        classes: np.ndarray = self.table[values]
        refused = classes == _REFUSED
        if refused.any():
            *_, last, void = np.flatnonzero(self.table != _REFUSED)
            raise FileError(
                f"{self.label_name}: there is a pixel {values[refused][0]}, labels have 0 … {last} and {void}; "
                "correct the file"
            )
        return classes


def _resize(size: tuple[int, int], scene: Scene) -> Scene:
    """Return the whole scene at another size; a pixel of the label takes one of the old ones."""
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
    """Return uint8 (256,): the class of each value in a label, or VOID; a value that is not given is refused."""
    table = np.full(256, _REFUSED, np.uint8)
    table[list(classes)] = list(classes.values())
    return table


@dataclass(frozen=True)
class Crops:
    """Scale a scene by a random factor, and cut a random square of `size` pixels from it, mirrored half the time.

    If the scaled scene is smaller than the square, the rest is void, of the mean colour.
    """

    size: int
    least: float
    most: float

    def __post_init__(self) -> None:
        are_numbers = type(self.least) in (int, float) and type(self.most) in (int, float)
        if not are_numbers or not 0 < self.least <= self.most < math.inf:
            raise InputError(f"scenes cannot be scaled by {self.least} to {self.most}: give 0 < min_scale ≤ max_scale")

    def __call__(self, scene: Scene, seed: int) -> Scene:
        """Return a crop: (H, W) → (size, size)."""
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
        """Return, along one side, the begin and end in the scene, and the place in the square."""
        scaled = max(1, round(scale * side))
        length = min(self.size, scaled)
        start = draw.randint(0, scaled - length)
        place = draw.randint(0, self.size - length)
        return start * side / scaled, (start + length) * side / scaled, slice(place, place + length)


def batch_of(scenes: Sequence[Scene]) -> Labelled:
    """Return float (B, 3, H, W) and classes (B, H, W)."""
    pixels = torch.from_numpy(np.stack([scene.pixels for scene in scenes])).permute(0, 3, 1, 2)
    classes = torch.from_numpy(np.stack([scene.classes for scene in scenes]))
    return IMAGENET_SCALE(pixels.contiguous()), classes.long()
