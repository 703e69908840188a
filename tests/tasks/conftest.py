"""Small data sets on disk."""

import pytest
from formats import encoded, noise, write_folders, write_parquet
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
