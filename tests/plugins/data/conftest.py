"""Small data sets on disk."""

import pytest
from formats import encoded, noise, scene, write_camvid, write_cityscapes, write_folders, write_parquet
from squads import OPTIONS, write_json, write_tokenizer


@pytest.fixture
def cifar_parquet(tmp_path):
    folder = tmp_path / "cifar10"
    for part, seed in (("train-0of2", 0), ("train-1of2", 1), ("test-a", 2)):
        images = [encoded(pixels) for pixels in noise(10, 32, 32, seed)]
        write_parquet(folder / f"cifar10-{part}.parquet", images, [(3 * row) % 10 for row in range(10)])
    return folder


@pytest.fixture
def imagenet_folders(tmp_path):
    write_folders(tmp_path / "imagenet")
    return tmp_path / "imagenet"


@pytest.fixture
def squad_options(tmp_path):
    data, words = write_json(tmp_path / "squad"), write_tokenizer(tmp_path / "bert")
    return {"data": str(data), "tokenizer": str(words), **OPTIONS}


@pytest.fixture
def camvid_parquet(tmp_path):
    folder = tmp_path / "camvid"
    for split, first, count in (("train", 0, 10), ("val", 100, 5)):
        scenes = [scene(36, 48, range(12), seed=first + row) for row in range(count)]
        write_camvid(folder / f"camvid-{split}.parquet", scenes)
    return folder


@pytest.fixture
def cityscapes_tree(tmp_path):
    write_cityscapes(tmp_path / "cityscapes")
    return tmp_path / "cityscapes"
