"""The index of a checkpoint in several files: which tensor lies in which."""

from __future__ import annotations

import json
from pathlib import Path

from bitplan.core.errors import FileError
from bitplan.core.store import read_text

INDEX = "model.safetensors.index.json"


def read_index(index: Path) -> dict[str, Path]:
    """Each tensor's name and its file, which is there and lies beside the index."""
    try:
        listed = json.loads(read_text(index))["weight_map"]
        shards = sorted(set(listed.values()))
    except FileError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FileError(f"{index} is not an index of shards: it has no weight_map of names") from None
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".."):
            raise FileError(f"{index} names the shard {shard!r}, which is not a file beside it")
        if shard.endswith(".index.json"):  # it might name itself
            raise FileError(f"{index} names the shard {shard!r}, which is an index")
        if not (index.parent / shard).is_file():
            raise FileError(f"the shard {shard} that {index} names is missing; download it again")
    return {name: index.parent / shard for name, shard in listed.items()}


def lacking(index: Path, name: str, shard: Path) -> FileError:
    """What to say of a tensor that is not where the index says."""
    return FileError(f"{index} says that {name!r} is in {shard.name}, but it is not; download both again")
