"""export: a plan or a quantized model → a file that another program reads; the contract of an exporter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from bitplan.core.errors import FileError, InputError
from bitplan.core.precision import Precision
from bitplan.core.records import Graph, Plan
from bitplan.core.registry import EXPORTERS, check_is, find_missing_members
from bitplan.exporters.onnx_running import TimedRuntime
from bitplan.quant.convert import is_quantized, plan_of
from bitplan.quant.finite import check_finite
from bitplan.quant.sites import unwrap
from bitplan.store.files import atomic_file, atomic_folder


@dataclass(frozen=True)
class Source:
    """A plan to export and, for targets that hold more than a recipe, the quantized model and an example of its input.

    `spec` is the model's name in the zoo, if it has one. `folder` has the configuration and tokenizer of a network of
    transformers'.
    """

    plan: Plan
    graph: Graph | None = None
    model: nn.Module | None = None
    example: Any = None
    spec: str | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class ReadBack:
    """The precisions that an exported file gives its layers, and the codes of the weights it holds."""

    precisions: Mapping[str, Precision]
    codes: Mapping[str, Tensor] = field(default_factory=dict)


class TieFinder(Protocol):
    """Finds out if a file and its model differ on one sample only because a value lies between two codes."""

    def begins_at_tie(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, tolerance: float) -> bool:
        """Return True if the first activation with other codes differs only at ties."""


@dataclass(frozen=True)
class Execution:
    """An exported file that runs, for `verify`: `network` is called like the model that the file was made from.

    `float_inputs` says that the file leaves all activations float, so the model is compared without its input
    quantizers. If `ties` is None, every difference counts: the file adds in the model's own order, or its activations
    cannot be read. `runtime` opens ONNX files for `speed`; None means that nothing is timed. `rounds` names values that
    the runtime rounds and the network does not: outputs are then near and not equal, and scores are compared. Classes
    lie along `axis`.
    """

    network: nn.Module
    float_inputs: bool = False
    ties: TieFinder | None = None
    runtime: TimedRuntime | None = None
    rounds: str = ""
    axis: int = 1


class Exporter(Protocol):
    """A frozen dataclass derived from this class, whose fields are its options, all of them with a default.

    `needs_model` says that a plan alone is not enough, `suffix` is the usual ending of its files, and `folder` says
    that it writes a folder. An exporter whose files run here implements `recognizes` and `opened`; `verify` refuses
    files of others. One whose bytes a budget can count (`--target NAME`) names its `form`, a `costs.files.FileForm`.
    """

    needs_model: ClassVar[bool] = False
    suffix: ClassVar[str] = ""
    folder: ClassVar[bool] = False

    @abstractmethod
    def write(self, source: Source, path: Path) -> None:
        """Write the file, or raise with the name of a layer that the target cannot express."""

    @abstractmethod
    def read(self, path: Path) -> ReadBack:
        """Read the precisions and codes of a file back, for checks."""

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """Return True if this exporter wrote the file; must be quick."""
        return False

    def opened(self, path: Path, model: nn.Module) -> Execution:
        """Return the file, ready to run beside the quantized model that it was made from."""
        raise InputError(f"{path} is for {EXPORTERS.name_of(self)}, which nothing here executes: it cannot be verified")


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
    """Write a quantized model, or a plan as a recipe, for another program, and return the path.

    An existing file is replaced only with `force`. `options` are the exporter's; `pretrained` among them is the folder
    with the tokenizer of a network of transformers'.
    """
    pretrained = options.pop("pretrained", None)
    folder = None if pretrained is None else Path(pretrained)
    exporter = make_exporter(to, options) if isinstance(to, str) else to
    check_is(exporter, Exporter, "exporter")
    if isinstance(source, Plan):
        exported = Source(source, graph, None, example, spec, folder)
    elif is_quantized(source):
        check_finite(source)
        exported = Source(plan_of(source), graph, unwrap(source), example, spec, folder)
    else:
        raise InputError("this model is not quantized: make it one with quantize(model, plan), or export a plan")
    if exported.model is None and exporter.needs_model:
        raise InputError(f"{to} holds the network itself: give the quantized model, not only its plan")
    target = Path(path)
    check_free(target, force=force, folder=exporter.folder)
    with (atomic_folder if exporter.folder else atomic_file)(target) as temporary:
        exporter.write(exported, temporary)
    return target


def make_exporter(name: str, options: Mapping[str, Any]) -> Exporter:
    """Return the exporter of that name with these options."""
    exporter: Exporter = EXPORTERS.make(name, options)
    check_is(exporter, Exporter, "exporter")
    return exporter


def exporter_of(path: Path) -> Exporter:
    """Return the registered exporter that recognizes a file."""
    if not path.exists():
        raise FileError(f"cannot read {path}: there is no such file")
    kinds = {name: EXPORTERS.get(name) for name in EXPORTERS}
    names = [
        name
        for name, kind in kinds.items()
        if not find_missing_members(kind, Exporter) and kind.folder == path.is_dir() and kind.recognizes(path)
    ]
    if not names:
        others = ", ".join(name for name in kinds if name != "packed")
        raise FileError(f"{path} is cut off or not a packed file, nor one for {others}: export it again")
    if len(names) > 1:
        raise FileError(f"{path} may be for {' or for '.join(names)}: one of these exporters claims files of others")
    return make_exporter(names[0], {})


def check_free(target: Path, *, force: bool, folder: bool = False) -> None:
    """Raise if the target exists, unless `force` may replace a file; a folder with files is never replaced."""
    if folder:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            what = "a folder with files in it" if target.is_dir() else "a file"
            raise FileError(f"{target} is {what}: give the name of a new folder, which this format writes")
        return
    if target.is_dir():
        raise FileError(f"{target} is a folder, and this format writes a file: give its name, such as {target}/NAME")
    if target.exists() and not force:
        raise FileError(f"{target} exists: choose another name, or give --force (force=True) to replace it")
