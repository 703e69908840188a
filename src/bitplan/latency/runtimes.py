"""Where networks are timed: by name, how one gets there and what it is made of."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from bitplan.core.errors import InputError, UnknownName
from bitplan.core.records import Graph
from bitplan.exporters.base import export
from bitplan.latency.contestants import Contestant, Inputs, Network, OnnxFile, OpenVinoFile
from bitplan.quant.integer_copy import integer as integer_copy


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
        return integer_copy(model, example=example)

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
