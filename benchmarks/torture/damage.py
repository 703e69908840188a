"""Files of a run, damaged at random: a flipped bit, cut off, emptied, or two of one kind exchanged."""

from __future__ import annotations

import random
from pathlib import Path


def damage(run: Path, chance: random.Random) -> list[str]:
    """Damage one file or two, in the folder itself; gives their names."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and not _spared(path, run))
    if not files:
        return []
    path = chance.choice(files)
    way = chance.choice(("flip", "cut", "empty", "swap", "garbage"))
    content = path.read_bytes()
    if way == "swap":
        return _swap(path, run, files, chance)
    if way == "flip" and content:
        changed = bytearray(content)
        changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        content = bytes(changed)
    elif way == "cut" and content:
        content = content[: chance.randrange(len(content))]
    else:
        content = b"" if way == "empty" else chance.randbytes(chance.randrange(1, 5000))
    path.write_bytes(content)
    return [str(path.relative_to(run))]


def _swap(path: Path, run: Path, files: list[Path], chance: random.Random) -> list[str]:
    """Exchange a file with another of its kind; of checkpoints sometimes the whole folders."""
    depth = len(path.relative_to(run).parts)
    alike = [
        other
        for other in files
        if other != path and other.suffix == path.suffix and len(other.relative_to(run).parts) == depth
        and other.relative_to(run).parts[0] == path.relative_to(run).parts[0]
    ]  # fmt: skip
    if not alike:
        return []
    one, other = path, chance.choice(alike)
    if depth == 3 and one.parent != other.parent and chance.random() < 0.5:
        one, other = one.parent, other.parent
    between = run.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)
    return [str(one.relative_to(run)), str(other.relative_to(run))]


def _spared(path: Path, run: Path) -> bool:
    """Temporary files, and what was set aside before."""
    name = str(path.relative_to(run))
    return ".damaged" in name or any(piece.startswith(".") for piece in name.split("/"))
