"""A checkpoint file or folder, opened without the code of its model: names, shapes and mapped weights.

`.safetensors`, a folder with `model.safetensors` or with shards and `model.safetensors.index.json`, and
PyTorch's `.pth`, `.pt`, `.bin`, `.th`. Tensors of safetensors are never loaded whole. Do not shorten a file
that is open: the operating system ends a process that reads mapped bytes which are no longer there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bitplan.core.checkpoints import Checkpoint as CheckpointRecord
from bitplan.core.errors import FileError
from bitplan.core.records import Plan
from bitplan.core.shards import INDEX, lacking, read_index
from bitplan.core.store import load
from bitplan.graph.files.packed import refuse_foreign, refuse_packed
from bitplan.graph.files.pickled import load_pickled
from bitplan.graph.files.safetensors import map_safetensors
from bitplan.graph.files.tensors import FLOATS, Tensor


@dataclass(frozen=True)
class OpenedCheckpoint:
    """Where it lies, its tensors in order, and the plan if bitplan wrote it."""

    path: Path
    tensors: Mapping[str, Tensor]
    plan: Plan | None = None

    def weight(self, layer: str) -> Tensor | None:
        """The weight of a layer: the tensor "<layer>.weight", or else the tensor of that very name."""
        return self.tensors.get(f"{layer}.weight", self.tensors.get(layer))


def open_checkpoint(path: str | Path) -> OpenedCheckpoint:
    """Open a file or folder; what prevents it is said in one line."""
    place = Path(path)
    tensors = _open_folder(place) if place.is_dir() else _open_file(place)
    refuse_packed(place, tensors)
    if not tensors:
        raise FileError(f"{place} holds no tensors")
    return OpenedCheckpoint(place, tensors, _plan_beside(place) if place.is_dir() else None)


def _in_order(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """By name, since safetensors keeps no order; PyTorch's files keep that of the modules."""
    return {name: tensors[name] for name in sorted(tensors, key=natural)}


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts layers.2 before layers.10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdecimal() and part.isascii() else (1, 0, part) for part in parts]


def learned_step(layer: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The weight step that a quantized layer learned, if the checkpoint has one (names as `quant/install.py` makes)."""
    owner, _, call = layer.rpartition(".")
    inside = f"{owner}.call_quantizers.{call}" if owner else f"call_quantizers.{call}"
    found = (tensors.get(f"{place}.weight_quantizer.step") for place in (layer, inside))
    return next((step for step in found if step is not None and step.dtype in FLOATS), None)


def _open_file(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from None
    refuse_foreign(path, start)
    if path.name.endswith(".index.json"):
        return _open_shards(path)
    if path.suffix == ".safetensors" or start[8:9] == b"{":
        return _in_order(map_safetensors(path))
    return load_pickled(path)


def _open_folder(folder: Path) -> dict[str, Tensor]:
    if (folder / INDEX).exists():
        return _open_shards(folder / INDEX)
    if (folder / "model.safetensors").exists():
        return _in_order(map_safetensors(folder / "model.safetensors"))
    there = sorted(item for item in folder.iterdir() if item.suffix in (".safetensors", ".gguf", ".bin", ".pth", ".pt"))
    if len(there) == 1:
        return _open_file(there[0])
    found = f"; it has {', '.join(item.name for item in there[:4])}: name one of them" if there else ""
    raise FileError(f"{folder} holds neither model.safetensors nor {INDEX}{found}")


def _open_shards(index: Path) -> dict[str, Tensor]:
    """Every tensor that the index lists, from the shard that it names."""
    listed = read_index(index)
    opened = {shard: map_safetensors(shard) for shard in sorted(set(listed.values()))}
    for name, shard in listed.items():
        if name not in opened[shard]:
            raise lacking(index, name, shard)
    return _in_order({name: opened[shard][name] for name, shard in listed.items()})


def _plan_beside(folder: Path) -> Plan | None:
    """The plan in bitplan's own checkpoint.json, if the folder has one."""
    path = folder / "checkpoint.json"
    if not path.exists():
        return None
    return load(path, CheckpointRecord).plan
