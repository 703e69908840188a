"""Networks as files, for the benchmarks: quantized by a mixed plan, in float, and by onnxruntime's own quantization."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bitplan
from bitplan.adapters.onnxruntime import Session
from bitplan.exporters.capture import graph_of, inputs_of

ALL_LAYERS = bitplan.Rules(first=None, last=None, narrow=0)


def planned(
    network: nn.Module, example: Any, precisions: str, *, rules: bitplan.Rules = ALL_LAYERS, **options: Any
) -> nn.Module:
    """The network quantized: at one precision, or every second group at the lower of two."""
    graph = bitplan.trace(network, example, rules=rules, name="network")
    low, high = (*precisions.split(","), precisions)[:2]
    plan = bitplan.Plan.uniform(graph, high)
    lowered = {layer.name: bitplan.Precision.parse(low) for group in graph.selectable[::2] for layer in group.layers}
    mixed = plan.model_copy(update={"precisions": plan.precisions | lowered})
    model = bitplan.quantize(network, mixed, **options).eval()
    bitplan.calibrate_(model, [repeated(example, 2)])
    return model


def repeated(example: Any, batch: int) -> Any:
    """The first sample of an example so many times."""
    if isinstance(example, Mapping):
        return {name: repeated(value, batch) for name, value in example.items()}
    return torch.cat([example[:1]] * batch)


def drawn(example: Any, count: int) -> Any:
    """Random samples like an example: normal floats, words from a few hundred, masks as they are."""
    if isinstance(example, Mapping):
        return {
            name: drawn(value, count) if name == "input_ids" else repeated(value, count)
            for name, value in example.items()
        }
    shape, generator = (count, *example.shape[1:]), torch.Generator().manual_seed(1)
    if example.is_floating_point():
        return torch.randn(shape, generator=generator)
    return torch.randint(1, 300, shape, generator=generator)


def planned_bytes(model: nn.Module) -> int:
    """What a plan's bits come to: codes at their bits, all other parameters in float32."""
    precisions, codes = bitplan.plan_of(model).precisions, bitplan.integer_weights(model)
    of_codes = sum(-(-one.numel() * precisions[layer].weight_bits // 8) for layer, one in codes.items())
    total = sum(parameter.numel() for parameter in model.parameters())
    return of_codes + 4 * (total - sum(one.numel() for one in codes.values()))


def as_float(network: nn.Module, example: Any, path: Path) -> Path:
    """The float network as torch writes it, its batch free; runtimes fold its batch norms when they load it."""
    args, kwargs = inputs_of(example)
    batch = {0: torch.export.Dim("batch")}
    free = {name: batch for name in kwargs} if kwargs else tuple(batch for _ in args)
    path.write_bytes(graph_of(network.eval(), args, kwargs, free, opset=21).SerializeToString())
    return path


def quantized_by_runtime(source: Path, target: Path, example: Any, *, static: bool) -> Path:
    """A float file after onnxruntime's own 8-bit quantization: by calibration, or of weights alone."""
    from onnxruntime import quantization

    inputs = arrays(example, Session(source).inputs)

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left: list[dict[str, np.ndarray]] = [inputs]

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self.left.pop() if self.left else None

    if static:
        quantization.quantize_static(source, target, Reader())
    else:
        quantization.quantize_dynamic(source, target)
    return target


def arrays(example: Any, names: list[str]) -> dict[str, np.ndarray]:
    """An example as the inputs of a file; those that a graph does not read are left out."""
    values = example if isinstance(example, Mapping) else {names[0]: example}
    return {name: np.asarray(value) for name, value in values.items() if name in names and isinstance(value, Tensor)}
