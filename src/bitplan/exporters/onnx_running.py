"""Call an ONNX file like the model it was made from, by ONNX Runtime, qonnx or any other runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn


class OpenedGraph(Protocol):
    """A graph that is ready to run: arrays by input name → arrays in the order of its outputs."""

    inputs: list[str]
    outputs: list[str]

    def run(self, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Return all outputs."""


Runtime = Callable[[bytes | Path], OpenedGraph]
"""Opens an ONNX file, or the content of one: `adapters.onnxruntime.Session`, `QuantSession` …"""


class TimedRuntime(Protocol):
    """A runtime that can be timed: it has a name, and runs on a given number of threads."""

    @property
    def name(self) -> str:
        """The name that people know."""

    def __call__(self, model: bytes | Path, *, threads: int | None = None) -> OpenedGraph:
        """Open a file, or the content of one."""


class RunnableGraph(nn.Module):
    """A graph that is called like the model it was made from: tensors in, tensors out."""

    def __init__(self, graph: OpenedGraph) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return one output as a tensor, several by name, place and attribute."""
        outputs = [torch.from_numpy(array) for array in self.graph.run(name_arrays(self.graph, args, kwargs))]
        if len(outputs) == 1:
            return outputs[0]
        return Outputs(zip(self.graph.outputs, outputs, strict=True))


class Outputs(dict[str, Tensor]):
    """Outputs by name, as attributes, and by place."""

    def __getattr__(self, name: str) -> Tensor:
        if name not in self:
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int | slice) else super().__getitem__(key)


def name_arrays(graph: OpenedGraph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return a model's arguments as arrays under the names of the graph's inputs, without those it does not take."""
    named = dict(zip(graph.inputs, args, strict=False)) | dict(kwargs)
    return {name: named[name].detach().cpu().numpy() for name in graph.inputs if name in named}
