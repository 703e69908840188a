"""A file or folder of weights, opened without the code of its model: names, shapes and mapped tensors.

Planning from a file and loading weights into a model both open files here, so both take the same ones.

    .safetensors                      mapped, never loaded whole (safetensors.py)
    .pth .pt .bin .th, any other      PyTorch's, by its weights-only loader (pickled.py)
    .index.json                       names the shards beside it (shards.py)
    a folder                          model.safetensors.index.json, model.safetensors, pytorch_model.bin, or else the
                                      only file in it with one of the endings above

Wrappers around the names are taken off: `module.` of data-parallel training where every name has it, `_orig_mod.` of
torch.compile also around parts of a model. Formats without plain weights are refused by name (refusals.py). Do not
shorten a file that is open: the operating system ends a process that reads mapped bytes which are no longer there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitplan.core.errors import Damaged, FileError
from bitplan.core.naming import step_keys, strip_compiled, weight_names
from bitplan.core.parsing import explain_failures, parse_json
from bitplan.core.records import ABOUT, ENDINGS, TENSORS, Plan
from bitplan.core.records import Checkpoint as CheckpointRecord
from bitplan.store.files import load, open_file, read_text, sha256_of
from bitplan.weights.refusals import refuse_foreign, refuse_own_packed, refuse_packed, refuse_text, unreadable
from bitplan.weights.safetensors import map_with_texts
from bitplan.weights.tensors import FLOATS, Tensor

INDEX = "model.safetensors.index.json"


def read_index(index: Path) -> dict[str, Path]:
    """Return the file of each tensor by name; every file must exist beside the index."""
    with explain_failures(index, "an index of shards", "download it again"):
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
        with explain_failures(index, "an index of shards", "download it again"):  # of names that no system has
            there = (index.parent / shard).is_file()
        if not there:
            raise FileError(f"the shard {shard} that {index} names is missing; download it again")
    return {name: index.parent / shard for name, shard in listed.items()}


def missing_tensor_error(index: Path, name: str, shard: Path) -> FileError:
    """Return the error for a tensor that is not where the index says."""
    return FileError(f"{index} says that {name!r} is in {shard.name}, but it is not; download both again")


_IN_FOLDERS = (INDEX, TENSORS, "pytorch_model.bin")  # the first that is there is opened
_NUMBER = re.compile(r"[0-9]+")
_NUMBER_AMONG = re.compile(r"([0-9]+)")
_PARALLEL = "module."


@dataclass(frozen=True)
class OpenedCheckpoint:
    """The path, the tensors in order, and the plan if bitplan wrote the file."""

    path: Path
    tensors: Mapping[str, Tensor]
    plan: Plan | None = None

    @property
    def folder(self) -> Path:
        """The folder of the file."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def in_order(self) -> bool:
        """True if the tensors come in the order of the network's modules."""
        return keeps_order(self.tensors)

    @property
    def bytes_held(self) -> list[int]:
        """The bytes of each tensor."""
        return [tensor.data.nbytes for tensor in self.tensors.values()]

    def weight(self, layer: str) -> Tensor | None:
        """The weight of a layer, under the first of the names that it may have.

        Where a model has a part that it calls `module`, the layer's name keeps what was taken off the file's.
        """
        names = weight_names(layer)
        known = itertools.chain(names, map(_without_wrapper, names))
        return next((self.tensors[name] for name in known if name in self.tensors), None)


CheckpointLike = str | Path | OpenedCheckpoint
"""A file or folder of weights, opened or not."""


def open_if_path(checkpoint: CheckpointLike) -> OpenedCheckpoint:
    """Return the checkpoint, opened if it is a path."""
    return checkpoint if isinstance(checkpoint, OpenedCheckpoint) else open_checkpoint(checkpoint)


def open_checkpoint(path: str | Path) -> OpenedCheckpoint:
    """Open a file or folder of weights, or raise with the reason in one line."""
    place = Path(path)
    own = place.is_dir() and (place / ABOUT).exists()
    stored = _open_folder(place) if place.is_dir() else _open_file(place)
    tensors = stored if own else _without_wrappers(stored)  # bitplan's plan has the names that bitplan's file has
    refuse_packed(place, tensors)
    if not tensors:
        raise FileError(f"{place} holds no tensors")
    if not own:
        return OpenedCheckpoint(place, tensors)
    about = load(place / ABOUT, CheckpointRecord)
    check_weights(place, about)
    return OpenedCheckpoint(place, tensors, about.plan)


def check_weights(folder: Path, about: CheckpointRecord) -> None:
    """Raise if the tensors of bitplan's checkpoint are not those that it wrote."""
    path = folder / TENSORS
    if sha256_of(path) != about.sha256:
        raise Damaged(f"{path} is damaged: it is not the file that {ABOUT} beside it was written for")


