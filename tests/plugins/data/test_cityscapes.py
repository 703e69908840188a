"""Cityscapes in its published tree, and what is refused."""

import logging
import shutil

import numpy as np
import pytest
import torch
from formats import encoded, noise, write_cityscapes

from bitplan.core.errors import FileError, InputError
from bitplan.tasks.base import load_task

SMALL = {"crop": 32, "height": 48, "width": 96}
# Of all 34 ids, from cityscapesScripts' labels.py.
TRAIN_IDS = [255, 255, 255, 255, 255, 255, 255, 0, 1, 255, 255, 2, 3, 4, 255, 255, 255, 5, 255, 6, 7, 8, 9, 10, 11, 12,
             13, 14, 15, 255, 255, 16, 17, 18]  # fmt: skip


def make(folder, **options):
    return load_task("cityscapes", data=folder, **(SMALL | options))


def labels_of(task, split="test"):
    return torch.cat([labels for _, labels in task.batches(split, 2)])


def label_file(tree, city="aachen", row=1, split="val"):
    return tree / "gtFine" / split / city / f"{city}_{row:06}_000019_gtFine_labelIds.png"


def image_file(tree, city="aachen", row=1, split="val"):
    return tree / "leftImg8bit" / split / city / f"{city}_{row:06}_000019_leftImg8bit.png"


@pytest.mark.parametrize(("split", "part"), [("train", "train"), ("test", "val")])
def test_ids_become_the_19_training_ids(tmp_path, split, part):
    written = write_cityscapes(tmp_path)
    expected = np.stack([label for stem, (_, label) in sorted(written.items()) if stem.startswith(part)])
    assert torch.equal(labels_of(make(tmp_path), split), torch.tensor(TRAIN_IDS)[torch.from_numpy(expected).long()])
    assert make(tmp_path).size(split) == 6


def test_every_id_has_its_class(tmp_path):
    write_cityscapes(tmp_path)
    label_file(tmp_path).write_bytes(encoded(np.arange(48 * 96, dtype=np.uint8).reshape(48, 96) % 34, "png"))
    label = labels_of(make(tmp_path))[1].flatten()
    ids = torch.arange(48 * 96).to(torch.uint8).long() % 34
    assert torch.equal(label, torch.tensor(TRAIN_IDS)[ids])
    assert len(make(tmp_path).class_names) == 19 == len(set(TRAIN_IDS)) - 1


def test_labels_with_training_ids_are_preferred_where_there_are_any(cityscapes_tree):
    before = labels_of(make(cityscapes_tree))
    label = noise(1, 48, 96)[0][..., 0] % 20
    label[label == 19] = 255
    made = label_file(cityscapes_tree).name.replace("labelIds", "labelTrainIds")
    label_file(cityscapes_tree).with_name(made).write_bytes(
        encoded(np.where(label == 19, 255, label).astype("u1"), "png")
    )
    after = labels_of(make(cityscapes_tree))
    assert torch.equal(after[1], torch.from_numpy(label).long())
    assert torch.equal(after[[0, 2, 3, 4, 5]], before[[0, 2, 3, 4, 5]])


def test_other_files_of_the_archives_are_left_alone(cityscapes_tree):
    before = labels_of(make(cityscapes_tree))
    for name in ("instanceIds.png", "color.png", "polygons.json"):
        file = label_file(cityscapes_tree)
        file.with_name(file.name.replace("labelIds.png", name)).write_bytes(b"x")
    (cityscapes_tree / "leftImg8bit" / "val" / "license.txt").write_text("x")
    assert torch.equal(labels_of(make(cityscapes_tree)), before)


def test_training_scenes_are_random_parts_whatever_the_number_of_threads(cityscapes_tree):
    one, many = (list(make(cityscapes_tree, workers=workers).batches("train", 4, seed=2)) for workers in (1, 8))
    assert [tuple(images.shape) for images, _ in one] == [(4, 3, 32, 32), (2, 3, 32, 32)]
    for (images, labels), (others, other_labels) in zip(one, many, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)


def test_defaults_are_those_of_the_published_scenes():
    task = load_task("cityscapes")
    assert tuple(task.example().shape) == (1, 3, 1024, 2048)
    assert (task.crop, task.min_scale, task.max_scale) == (713, 0.5, 2.0)


@pytest.mark.parametrize(("split", "part"), [("train", "train"), ("test", "val")])
@pytest.mark.parametrize("kind", ["leftImg8bit", "gtFine"])
def test_missing_data_says_what_to_download_and_where_to_put_it(cityscapes_tree, split, part, kind):
    shutil.rmtree(cityscapes_tree / kind / part)
    with pytest.raises(FileError) as refused:
        make(cityscapes_tree).batches(split, 8)
    message = str(refused.value)
    assert "\n" not in message
    assert f"download {kind}_trainvaltest.zip from https://www.cityscapes-dataset.com" in message
    assert str(cityscapes_tree / kind / part) in message


def test_a_split_without_images_is_refused(cityscapes_tree):
    shutil.rmtree(cityscapes_tree / "leftImg8bit" / "val")
    (cityscapes_tree / "leftImg8bit" / "val" / "aachen").mkdir(parents=True)
    with pytest.raises(FileError, match="val has no image CITY/"):
        make(cityscapes_tree).size("test")


@pytest.mark.parametrize("whole_city", [True, False])
def test_a_missing_label_is_named(cityscapes_tree, whole_city):
    if whole_city:
        shutil.rmtree(label_file(cityscapes_tree).parent)
    else:
        label_file(cityscapes_tree, row=0).unlink()
    message = (
        r"aachen_000000_000019_leftImg8bit.png has no label: .*aachen_000000_000019_gtFine_labelIds.png is missing"
    )
    with pytest.raises(FileError, match=message):
        make(cityscapes_tree).size("test")


@pytest.mark.parametrize("file", [image_file, label_file])
def test_a_corrupt_image_is_named_and_can_be_skipped(cityscapes_tree, caplog, file):
    path = file(cityscapes_tree)
    whole = labels_of(make(cityscapes_tree))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(FileError, match=rf"the image .*{path.name} cannot be read \(.*\): .*on_corrupt=skip"):
        labels_of(make(cityscapes_tree))
    with caplog.at_level(logging.WARNING):
        left = labels_of(make(cityscapes_tree, on_corrupt="skip"))
    assert torch.equal(left, whole[[0, 2, 3, 4, 5]])
    assert path.name in caplog.text


@pytest.mark.parametrize("value", [34, 255])
def test_a_label_out_of_range_is_refused_by_name(cityscapes_tree, value):
    path = label_file(cityscapes_tree)
    path.write_bytes(encoded(np.full((48, 96), value, np.uint8), "png"))
    for on_corrupt in ("stop", "skip"):
        with pytest.raises(FileError, match=rf"{path.name}: there is a pixel {value}, labels have 0 … 32 and 33"):
            labels_of(make(cityscapes_tree, on_corrupt=on_corrupt))


def test_image_and_label_of_different_sizes_are_refused(cityscapes_tree):
    path = label_file(cityscapes_tree)
    path.write_bytes(encoded(np.zeros((24, 48), np.uint8), "png"))
    with pytest.raises(FileError, match=rf"{path.name} has 48×24 pixels, not 96×48"):
        labels_of(make(cityscapes_tree))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"workers": 0}, "workers is 0"), ({"crop": "x"}, "crop is 'x'"), ({"max_scale": 0.1}, "scaled by 0.5 to 0.1")],
)
def test_options_are_checked_when_the_task_is_made(options, message):
    with pytest.raises(InputError, match=message):
        make("none", **options)
