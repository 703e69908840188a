"""speed: how much smaller and faster an exported file is than the float network, in the same runtime."""

from __future__ import annotations

import logging
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from bitplan.adapters.torch import inference, multiplies_bytes
from bitplan.core.errors import InputError
from bitplan.core.verdicts import Speed
from bitplan.exporters.base import Source, exporter_of
from bitplan.exporters.capture import inputs_of
from bitplan.exporters.onnx_graph import Draft, Node
from bitplan.exporters.onnx_running import OpenedGraph, arrays_for
from bitplan.exporters.turns import in_turn
from bitplan.quant.convert import plan_of, root_of

_log = logging.getLogger(__name__)
_OPSET = 21
_ROUNDS = 11
_LEAST = 0.02  # seconds of a turn


def speed(
    path: str | Path, model: nn.Module, example: Any, *, batch: int = 1, threads: int = 1, rounds: int = _ROUNDS
) -> Speed:
    """Run an exported file and the float network in turn and compare bytes and times.

    The float network is the model without its quantizers, written for the same runtime, which folds its batch norms.
    """
    source = Path(path)
    runtime = exporter_of(source).opened(source, root_of(model)).runtime
    if runtime is None:
        raise InputError(f"{path} has no float form in a runtime to be compared with: speed is for onnx, openvino …")
    if not multiplies_bytes():
        _log.warning("this CPU has no instructions for products of bytes (VNNI, AMX): integers will not be fast here")
    args, kwargs = inputs_of(example, batch)
    with tempfile.TemporaryDirectory() as folder, inference(model):
        plain = Path(folder) / "float.onnx"
        write_float(model, example, plain)
        opened = {"file": runtime(source, threads=threads), "float": runtime(plain, threads=threads)}
        runs = {name: _run(graph, args, kwargs) for name, graph in opened.items()}
        taken = in_turn(runs, rounds, least=_LEAST, threads=threads).seconds
        sizes = source.stat().st_size, plain.stat().st_size
    return Speed(
        runtime=runtime.name,
        batch=batch,
        threads=threads,
        bytes=sizes[0],
        float_bytes=sizes[1],
        seconds=statistics.median(taken["file"]),
        float_seconds=statistics.median(taken["float"]),
    )


def write_float(model: nn.Module, example: Any, path: Path) -> None:
    """The network without its quantizers as ONNX: float weights that lie on their grids, float activations."""
    source = Source(plan_of(model), None, root_of(model), example)
    draft = Draft(source, _OPSET)
    draft.leave_inputs_float_()

    def rewrite(node: Node, about: dict[str, Any]) -> list[Node]:
        weight = draft.weights[about["layer"]]
        if weight.layer not in draft.written:
            draft.written[weight.layer] = draft.floats(f"{weight.layer}.values", weight.codes * weight.steps)
        return [draft.node("Identity", (draft.written[weight.layer],), node.output[0], node.name)]

    draft.replace("Weight", rewrite)
    draft.save(source, path, exporter="float")


def _run(graph: OpenedGraph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    arrays = arrays_for(graph, args, kwargs)
    return lambda: graph.run(arrays)