def learned_step(layer: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the weight step that a quantized layer learned, or None."""
    steps = [tensors[key] for key in step_keys(layer) if key in tensors]
    return next((step for step in steps if step.dtype in FLOATS), None)


def keeps_order(tensors: Mapping[str, Tensor]) -> bool:
    """Return True if names come in the order of modules, not sorted nor shuffled: weight, bias; 9, 10."""
    names = list(tensors)
    if _sorted_within_types(tensors) or not (_weights_before_biases(names) and _numbers_rise(names)):
        return False
    return names != sorted(names, key=natural_key)  # last, since it takes the longest


def _sorted_within_types(tensors: Mapping[str, Tensor]) -> bool:
    """Return True for the order in which safetensors writes names."""
    by_type: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        by_type.setdefault(tensor.dtype, []).append(name)
    return all(names == sorted(names) for names in by_type.values())


def _weights_before_biases(names: list[str]) -> bool:
    place = {name: index for index, name in enumerate(names)}
    bias_of = {name: f"{name.removesuffix('weight')}bias" for name in names if name.endswith(".weight")}
    return all(place[weight] < place[bias] for weight, bias in bias_of.items() if bias in place)


def _numbers_rise(names: list[str]) -> bool:
    """Return True if names that differ only in numbers come in the order of the numbers."""
    families: dict[str, list[list[tuple[int, str]]]] = {}
    for name in names:
        numbers = [_by_value(number) for number in _NUMBER.findall(name)]
        families.setdefault(_NUMBER.sub("#", name), []).append(numbers)
    return all(family == sorted(family) for family in families.values())


def natural_key(name: str) -> list[Any]:
    """A key that sorts layers.2 before layers.10: text and numbers in turn, so that like is compared with like."""
    parts: list[Any] = _NUMBER_AMONG.split(name)
    parts[1::2] = map(_by_value, parts[1::2])
    return parts


def _by_value(digits: str) -> tuple[int, str]:
    """A key that sorts digits as their numbers, of which Python makes none of thousands of digits."""
    without_zeros = digits.lstrip("0")
    return len(without_zeros), without_zeros


def _open_file(path: Path) -> dict[str, Tensor]:
    try:
        with open_file(path) as file:
            start = file.read(16)
    except OSError as error:
        raise unreadable(path, error) from None
    refuse_foreign(path, start)
    if path.name.endswith(".index.json"):
        return _open_shards(path)
    refuse_text(path, start)
    if path.suffix == ".safetensors" or start[8:9] == b"{":  # behind the header's length its JSON begins
        tensors, texts = map_with_texts(path)
        refuse_own_packed(path, texts)
        return _in_order(tensors)
    from bitplan.weights.pickled import load_pickled  # here, since it needs torch and safetensors does not

    return load_pickled(path)


def _open_folder(folder: Path) -> dict[str, Tensor]:
    for name in _IN_FOLDERS:
        if (folder / name).exists():
            return _open_file(folder / name)
    try:
        there = sorted(item for item in folder.iterdir() if item.suffix in ENDINGS)
    except OSError as error:
        raise unreadable(folder, error) from None
    if len(there) == 1:
        return _open_file(there[0])
    found = f"; it has {', '.join(item.name for item in there[:4])}: name one of them" if there else ": name the file"
    raise FileError(f"{folder} holds neither model.safetensors nor {INDEX} nor pytorch_model.bin{found}")


def _open_shards(index: Path) -> dict[str, Tensor]:
    """Return every tensor that the index lists, from the shard that it names."""
    listed = read_index(index)
    shards = {shard: _open_file(shard) for shard in sorted(set(listed.values()))}
    for name, shard in listed.items():
        if name not in shards[shard]:
            raise missing_tensor_error(index, name, shard)
    return _in_order({name: shards[shard][name] for name, shard in listed.items()})


def _in_order(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors sorted by name, unless the file keeps the order of the modules."""
    return tensors if keeps_order(tensors) else {name: tensors[name] for name in sorted(tensors, key=natural_key)}


def _without_wrapper(name: str) -> str:
    """Return a name without its wrappers, which may be nested."""
    name = strip_compiled(name)
    while name.startswith(_PARALLEL):
        name = name.removeprefix(_PARALLEL)
    return name


def _without_wrappers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the names that the model itself gives them."""
    shorter = {name: strip_compiled(name) for name in tensors}
    while shorter and all(name.startswith(_PARALLEL) for name in shorter.values()):
        shorter = {name: short.removeprefix(_PARALLEL) for name, short in shorter.items()}
    wrapped = list(shorter.values()) != list(tensors)
    if not wrapped or len(set(shorter.values())) < len(tensors):  # two would have one name
        return tensors
    return {shorter[name]: replace(tensor, name=shorter[name]) for name, tensor in tensors.items()}
