"""CIFAR-10 in both of its formats, and what is refused."""

import logging
import pickle

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from formats import batch_of_python_2, batch_of_python_3, encoded, noise, write_batches, write_parquet

from bitplan.core.errors import FileError, UnknownName
from bitplan.tasks.base import load_task

MEAN, STD = (np.array(values).reshape(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def normalized(pixels):
    return torch.tensor((pixels.transpose(0, 3, 1, 2) / 255 - MEAN) / STD, dtype=torch.float32)


def everything(task, split):
    images, labels = zip(*task.batches(split, 100), strict=True)
    return torch.cat(images), torch.cat(labels)


@pytest.mark.parametrize("write", [batch_of_python_2, batch_of_python_3])
@pytest.mark.parametrize("above", [True, False])
def test_the_published_files_are_read(tmp_path, write, above):
    written = write_batches(tmp_path / "cifar-10-batches-py", write)
    task = load_task("cifar10", data=tmp_path if above else tmp_path / "cifar-10-batches-py")
    for split, names in (("train", [f"data_batch_{n}" for n in range(1, 6)]), ("test", ["test_batch"])):
        images, labels = everything(task, split)
        torch.testing.assert_close(images, normalized(np.concatenate([written[name][0] for name in names])))
        assert labels.tolist() == [label for name in names for label in written[name][1]]


def test_an_array_in_columns_is_read_too(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    pixels = write_batches(folder)["test_batch"][0]
    rows = np.asfortranarray(pixels.transpose(0, 3, 1, 2).reshape(4, -1))
    (folder / "test_batch").write_bytes(pickle.dumps({"data": rows, "labels": [0, 1, 2, 3]}, protocol=2))
    torch.testing.assert_close(everything(load_task("cifar10", data=folder), "test")[0], normalized(pixels))


def test_parquet_files_are_read(cifar_parquet):
    task = load_task("cifar10", data=str(cifar_parquet))
    images, labels = everything(task, "train")
    torch.testing.assert_close(images, normalized(np.concatenate([noise(10, 32, 32, 0), noise(10, 32, 32, 1)])))
    assert labels.tolist() == [(3 * row) % 10 for row in range(10)] * 2
    assert task.size("test") == 10


def test_missing_data_says_what_to_download_and_where_to_put_it(tmp_path):
    with pytest.raises(FileError) as refused:
        load_task("cifar10", data=tmp_path / "none").size("test")
    message = str(refused.value)
    assert "\n" not in message
    assert "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz" in message
    assert str(tmp_path / "none" / "cifar-10-batches-py") in message


def test_one_missing_batch_is_named(tmp_path):
    write_batches(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(FileError, match=r"cannot read .*data_batch_3: No such file"):
        load_task("cifar10", data=tmp_path).size("train")


class Hostile:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    "place", [lambda bad: bad, lambda bad: {"data": bad, "labels": [0]}, lambda bad: {"data": 0, "labels": [bad]}]
)
def test_a_hostile_pickle_is_refused_and_does_not_run(tmp_path, place, protocol):
    folder, mark = tmp_path / "cifar-10-batches-py", tmp_path / "it-ran"
    write_batches(folder)
    for bad in (Hostile(open, str(mark), "w"), Hostile(eval, f"open({str(mark)!r}, 'w')"), Hostile(np.fromfile, "x")):
        (folder / "test_batch").write_bytes(pickle.dumps(place(bad), protocol=protocol))
        with pytest.raises(FileError, match=r"test_batch wants to run code when it is read \(.*\), so it is refused"):
            load_task("cifar10", data=tmp_path).size("test")
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        batch_of_python_2(noise(4, 32, 32), [1, 2, 3, 4])[:5000],
        batch_of_python_2(noise(4, 32, 32), [1, 2, 3]),
        pickle.dumps([1, 2], protocol=2),
        pickle.dumps({"labels": [1]}, protocol=2),
        pickle.dumps({"data": np.zeros((1, 3072)), "labels": [1]}, protocol=2),
        pickle.dumps({"data": np.zeros((0, 3072), np.uint8), "labels": []}, protocol=4),
        pickle.dumps({"data": np.array([None]), "labels": [1]}, protocol=2),
    ],
)
def test_a_damaged_batch_is_named(tmp_path, content):
    write_batches(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(content)
    with pytest.raises(FileError, match=r"test_batch is cut off or not a CIFAR-10 batch \(.*\): fetch it again"):
        load_task("cifar10", data=tmp_path).size("test")


@pytest.mark.parametrize("label", [10, -1])
def test_a_label_out_of_range_is_refused_with_its_place(tmp_path, label):
    write_batches(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(batch_of_python_2(noise(2, 32, 32), [1, label]))
    with pytest.raises(FileError, match=rf"test_batch, row 1: label {label} is not one of the 10 classes 0 … 9"):
        load_task("cifar10", data=tmp_path).size("test")
    write_parquet(tmp_path / "p" / "test.parquet", [encoded(noise(1, 32, 32)[0])] * 3, [1, 2, label])
    with pytest.raises(FileError, match=rf"test.parquet, row 2: label {label} is not one of the 10 classes"):
        load_task("cifar10", data=tmp_path / "p").size("test")


@pytest.mark.parametrize(
    "bad", [b"", None, b"RIFF nonsense", encoded(noise(1, 32, 32)[0])[:200], encoded(noise(1, 28, 28)[0])]
)
def test_a_corrupt_image_is_named_and_can_be_skipped(tmp_path, caplog, bad):
    good = encoded(noise(1, 32, 32)[0])
    write_parquet(tmp_path / "cifar10-test.parquet", [good, bad, good], [4, 5, 6])
    with pytest.raises(
        FileError, match=r"the image 1.png \(row 1 of .*test.parquet\) cannot be read .*on_corrupt=skip"
    ):
        load_task("cifar10", data=tmp_path).size("test")
    with caplog.at_level(logging.WARNING):
        task = load_task("cifar10", data=tmp_path, on_corrupt="skip")
        assert everything(task, "test")[1].tolist() == [4, 6]
    assert "skipped 1.png" in caplog.text


def test_nothing_left_is_no_data_set(tmp_path):
    write_parquet(tmp_path / "test.parquet", [b"", b""], [0, 1])
    with pytest.raises(FileError, match="none of the 2 images"):
        load_task("cifar10", data=tmp_path, on_corrupt="skip").size("test")


def test_files_that_are_no_parquet_or_lack_columns_are_named(tmp_path, cifar_parquet):
    (tmp_path / "test.parquet").write_bytes(b"nonsense")
    with pytest.raises(FileError, match="test.parquet is cut off or not a parquet file"):
        load_task("cifar10", data=tmp_path).size("test")
    pyarrow.parquet.write_table(pyarrow.table({"label": [1], "image": [b""]}), tmp_path / "test.parquet")
    with pytest.raises(FileError, match="has no column file, webp; it has label, image"):
        load_task("cifar10", data=tmp_path).size("test")


def test_a_file_is_of_one_split_only(tmp_path, cifar_parquet):
    (cifar_parquet / "cifar10-test-a.parquet").rename(cifar_parquet / "latest-train.parquet")
    assert load_task("cifar10", data=cifar_parquet).size("train") == 30
    (cifar_parquet / "latest-train.parquet").rename(cifar_parquet / "train-and-test.parquet")
    for split in ("train", "test"):
        with pytest.raises(FileError, match="train-and-test.parquet is named for"):
            load_task("cifar10", data=cifar_parquet).size(split)


def test_on_corrupt_is_stop_or_skip():
    with pytest.raises(UnknownName, match="unknown on_corrupt 'skp'; did you mean skip"):
        load_task("cifar10", on_corrupt="skp")
