"""Options that users type, as the values that the library takes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.core.defaults import AUTO
from bitplan.core.errors import InputError
from bitplan.core.option_parsing import read_named, read_options
from bitplan.core.parsing import parse_toml, parsing

_SIZE = re.compile(r"[1-9][0-9]{0,8}")

if TYPE_CHECKING:
    from bitplan.cli.things import Runs, Typed
    from bitplan.core.trials import Recipe
    from bitplan.store.engines import Engine


def read_shape(shape: str) -> Any:
    """Read "1x3x224x224" or, for several inputs, "1x3x224x224,1x10:int64" as tensors without data."""
    import torch

    tensors = []
    for part in shape.split(","):
        sizes, _, kind = part.partition(":")
        dtype = getattr(torch, kind or "float32", None)
        if not isinstance(dtype, torch.dtype) or not all(_SIZE.fullmatch(size) for size in sizes.split("x")):
            raise InputError(f"--input {shape!r} cannot be read: write 1x3x224x224, or 1x128:int64 for whole numbers")
        tensors.append(torch.empty([int(size) for size in sizes.split("x")], dtype=dtype, device="meta"))
    return tuple(tensors)


def with_data(example: Any) -> Any:
    """An example with numbers where it has only shapes: normally distributed, always the same; whole ones are 0."""
    import torch
    from torch.utils._pytree import tree_map_only

    numbers = torch.Generator().manual_seed(0)

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return torch.randn(tensor.shape, generator=numbers).to(tensor.dtype)

    return tree_map_only(torch.Tensor, drawn, example)


def as_task(
    task: str | None, written: list[str], text: Path | None, data: str | None = None
) -> tuple[str | None, list[str]]:
    """The task as typed, or that of `--text FILE`, with its options."""
    if text is None:
        return task, written
    if data is not None or task not in (None, "text"):
        other = "--data" if data is not None else f"--task {task}"
        raise InputError(f"--text and {other} are both what the network is run on: give one of them")
    if any(one.startswith("data=") for one in written):
        raise InputError("--text and --task-option data=… both name the text: give one of them")
    return "text", [*written, f"data={text}"]


def read_task(name: str, written: Sequence[str], network: Typed | None = None) -> Any:
    """The task of that name with its options; one that leaves its tokenizer open gets that of the network typed."""
    import dataclasses

    from bitplan.tasks.base import load_task

    task = load_task(name, **read_options(written, "--task-option"))
    pretrained = None if network is None else network.pretrained
    if pretrained is None or getattr(task, "tokenizer", "said") is not None or not dataclasses.is_dataclass(task):
        return task
    return dataclasses.replace(task, tokenizer=str(pretrained))


def read_data(task: str | None, written: Sequence[str], data: str | None, network: Typed | None = None) -> Any:
    """What a network is run on: the task of that name, or the batches that `--data` names; None if neither is typed."""
    if data is None:
        if task is None and written:
            raise InputError("--task-option is an option of --task: name it too, or leave it out")
        return None if task is None else read_task(task, written, network)
    if task is not None or written:
        raise InputError("--data and --task are both what the network is run on: give one of them")
    from bitplan.core.trust import import_data, names_code
    from bitplan.gains.base import Context
    from bitplan.gains.start_network import with_data

    if not names_code(data):
        raise InputError(f"--data {data!r} is not package.module:loader, a DataLoader, Dataset or batches in your code")
    return with_data(Context(), import_data(data), None).task


def read_recipe(path: Path | None, written: Sequence[str]) -> Recipe:
    """A recipe from a TOML file (its keys, or a table `recipe` of them), with single values over the file's."""
    from bitplan.core.trials import Recipe, on_top
    from bitplan.store.files import read_text

    content: dict[str, Any] = {}
    if path is not None:
        with parsing(path, "a recipe", "write it again"):
            content = parse_toml(read_text(path))
        content = content.get("recipe", content)
    told = read_options(written, "--set")
    with nullcontext() if path is None else parsing(path, "a recipe", "write it again"):
        return Recipe(**on_top(told, content))


def read_engine(written: str) -> Engine:
    """Read "local:workers=2,threads=1": an engine and its options."""
    from bitplan.store.engines import make_engine

    return make_engine(*read_named(written, "--engine"))


def typed(target: str, shape: str | None, values: bool, trust: bool, gain: str, data: str | None) -> Typed:
    """What is to be planned, with what is typed beside it."""
    from bitplan.cli.door import Beside, what_is

    return what_is(target, Beside(shape=shape, values=values, trust=trust, runs=runs_network(gain, data)))


def runs_network(gain: str, data: str | None) -> Runs:
    """Whether the network itself is run on data; a method may take it from its file, block after block."""
    from bitplan.core.registry import CHOOSERS

    if data is None:
        return "no"
    streams = "large" if gain == AUTO else getattr(CHOOSERS.get(gain), "streams", "") if gain in CHOOSERS else ""
    return "no" if streams == "always" else "small" if streams == "large" else "yes"
