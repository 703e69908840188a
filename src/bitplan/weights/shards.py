"""The index of a checkpoint in several files: which tensor lies in which."""

from __future__ import annotations

from pathlib import Path

from bitplan.core.errors import FileError
from bitplan.core.parsing import parse_json, parsing
from bitplan.core.store import read_text

INDEX = "model.safetensors.index.json"


def read_index(index: Path) -> dict[str, Path]:
    """Each tensor's name and its file, which is there and lies beside the index."""
    with parsing(index, "an index of shards", "download it again"):
        content = parse_json(read_text(index))
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict):
        raise FileError(f"{index} is not an index of shards: it has no weight_map of names")
    for shard in listed.values():
        if not isinstance(shard, str):
            raise FileError(f"{index} names the shard {str(shard)[:60]}, which is not a file beside it")
    for shard in sorted(set(listed.values())):
        if "\0" in shard or Path(shard).name != shard or shard in ("", ".."):
            raise FileError(f"{index} names the shard {shard!r}, which is not a file beside it")
        if shard.endswith(".index.json"):  # it might name itself
            raise FileError(f"{index} names the shard {shard!r}, which is an index")
        with parsing(index, "an index of shards", "download it again"):  # of names that no system has
            there = (index.parent / shard).is_file()
        if not there:
            raise FileError(f"the shard {shard} that {index} names is missing; download it again")
    return {name: index.parent / shard for name, shard in listed.items()}


def lacking(index: Path, name: str, shard: Path) -> FileError:
    """What to say of a tensor that is not where the index says."""
    return FileError(f"{index} says that {name!r} is in {shard.name}, but it is not; download both again")
