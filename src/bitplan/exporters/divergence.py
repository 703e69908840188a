"""Find where an ONNX file and its model first give a value different codes, and if it lies between the two.

Both add up the same products in another order, so sums differ in their last bits. A sum that lies, within that error,
halfway between two codes may round to either side; everything after it then differs as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.adapters.onnx import onnx, read
from bitplan.adapters.onnxruntime import Session
from bitplan.exporters.onnx_running import OpenedGraph, Runtime, name_arrays
from bitplan.quant.lsq import MASK, positive_scale
from bitplan.quant.quantizers import InputQuantizer

_HALFWAY = 1e-3  # codes: how near to the middle counts as a tie
_SUFFIX = ".dequantize"
Tapped = tuple[Tensor, Tensor, Tensor]
"""A value, its quantized value, and the step."""


class ActivationComparison:
    """The file with every quantized activation as a further output, and the model whose quantizers are watched."""

    def __init__(self, path: Path, model: nn.Module, runtime: Runtime = Session) -> None:
        self._path = path
        self._runtime = runtime
        self._model = model
        self._graph: OpenedGraph | None = None
        self._plain = 0  # how many outputs the file itself has
        self._watched: list[str] = []  # the quantizers behind the further ones
        paths = {path: module for path, module in model.named_modules() if isinstance(module, InputQuantizer)}
        self._quantizers: Mapping[str, InputQuantizer] = paths

    def begins_at_tie(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, tolerance: float) -> bool:
        """Return True if the first activation with other codes differs only at ties, on one sample.

        If none differs (a single sample is added in another order than its batch), the outputs of the unchanged file
        must agree: with the further outputs, a runtime may compute correctly what it otherwise gets wrong.
        """
        graph = self._open()
        tapped = [torch.from_numpy(array) for array in graph.run(name_arrays(graph, args, kwargs))[self._plain :]]
        seen, outputs = self._watch(args, kwargs)
        runs: Counter[str] = Counter()  # of each quantizer so far
        for name, other in zip(self._watched, tapped, strict=True):
            path = self._path_of(name)
            value, quantized, step = seen[path][runs[path]]
            runs[path] += 1
            moved = (quantized - other).abs() > step / 2  # has another code
            if self._quantizers[path].masked:  # the file puts masks back behind its quantizer
                moved &= value >= MASK
            if moved.any():
                return _are_ties((value / step)[moved])
        plain = self._untapped
        theirs = [torch.from_numpy(array) for array in plain.run(name_arrays(plain, args, kwargs))]
        return _agree(list_tensors(outputs), theirs, tolerance)

    @cached_property
    def _untapped(self) -> OpenedGraph:
        return self._runtime(self._path)

    def _open(self) -> OpenedGraph:
        if self._graph is None:
            proto, library = read(self._path), onnx()
            self._plain = len(proto.graph.output)
            for node in _quantizers(proto.graph):
                self._watched.append(node.name.removesuffix(_SUFFIX))
                value = library.helper.make_tensor_value_info(node.output[0], library.TensorProto.FLOAT, None)
                proto.graph.output.append(value)
            self._graph = self._runtime(proto.SerializeToString())
        return self._graph

    def _path_of(self, name: str) -> str:
        """Return the quantizer of a node: the second run of a layer is numbered."""
        if name in self._quantizers:
            return name
        return name.rpartition("_")[0]

    def _watch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, list[Tapped]], Any]:
        """Run the model and return the input and output of each quantizer, once for linked layers, and the outputs."""
        seen: dict[str, list[Tapped]] = {path: [] for path in self._quantizers}
        hooks = []
        for path, quantizer in self._quantizers.items():

            def look(module: nn.Module, inputs: tuple[Any, ...], output: Tensor, path: str = path) -> None:
                assert isinstance(module, InputQuantizer)
                value = inputs[0].cpu()
                if not seen[path] or not torch.equal(seen[path][-1][0], value):
                    seen[path].append((value, output.cpu(), positive_scale(module.step.detach()).cpu()))

            hooks.append(quantizer.register_forward_hook(look))
        try:
            return seen, self._model(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()


def _are_ties(ratios: Tensor) -> bool:
    """Return True if all of these values, divided by their step, lie halfway between two codes."""
    return bool(((ratios - ratios.floor() - 0.5).abs() < _HALFWAY).all())


def _agree(own: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float) -> bool:
    """Return True if outputs are equal up to a fraction of the largest among them."""
    for one, other in zip(own, theirs, strict=True):
        if not torch.allclose(one.cpu(), other, rtol=0, atol=tolerance * float(one.abs().max())):
            return False
    return True


def _quantizers(graph: Any) -> list[Any]:
    """Return the nodes that make quantized activations (not weights)."""
    makers = {output: node for node in graph.node for output in node.output}
    stored = {tensor.name for tensor in graph.initializer}

    def quantizes_activation(node: Any) -> bool:
        if node.op_type == "DequantizeLinear":
            maker = makers.get(node.input[0])
            while maker is not None and maker.op_type in ("Clip", "MaxPool"):  # of codes
                maker = makers.get(maker.input[0])
            return maker is not None and maker.op_type == "QuantizeLinear"
        if node.op_type == "Mul":  # of codes that are floats (`openvino.py`)
            return bool(node.name.endswith(_SUFFIX))
        return node.op_type == "Quant" and node.input[0] not in stored

    return [node for node in graph.node if quantizes_activation(node)]


def list_tensors(outputs: Any) -> list[Tensor]:
    """Return the tensors in a model's outputs, in order."""
    if isinstance(outputs, Tensor):
        return [outputs]
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    return [leaf for value in values if value is not None for leaf in list_tensors(value)]
