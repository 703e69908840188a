"""Small data in the real formats: what is published as CIFAR-10, ImageNet, CamVid and Cityscapes, with a few images."""

from __future__ import annotations

import io
import pickle
import struct

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

SYNSETS = ("n01440764", "n01443537", "n01484850")


def noise(count, height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def encoded(pixels, kind="webp"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **({"lossless": True} if kind == "webp" else {}))
    return file.getvalue()


def rows_of(pixels):
    """CIFAR's order: all red, all green, all blue."""
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).reshape(len(pixels), -1)


def batch_of_python_2(pixels, labels):
    """The published files: Python 2's protocol 2, whose strings are bytes without a name for their encoding."""

    def text(value):
        return b"U" + struct.pack("<B", len(value)) + value

    def number(value):
        return b"J" + struct.pack("<i", value)

    raw = rows_of(pixels).tobytes()
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    shape = number(len(labels)) + number(3072) + b"\x86"
    array += b"(" + number(1) + shape + dtype + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    classes = b"](" + b"".join(number(label) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + classes + text(b"batch_label") + text(b"1") + b"u."


def batch_of_python_3(pixels, labels):
    return pickle.dumps({b"data": rows_of(pixels), b"labels": labels, b"filenames": [b"a.png"]}, protocol=2)


def write_batches(folder, write=batch_of_python_2, count=4):
    """Pixels and labels of each file, by its name."""
    folder.mkdir(parents=True)
    written = {}
    for seed, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        pixels, labels = noise(count, 32, 32, seed), [(seed + row) % 10 for row in range(count)]
        (folder / name).write_bytes(write(pixels, labels))
        written[name] = pixels, labels
    return written


def write_parquet(path, images, labels):
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [f"{row}.png" for row in range(len(images))]
    table = pyarrow.table({"file": files, "label": pyarrow.array(labels, pyarrow.int16()), "webp": images})
    pyarrow.parquet.write_table(table, path)


def write_folders(root, count=2):
    for split, seed in (("train", 0), ("val", 1)):
        for label, synset in enumerate(SYNSETS):
            folder = root / split / synset
            folder.mkdir(parents=True)
            for row, pixels in enumerate(noise(count, 40, 56, seed=100 * seed + label)):
                kind = "jpeg" if row else "png"
                (folder / f"{synset}_{row}.{'JPEG' if row else 'png'}").write_bytes(encoded(pixels, kind))


def scene(height, width, values, seed=0):
    """A street of four upright blocks: a noisy image, each value in its own colour, and its label."""
    draw = np.random.default_rng(seed)
    blocks = draw.choice(np.array(values, np.uint8), (1, 4))
    label = np.kron(blocks, np.ones((height, -(-width // 4)), np.uint8))[:, :width]
    colours = np.random.default_rng(0).integers(20, 236, (256, 3))
    image = (colours[label] + draw.integers(-20, 20, (height, width, 3))).astype(np.uint8)
    return image, label


def write_camvid(path, scenes):
    """Pairs of image and label, as arrays or as the bytes of their files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [[item if isinstance(item, bytes | None) else encoded(item, "png") for item in pair] for pair in scenes]
    columns = {"name": [f"{row}.png" for row in range(len(files))]}
    for place, name in enumerate(("image_png", "label_png")):
        columns[name] = pyarrow.array([pair[place] for pair in files], pyarrow.binary())
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def write_cityscapes(root, height=48, width=96, cities=("aachen", "zurich"), count=3):
    """Images and labels (ids of the 34) by the common beginning of their paths below leftImg8bit and gtFine."""
    written = {}
    for split in ("train", "val"):
        for city in cities:
            for row in range(count):
                stem = f"{split}/{city}/{city}_{row:06}_000019"
                written[stem] = scene(height, width, range(34), seed=len(written))
                for kind, ending, pixels in zip(
                    ("leftImg8bit", "gtFine"), ("leftImg8bit", "gtFine_labelIds"), written[stem], strict=True
                ):
                    file = root / kind / f"{stem}_{ending}.png"
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(encoded(pixels, "png"))
    return written
