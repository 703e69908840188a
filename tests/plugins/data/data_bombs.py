"""Small files of data sets that claim to be large: python data_bombs.py NAME FILE reads one, as tests/weights do."""

import struct
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "weights"))
from bombs import main


def old_memo(path):
    """A batch of images whose pickle remembers something as number 2^31."""
    path.write_bytes(b"\x80\x02K\1r\xff\xff\xff\x7f.")


def rows(path):
    """A table of twenty million rows that all hold one text, which the file holds once."""
    import pyarrow
    import pyarrow.parquet

    one = pyarrow.array(["x" * 1000])
    indices = pyarrow.array([0] * (1 << 20), pyarrow.int32())
    table = pyarrow.table(
        {name: pyarrow.DictionaryArray.from_arrays(indices, one) for name in ("file", "label", "webp")}
    )
    with pyarrow.parquet.ParquetWriter(path, table.schema) as writer:
        for _ in range(20):
            writer.write_table(table)


def large_rows(path):
    """A table of 140 kB with 96 pictures of 32 MB, each compressed for itself."""
    import pyarrow
    import pyarrow.parquet

    row = pyarrow.table({"webp": pyarrow.array([b"\0" * (32 << 20)]), "file": ["a"], "label": [1]})
    with pyarrow.parquet.ParquetWriter(path, row.schema, compression="zstd", use_dictionary=False) as writer:
        for _ in range(96):
            writer.write_table(row)


def pixels(path):
    """A picture of 268 million pixels, all alike."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 1 << 14, 1 << 14, 8, 2, 0, 0, 0)
    packer = zlib.compressobj()
    rows = b"".join(packer.compress(b"\0" * (3 * (1 << 14) + 1)) for _ in range(1 << 14)) + packer.flush()
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b""))


def table(path):
    """What `imagenet` does with a file."""
    from bitplan.plugins.data.encoded_images import from_parquet

    from_parquet([path], 10)


def image(path):
    """What `imagenet` does with a picture."""
    from bitplan.plugins.data.pillow import decode

    decode(str(path))


def batch(path):
    """What `cifar10` does with a file."""
    from bitplan.plugins.data.cifar10 import read_batch

    read_batch(path, 10)


BOMBS = {
    "old_memo": (old_memo, "data_batch_1", batch),
    "large_rows": (large_rows, "train.parquet", table),
    "rows": (rows, "train.parquet", table),
    "pixels": (pixels, "b.png", image),
}

if __name__ == "__main__":
    main(BOMBS)
