"""Write what the blocks of a page say into the `text` blocks behind them.

python tests/docs/rewrite.py docs/tutorials/own-cnn.md …
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("COLUMNS", "110")

from pages import Reader, blocks_of, lasting


def rewrite(page: Path, folder: Path) -> None:
    """Follow the whole page, and put what it said where it stands."""
    reader, text, blocks = Reader(folder), page.read_text(), blocks_of(page)
    pieces, place = [], 0
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        pieces.append(text[place : block.end])
        place = block.end
        if block.language == "text" or block.not_run or (block.commands and "pip " in block.code):
            continue
        said = lasting(reader.follow(block))
        sys.stderr.write(f"{block}\n{said}")
        if after and after.language == "text" and not text[block.end : after.start].strip():
            place = after.end
        if said.strip():
            lines = [line.rstrip() for line in said.strip("\n").splitlines()]
            pieces.append("\n\n```text\n" + "\n".join(lines) + "\n```")
    pieces.append(text[place:])
    page.write_text("".join(pieces))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            rewrite(Path(name).resolve(), Path(folder))
