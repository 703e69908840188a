"""Recognize Hugging Face's folders and GGUF files without loading them or a library for them."""

from __future__ import annotations

from pathlib import Path

from bitplan.core.errors import FileError, InputError
from bitplan.core.parsing import parse_json
from bitplan.store.files import open_file, read_text

CONFIG = "config.json"
"""The file in a folder of Hugging Face's that names the network."""
MAGIC = b"GGUF"


def is_pretrained(path: str | Path) -> bool:
    """Return True for a folder whose config.json names a network of transformers', or a GGUF file."""
    place = Path(path)
    return says_network(place) if place.is_dir() else is_gguf(place)


def is_gguf(path: Path) -> bool:
    """Return True for a GGUF file, by its name or its first bytes."""
    if path.suffix == ".gguf":
        return path.is_file()
    try:
        with open_file(path) as file:
            return bool(file.read(len(MAGIC)) == MAGIC)
    except OSError:  # who reads it says why
        return False


def refuse_link_out(path: Path) -> None:
    """Refuse a file that is a link out of its folder: what lies there would be copied to where others see it.

    Hugging Face's cache keeps its files so: snapshots/REVISION/NAME leads to blobs/HASH beside the snapshots.
    """
    folder, there = path.parent.resolve(), path.resolve()
    above = folder.parents
    cached = any(one.name == "snapshots" and there.parent == one.parent / "blobs" for one in above)
    if not cached and not there.is_relative_to(folder):
        raise FileError(f"{path} is a link to {there}, outside its folder: it is not read, put a copy there")


def says_network(folder: Path) -> bool:
    """Return True if a folder has a configuration of transformers'."""
    if not (folder / CONFIG).is_file():
        return False
    try:
        content = parse_json(read_text(folder / CONFIG))
    except InputError:  # who reads it says why
        return False
    return isinstance(content, dict) and "model_type" in content
