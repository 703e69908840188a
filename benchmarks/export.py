"""Exported files of whole networks: size and speed beside the same runtime's float, and onnxruntime's own 8 bits.

Every second group of layers is at 2 bits, the others at 4, first and last layer at 8 (the paper's rules; the narrow
layers of the CIFAR network are chosen too). ONNX Runtime gets networks made for integers (`integer=True`), OpenVINO and
PyTorch (`plugins/integer`) networks as they are usually trained. All forms take turns in one process; the figures are
the best of some rounds, in CPU time of one thread. Weights are random: speed, not accuracy
(`studies/exported_scores.py`).
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bitplan
from benchmarks.rows import Row
from benchmarks.timing import in_turn
from bitplan.adapters.onnxruntime import Session
from bitplan.exporters.capture import batch_inputs, translate_to_onnx
from bitplan.models.bert import example as window
from bitplan.models.zoo import load_model
from bitplan.plugins.integer import integer
from bitplan.plugins.runtimes.openvino import OpenVinoSession

PLAN = "w2a4,w4a4"
ALL_LAYERS = bitplan.Rules(first=None, last=None, narrow=0)


@dataclass(frozen=True)
class Subject:
    """A network to export, and what it reads."""

    title: str
    name: str
    example: Callable[[], Any]
    rules: bitplan.Rules = field(default_factory=bitplan.Rules)


def images(side: int) -> Callable[[], Any]:
    return lambda: torch.randn(1, 3, side, side)


SUBJECTS = {
    "resnet18": Subject("ResNet-18", "resnet18", images(224)),
    "resnet50": Subject("ResNet-50", "resnet50", images(224)),
    "mobilenet_v2": Subject("MobileNetV2", "mobilenet_v2", images(224), bitplan.Rules(narrow=0)),
    "resnet20": Subject("ResNet-20, CIFAR", "resnet20", images(32), ALL_LAYERS),
    "vit_small": Subject("ViT-S/16", "timm/vit_small_patch16_224", images(224)),
    "bert-base": Subject("BERT-base, 128 tokens", "bert-base", lambda: window(128)),
}


def rows() -> list[Row]:
    """Return our files against the same runtime's float, and onnxruntime's own 8 bits; one image, one thread."""
    made = []
    for subject in SUBJECTS.values():
        took = {form: 1e3 * seconds for form, seconds in measured(subject).items()}
        pairs = [(f"{runtime}, bitplan", f"{runtime}, float") for runtime in ("ONNX Runtime", "OpenVINO", "PyTorch")]
        for ours, peer in (*pairs, ("ONNX Runtime, bitplan", "ONNX Runtime, its own int8")):
            runtime, _, form = peer.partition(", ")
            against = "its float" if form == "float" else form
            made.append(Row(f"{subject.title} in {runtime}", took[ours], took[peer], against, "ms", 1.0))
    return made


def measured(subject: Subject) -> dict[str, float]:
    """Return the CPU seconds of every form, by its runtime and name."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network, example = load_model(subject.name)[0].eval(), subject.example()
    usual = planned(network, example, PLAN, rules=subject.rules)
    for_integers = planned(network, example, PLAN, rules=subject.rules, integer=True)
    with tempfile.TemporaryDirectory() as folder:
        plain = as_float(network, example, Path(folder) / "float.onnx")
        own = quantized_by_runtime(plain, Path(folder) / "int8.onnx", example, static=True)
        for_onnx = bitplan.export(for_integers, Path(folder) / "onnx.onnx", "onnx", example=example)
        for_openvino = bitplan.export(usual, Path(folder) / "openvino.onnx", "openvino", example=example)
        forms = {
            "ONNX Runtime, float": opened(Session, plain, example),
            "ONNX Runtime, its own int8": opened(Session, own, example),
            "ONNX Runtime, bitplan": opened(Session, for_onnx, example),
            "OpenVINO, float": opened(OpenVinoSession, plain, example),
            "OpenVINO, bitplan": opened(OpenVinoSession, for_openvino, example),
            "PyTorch, float": called(network, example),
            "PyTorch, bitplan": called(integer(usual), example),
        }
        return in_turn(forms, rounds=7, clock=time.process_time)


def opened(runtime: Any, path: Path, example: Any) -> Callable[[], Any]:
    """Return a call of a file in a runtime."""
    session = runtime(path, threads=1)
    inputs = arrays(repeated(example, 1), session.inputs)
    return lambda: session.run(inputs)


def called(model: nn.Module, example: Any) -> Callable[[], Any]:
    """Return a call of a network in PyTorch."""

    @torch.inference_mode()
    def run() -> Any:
        return model(**example) if isinstance(example, Mapping) else model(example)

    return run


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


def as_float(network: nn.Module, example: Any, path: Path) -> Path:
    """The float network as torch writes it, its batch free; runtimes fold its batch norms when they load it."""
    args, kwargs = batch_inputs(example)
    batch = {0: torch.export.Dim("batch")}
    free = {name: batch for name in kwargs} if kwargs else tuple(batch for _ in args)
    path.write_bytes(translate_to_onnx(network.eval(), args, kwargs, free, opset=21).SerializeToString())
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
