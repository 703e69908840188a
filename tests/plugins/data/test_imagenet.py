"""ImageNet in class folders and in parquet files, and what is refused."""

import logging
import shutil

import numpy as np
import pytest
import torch
from formats import SYNSETS, encoded, noise, write_parquet
from PIL import Image
from torch import nn

from bitplan.adapters.torchvision import torchvision
from bitplan.core.errors import FileError, InputError
from bitplan.plugins.data.pillow import decode
from bitplan.tasks.base import load_task

SMALL = {"train_size": 24, "test_size": 32, "resize": 36, "classes": 3}


def make(folder, **options):
    return load_task("imagenet", data=folder, **(SMALL | options))


class Constant(nn.Module):
    """The same class scores for every image."""

    def __init__(self, scores):
        super().__init__()
        self.scores = nn.Parameter(torch.tensor(scores))

    def forward(self, x):
        return self.scores.expand(len(x), -1)


def test_labels_are_the_positions_of_the_sorted_folders(imagenet_folders):
    task = make(imagenet_folders)
    assert torch.cat([labels for _, labels in task.batches("test", 4)]).tolist() == [0, 0, 1, 1, 2, 2]
    assert (task.size("train"), task.size("test")) == (6, 6)


def test_test_images_are_seen_as_torchvision_sees_them(imagenet_folders):
    transforms = torchvision().transforms
    see = transforms.Compose([
        transforms.Resize(36), transforms.CenterCrop(32), transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])  # fmt: skip
    paths = sorted((imagenet_folders / "val").glob("*/*"))
    expected = torch.stack([see(Image.open(path).convert("RGB")) for path in paths])
    images = torch.cat([images for images, _ in make(imagenet_folders).batches("test", 4)])
    torch.testing.assert_close(images, expected)


