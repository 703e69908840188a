"""Random parts of scenes: what is cut out, where it goes, and that image and label stay together."""

import numpy as np
import pytest
from formats import scene

from bitplan.core.errors import InputError
from bitplan.plugins.data.segmentation import VOID, Crops, Scene


def numbered(height, width):
    """Every pixel says where it is: row in red and as its class, column in green."""
    rows, columns = np.mgrid[:height, :width].astype(np.uint8)
    return Scene(np.stack([rows, columns, rows * 0], axis=2), rows)


@pytest.mark.parametrize("seed", range(8))
def test_unscaled_a_crop_is_a_part_of_the_scene_as_it_is(seed):
    whole = numbered(30, 50)
    crop = Crops(20, 1, 1)(whole, seed)
    top, left = int(crop.pixels[..., 0].min()), int(crop.pixels[..., 1].min())
    expected = Scene(whole.pixels[top : top + 20, left : left + 20], whole.classes[top : top + 20, left : left + 20])
    mirrored = crop.pixels[0, 0, 1] > crop.pixels[0, -1, 1]
    step = -1 if mirrored else 1
    np.testing.assert_array_equal(crop.pixels[:, ::step], expected.pixels)
    np.testing.assert_array_equal(crop.classes[:, ::step], expected.classes)


def test_crops_come_from_everywhere_and_about_half_are_mirrored():
    crops = [Crops(20, 1, 1)(numbered(30, 50), seed).pixels for seed in range(300)]
    assert {int(crop[..., 0].min()) for crop in crops} == set(range(11))
    assert {int(crop[..., 1].min()) for crop in crops} == set(range(31))
    assert 100 < sum(crop[0, 0, 1] > crop[0, -1, 1] for crop in crops) < 200


@pytest.mark.parametrize("seed", range(8))
def test_a_scene_smaller_than_the_square_is_whole_and_the_rest_is_void(seed):
    image, label = scene(20, 32, range(11), seed)
    crop = Crops(40, 1, 1)(Scene(image, label), seed)
    assert crop.classes.shape == (40, 40)
    inside = crop.classes != VOID
    assert inside.sum() == 20 * 32
    assert np.array_equal(np.bincount(crop.classes[inside]), np.bincount(label.ravel()))
    assert (crop.pixels[~inside] == (124, 116, 104)).all()


@pytest.mark.parametrize("seed", range(8))
def test_scaled_image_and_label_stay_together_and_no_class_is_invented(seed):
    _, label = scene(60, 80, [0, 7, 10], seed)
    flat = np.stack([label * 20] * 3, axis=2)
    crop = Crops(48, 0.5, 2)(Scene(flat, label), seed)
    assert set(np.unique(crop.classes)) <= {0, 7, 10, VOID}
    inside = crop.classes != VOID
    off = np.abs(crop.pixels[inside][:, 0] / 20 - crop.classes[inside])
    assert (off > 0.5).mean() < 0.1  # only at the edges between blocks, where colours are mixed


def test_the_factor_is_between_its_limits():
    sizes = {int((Crops(100, 0.5, 2)(numbered(40, 40), seed).classes != VOID)[:, 50].sum()) for seed in range(200)}
    assert 20 <= min(sizes - {0}) < 25
    assert 75 < max(sizes) <= 80


def test_one_seed_gives_one_crop():
    first, second, other = (Crops(20, 0.5, 2)(numbered(30, 50), seed).pixels for seed in (1, 1, 2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(("least", "most"), [(0, 1), (2, 1), (-1, 1), (1, float("inf")), (float("nan"), 1), ("x", 1)])
def test_impossible_factors_are_refused(least, most):
    with pytest.raises(InputError, match="give 0 < min_scale ≤ max_scale"):
        Crops(20, least, most)
