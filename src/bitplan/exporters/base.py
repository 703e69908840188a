"""export: a plan, or a quantized model → a file that another program reads; and what an exporter must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from bitplan.core.errors import FileError, InputError
from bitplan.core.precision import Precision
from bitplan.core.records import Graph, Plan
from bitplan.core.registry import EXPORTERS
from bitplan.core.store import whole_file
from bitplan.quant.convert import is_quantized, plan_of, root_of


@dataclass(frozen=True)
class Source:
    """What is exported: a plan, and where the target holds more than a recipe, the quantized model and its example.

    `spec` is the model's name in the zoo, if it has one.
    """

    plan: Plan
    graph: Graph | None = None
    model: nn.Module | None = None
    example: Any = None
    spec: str | None = None


@dataclass(frozen=True)
class ReadBack:
    """What an exported file says: the precision of every layer it quantizes, and the codes of the weights it holds."""

    precisions: Mapping[str, Precision]
    codes: Mapping[str, Tensor] = field(default_factory=dict)


class Exporter(Protocol):
    """A frozen dataclass whose fields are its options.

    `write` refuses, by the name of a layer, what the target cannot express. `read` reads back what was written. The
    class attribute `needs_model = True` says that a plan alone is not enough.
    """

    def write(self, source: Source, path: Path) -> None:
        """Write the file; `export` makes sure that it is whole or not there."""

    def read(self, path: Path) -> ReadBack:
        """Read the file back, for checks."""


def export(
    source: nn.Module | Plan,
    path: str | Path,
    to: str | Exporter,
    *,
    graph: Graph | None = None,
    example: Any = None,
    spec: str | None = None,
    force: bool = False,
    **options: Any,
) -> Path:
    """Write a quantized model, or a plan as a recipe, for another program; a file in the way is kept unless `force`."""
    exporter = make_exporter(to, options) if isinstance(to, str) else to
    if isinstance(source, Plan):
        found = Source(source, graph, None, example, spec)
    elif is_quantized(source):
        found = Source(plan_of(source), graph, root_of(source), example, spec)
    else:
        raise InputError("this model is not quantized: make it one with quantize(model, plan), or export a plan")
    if found.model is None and getattr(exporter, "needs_model", False):
        raise InputError(f"{to} holds the network itself: give the quantized model, not only its plan")
    return _write_whole(exporter, found, Path(path), force)


def make_exporter(name: str, options: Mapping[str, Any]) -> Exporter:
    """The exporter of that name with these options."""
    exporter: Exporter = EXPORTERS.make(name, options)
    return exporter


def check_free(target: Path, *, force: bool) -> None:
    """Refuse a file that is there already, unless it may be replaced."""
    if target.is_dir():
        raise FileError(f"{target} is a folder: give the name of a file")
    if target.exists() and not force:
        raise FileError(f"{target} exists: choose another name, or give --force (force=True) to replace it")


def _write_whole(exporter: Exporter, source: Source, target: Path, force: bool) -> Path:
    check_free(target, force=force)
    with whole_file(target) as temporary:
        exporter.write(source, temporary)
    return target
