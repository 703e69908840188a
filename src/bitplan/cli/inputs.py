"""What users type, as the values that the library takes."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.core.checkpoints import Checkpoint
from bitplan.core.errors import InputError
from bitplan.core.records import Graph
from bitplan.core.rules import Rules
from bitplan.core.store import load, read_text
from bitplan.core.trials import Recipe

if TYPE_CHECKING:
    from bitplan.engines.base import Engine
    from bitplan.graph.names import Names


CHECKPOINTS = (".safetensors", ".pth", ".pt", ".bin", ".th", ".gguf")


def names_of(link: Sequence[str]) -> Names:
    """How a checkpoint's names are read: with the usual links, those asked for instead, or none."""
    from bitplan.graph.names import LinkRule, Names

    if not link:
        return Names()
    return Names(links=tuple(LinkRule(pattern, pattern) for pattern in link if pattern != "none"))


@dataclass(frozen=True)
class Target:
    """What a verb works on: a graph, and its model where there is one."""

    graph: Graph
    model: Any = None


def read_target(
    written: str, shape: str | None, rules: Rules, link: Sequence[str] = (), *, weights: bool = False
) -> Target:
    """Load a graph file, or build and trace a model; with its weights only where a method looks at them."""
    if is_checkpoint(written):
        spec = spec_of(Path(written))
        return _read_own(written, spec, shape, rules) if spec else _read_file(written, rules, link)
    if link:
        raise InputError(
            "--link is for checkpoints, which have no forward pass; links of a model follow from its tensors"
        )
    if Path(written).suffix == ".json":
        return Target(load(written, Graph))
    from bitplan.graph.trace import trace
    from bitplan.models.zoo import load_model

    model, example = load_model(written, weightless=not weights)
    if shape is not None:
        example = example_of(shape)
    if example is None:
        raise InputError(f"{written} gives no example input: add --input, such as --input 1x3x224x224")
    return Target(trace(model, example, rules=rules, name=written), model)


def spec_of(folder: Path) -> str | None:
    """The zoo's name of the model in a checkpoint that bitplan wrote, if it says one."""
    about = folder / "checkpoint.json"
    return load(about, Checkpoint).spec if about.is_file() else None


def _read_own(written: str, spec: str, shape: str | None, rules: Rules) -> Target:
    """A checkpoint of a model from the zoo: loaded, and traced by running its shapes."""
    from bitplan.graph.trace import trace
    from bitplan.models.zoo import load_model
    from bitplan.quant.checkpoint import load_checkpoint

    model = load_checkpoint(written)
    example = example_of(shape) if shape else load_model(spec, weightless=True)[1]
    return Target(trace(model, example, rules=rules, name=spec), model)


def _read_file(written: str, rules: Rules, link: Sequence[str]) -> Target:
    """A checkpoint without code: its graph follows from names and shapes."""
    from bitplan.graph.names import trace_checkpoint
    from bitplan.weights.opened import open_checkpoint

    opened = open_checkpoint(written)
    return Target(trace_checkpoint(opened, rules, names=names_of(link)), opened)


def is_checkpoint(written: str) -> bool:
    """Tell whether a target is a checkpoint file or folder, rather than a model or a graph."""
    path = Path(written)
    return path.suffix in CHECKPOINTS or written.endswith(".index.json") or path.is_dir()


def example_of(shape: str) -> Any:
    """Read "1x3x224x224" or, for several inputs, "1x3x224x224,1x10:int64" as tensors without data."""
    import torch

    tensors = []
    for part in shape.split(","):
        sizes, _, kind = part.partition(":")
        dtype = getattr(torch, kind or "float32", None)
        if not isinstance(dtype, torch.dtype) or not all(size.isdecimal() for size in sizes.split("x")):
            raise InputError(f"--input {shape!r} cannot be read: write 1x3x224x224, or 1x128:int64 for whole numbers")
        tensors.append(torch.empty([int(size) for size in sizes.split("x")], dtype=dtype, device="meta"))
    return tuple(tensors)


def read_options(written: Sequence[str], flag: str = "--option") -> dict[str, Any]:
    """Read KEY=VALUE texts; numbers and true/false become what they say."""
    options: dict[str, Any] = {}
    for text in written:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InputError(f"{flag} {text!r} is not KEY=VALUE")
        options[key] = _value(value)
    return options


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def read_task(name: str, written: Sequence[str]) -> Any:
    """The task of that name with its options."""
    from bitplan.tasks.base import load_task

    return load_task(name, **read_options(written, "--task-option"))


def read_recipe(path: Path | None, written: Sequence[str]) -> Recipe:
    """A recipe from a TOML file (its keys, or a table `recipe` of them), with single values over the file's."""
    content: dict[str, Any] = {}
    if path is not None:
        try:
            content = tomllib.loads(read_text(path))
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{path} is not TOML: {error}") from None
        content = content.get("recipe", content)
    told = read_options(written, "--set")
    for one, other in (("epochs", "steps"), ("steps", "epochs")):
        if one in told:
            content.pop(other, None)
    return Recipe(**content | told)


def read_engine(written: str) -> Engine:
    """Read "local:workers=2,threads=1": an engine and its options."""
    from bitplan.engines.base import make_engine

    name, _, options = written.partition(":")
    return make_engine(name, read_options(options.split(",") if options else (), "--engine"))
