"""Where networks are timed: by name, how one gets there and what it is made of."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from bitplan.adapters.onnx import read
from bitplan.adapters.onnxruntime import Session
from bitplan.core.errors import InputError, UnknownName
from bitplan.core.records import Graph
from bitplan.core.registry import EXECUTIONS
from bitplan.exporters.base import export
from bitplan.exporters.onnx_graph import find_longest_prefix, layers_of_names
from bitplan.exporters.onnx_running import OpenedGraph, name_arrays
from bitplan.plugins.runtimes.openvino import OpenVinoSession

# --- A network that is ready to be timed, as a whole and layer by layer, in each runtime.

_JOINTS = "./_ "  # a runtime's names of nodes are those of the file, followed by what it made of them
Ran = dict[str, float]
"""Layer → seconds, of one run."""


class Contestant(Protocol):
    """A network that runs on inputs of its own."""

    def run(self) -> object:
        """Once, as users run it."""

    def profile(self, runs: int) -> list[Ran]:
        """So many times, and how long each layer took."""


@dataclass(frozen=True)
class Inputs:
    """What a network is called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class OnnxFile:
    """An exported file in ONNX Runtime."""

    def __init__(self, path: Path, inputs: Inputs, threads: int) -> None:
        self._path, self._threads = path, threads
        self._layers = layers_of_names(read(path).graph)
        self._graph: OpenedGraph = self._open()
        self._arrays = name_arrays(self._graph, inputs.args, inputs.kwargs)

    def _open(self) -> OpenedGraph:
        return Session(self._path, threads=self._threads)

    def run(self) -> object:
        """By the runtime."""
        return self._graph.run(self._arrays)

    def profile(self, runs: int) -> list[Ran]:
        """In a session of its own, for looking costs time; the first run is not counted."""
        session = Session(self._path, threads=self._threads, profile=self._path.with_suffix(".profile"))
        for _ in range(runs + 1):
            session.run(self._arrays)
        return [by_layer(nodes, self._layers) for nodes in session.profiled()[1:]]


class OpenVinoFile(OnnxFile):
    """An exported file in OpenVINO."""

    def _open(self) -> OpenedGraph:
        return OpenVinoSession(self._path, threads=self._threads)

    def profile(self, runs: int) -> list[Ran]:
        """In a session of its own; the first run is not counted."""
        session = OpenVinoSession(self._path, threads=self._threads, profile=True)
        found = []
        for _ in range(runs + 1):
            session.run(self._arrays)
            found.append(by_layer(session.profiled(), self._layers))
        return found[1:]


class Network:
    """A network in PyTorch. Layers that are no modules are not told apart: their time is in those before them."""

    def __init__(self, model: nn.Module, inputs: Inputs, threads: int, layers: Collection[str]) -> None:
        self._model, self._inputs, self._threads = model.eval(), inputs, threads
        modules = dict(model.named_modules(remove_duplicate=False))
        self._modules = {layer: modules[layer] for layer in layers if layer in modules}

    def run(self) -> object:
        """Without gradients."""
        with _threads(self._threads), torch.inference_mode():
            return self._model(*self._inputs.args, **self._inputs.kwargs)

    def profile(self, runs: int) -> list[Ran]:
        """A layer lasts until the next one begins."""
        begun: list[tuple[str, float]] = []
        hooks = [
            module.register_forward_pre_hook(lambda *_, layer=layer: begun.append((layer, time.perf_counter())))
            for layer, module in self._modules.items()
        ]
        found = []
        try:
            for _ in range(runs + 1):
                begun.clear()
                start = time.perf_counter()
                self.run()
                found.append(_until_the_next(begun, start, time.perf_counter()))
        finally:
            for hook in hooks:
                hook.remove()
        return found[1:]


def by_layer(nodes: list[tuple[str, float]], layers: Mapping[str, str]) -> Ran:
    """The seconds of nodes, added up by layer; a node of no known name counts for the layer before it."""
    found: Ran = {}
    waiting, current = 0.0, None
    for name, seconds in nodes:
        layer = find_longest_prefix(name, layers, _JOINTS) or current
        if layer is None:
            waiting += seconds  # what runs before the first layer counts for that one
            continue
        found[layer] = found.get(layer, 0.0) + seconds + waiting
        waiting, current = 0.0, layer
    return found


def _until_the_next(begun: list[tuple[str, float]], start: float, end: float) -> Ran:
    found: Ran = {}
    starts = [start, *(moment for _, moment in begun[1:]), end]  # the first layer has all that was before it
    for place, (layer, _) in enumerate(begun):
        found[layer] = found.get(layer, 0.0) + starts[place + 1] - starts[place]
    return found


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- Where networks are timed: by name, how one gets there and what it is made of.


@dataclass(frozen=True)
class Runtime:
    """A runtime: its library, the format of its files ("" where it takes the network itself), what opens one, and
    whether it is fast only with networks made for integers."""

    library: str
    to: str = ""
    opens: type[OnnxFile] = OnnxFile
    integer: bool = False

    @property
    def version(self) -> str:
        """Name and version of the library."""
        return f"{self.library} {importlib.metadata.version(self.library)}"

    def prepare(self, model: nn.Module, example: Any, path: Path, options: Mapping[str, Any]) -> nn.Module:
        """Write the file that it runs, if it runs files; or else make the network compute in integers where it can."""
        if self.to:
            export(model, path, self.to, example=example, force=True, **options)
            return model
        if options:
            raise InputError(f"{', '.join(options)}: options are those of a file's format, and {self.library} has none")
        return EXECUTIONS.get("integer")(model, example=example)

    def open(self, model: nn.Module | None, path: Path, inputs: Inputs, threads: int, graph: Graph) -> Contestant:
        """The network, ready to run."""
        if self.to:
            return self.opens(path, inputs, threads)
        assert model is not None
        return Network(model, inputs, threads, [layer.name for layer in graph.layers])


RUNTIMES = {
    "onnxruntime": Runtime("onnxruntime", "onnx", integer=True),
    "openvino": Runtime("openvino", "openvino", OpenVinoFile),
    "matmulnbits": Runtime("onnxruntime", "matmulnbits"),
    "torch": Runtime("torch"),
}


def runtime_of(name: str) -> Runtime:
    """The runtime of that name."""
    if name not in RUNTIMES:
        raise UnknownName("runtime", name, RUNTIMES)
    return RUNTIMES[name]