def test_an_image_of_the_test_size_is_taken_as_it_is(tmp_path):
    pixels = noise(2, 32, 32)
    write_parquet(tmp_path / "val.parquet", [encoded(image) for image in pixels], [0, 2])
    images, labels = next(iter(make(tmp_path).batches("test", 2)))
    mean, std = (np.array(v).reshape(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    expected = (pixels.transpose(0, 3, 1, 2) / 255 - mean) / std
    torch.testing.assert_close(images, torch.tensor(expected, dtype=torch.float32))
    assert labels.tolist() == [0, 2]


def test_calibration_images_stand_in_for_training_images(tmp_path):
    images = [encoded(image) for image in noise(3, 32, 32)]
    write_parquet(tmp_path / "imagenet-calib3.parquet", images, [0, 1, 2])
    assert make(tmp_path).size("train") == 3
    write_parquet(tmp_path / "imagenet-train.parquet", images[:2], [0, 1])
    assert make(tmp_path).size("train") == 2


def test_training_images_are_random_parts_whatever_the_number_of_threads(imagenet_folders):
    one, many = (list(make(imagenet_folders, workers=workers).batches("train", 4, seed=2)) for workers in (1, 8))
    assert [images.shape[2:] for images, _ in one] == [(24, 24), (24, 24)]
    for (images, labels), (others, other_labels) in zip(one, many, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)


def test_a_long_thin_image_has_a_random_part_too(tmp_path):
    write_parquet(tmp_path / "train.parquet", [encoded(noise(1, 2, 300)[0]), encoded(noise(1, 1, 1)[0])], [0, 1])
    for seed in range(5):
        assert next(iter(make(tmp_path).batches("train", 2, seed)))[0].shape == (2, 3, 24, 24)


def test_a_pass_can_be_left_early(imagenet_folders):
    assert len(next(iter(make(imagenet_folders).batches("train", 1, seed=0)))[1]) == 1


def test_grey_images_are_read(tmp_path):
    grey = Image.fromarray(noise(1, 40, 40)[0]).convert("L")
    grey.save(tmp_path / "grey.png")
    write_parquet(tmp_path / "val.parquet", [(tmp_path / "grey.png").read_bytes()], [1])
    assert next(iter(make(tmp_path).batches("test", 1)))[0].shape == (1, 3, 32, 32)


def test_top_1_and_top_5(tmp_path):
    images = [encoded(image) for image in noise(4, 32, 32)]
    write_parquet(tmp_path / "val.parquet", images, [0, 1, 4, 5])
    task = make(tmp_path, classes=8)
    model = Constant([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0])
    assert task.scores(model) == {"top-1": 25.0, "top-5": 75.0}
    assert task.score(model) == 25.0
    assert task.scores(Constant([1.0, 0.0, 0.0]))["top-5"] == 50.0  # with fewer classes, all of them


@pytest.mark.parametrize(("split", "part"), [("train", "train"), ("test", "val")])
def test_missing_data_says_what_to_download_and_where_to_put_it(tmp_path, split, part):
    with pytest.raises(FileError) as refused:
        make(tmp_path).batches(split, 8)
    message = str(refused.value)
    assert "\n" not in message
    assert f"ILSVRC2012_img_{part}.tar from https://image-net.org" in message
    assert str(tmp_path / part) in message


def test_another_number_of_class_folders_is_refused(imagenet_folders):
    with pytest.raises(FileError, match=r"val has 3 class folders, not 1000: .* valprep.sh"):
        make(imagenet_folders, classes=1000).size("test")


def test_splits_with_other_classes_are_refused(imagenet_folders):
    (imagenet_folders / "val" / SYNSETS[2]).rename(imagenet_folders / "val" / "n99999999")
    for split in ("train", "test"):
        with pytest.raises(FileError, match="do not have the same classes: only one of them has n01484850"):
            make(imagenet_folders).size(split)


def test_the_validation_folder_is_enough_for_a_score(imagenet_folders):
    shutil.rmtree(imagenet_folders / "train")
    assert make(imagenet_folders).score(Constant([0.0, 1.0, 0.0])) == pytest.approx(100 / 3)


def test_an_empty_class_folder_is_named(imagenet_folders):
    for path in (imagenet_folders / "val" / SYNSETS[1]).iterdir():
        path.unlink()
    with pytest.raises(FileError, match=f"{SYNSETS[1]} has no image"):
        make(imagenet_folders).size("test")


def test_a_corrupt_image_is_named_and_can_be_skipped(imagenet_folders, caplog):
    path = imagenet_folders / "val" / SYNSETS[1] / f"{SYNSETS[1]}_1.JPEG"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(FileError, match=rf"the image .*{path.name} cannot be read \(.*\): .*on_corrupt=skip"):
        list(make(imagenet_folders).batches("test", 2))
    task = make(imagenet_folders, on_corrupt="skip")
    with caplog.at_level(logging.WARNING):
        assert [labels.tolist() for _, labels in task.batches("test", 2)] == [[0, 0], [1], [2, 2]]
        assert [labels.tolist() for _, labels in task.batches("test", 1)] == [[0], [0], [1], [2], [2]]
    assert path.name in caplog.text
    assert task.score(Constant([0.0, 1.0, 0.0])) == pytest.approx(20)


def test_no_program_is_run_for_an_image():
    """Pillow hands PostScript to Ghostscript, whatever the file is called."""
    drawing = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(FileError, match="not an image in a known format"):
        decode(drawing)


def test_no_readable_image_is_no_score(tmp_path):
    write_parquet(tmp_path / "val.parquet", [b"", b"x"], [0, 1])
    with pytest.raises(InputError, match="no image that can be read"):
        make(tmp_path, on_corrupt="skip").score(Constant([0.0, 1.0, 0.0]))


@pytest.mark.parametrize("label", [3, -1])
def test_a_label_out_of_range_is_refused_with_its_place(tmp_path, label):
    write_parquet(tmp_path / "val.parquet", [encoded(noise(1, 32, 32)[0])], [label])
    with pytest.raises(FileError, match=rf"val.parquet, row 0: label {label} is not one of the 3 classes 0 … 2"):
        make(tmp_path).size("test")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_size": 0}, "train_size is 0: it must be a whole number of at least 1"),
        ({"workers": "2"}, "imagenet: workers is '2', and must be a whole number"),
        ({"resize": 30}, "resize is 30, smaller than test_size, 32"),
    ],
)
def test_sizes_are_checked_when_the_task_is_made(options, message):
    with pytest.raises(InputError, match=message):
        make("none", **options)
