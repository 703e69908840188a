"""Exported files of whole networks: size and speed beside the same runtime's float, and onnxruntime's own 8 bits.

    python -m benchmarks.export [resnet18 resnet50 …] [--settings 1x1 8x1 1x2]      tables of batches and threads

Every second group of layers is at 2 bits, the others at 4, first and last layer at 8 (the paper's rules; the narrow
layers of the CIFAR network are chosen too). ONNX Runtime gets networks made for integers (`integer=True`), OpenVINO and
PyTorch (`bitplan.integer`) networks as they are usually trained. All forms take turns in one process; the figures are
the best of some rounds, in CPU time with one thread and wall time with more. Weights are random: speed, not accuracy
(`studies/exported_scores.py`).
"""

from __future__ import annotations

import argparse
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
from bitplan.exporters.capture import graph_of, inputs_of
from bitplan.models.bert import example as window
from bitplan.models.zoo import load_model
from bitplan.plugins.runtimes.openvino import OpenVinoSession

ROUNDS = 7
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


def main() -> None:
    """Print a table for each network: milliseconds for float, multiples of its speed for the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=[*SUBJECTS], help=f"of {', '.join(SUBJECTS)}; all without")
    parser.add_argument("--settings", nargs="+", default=["1x1", "8x1", "1x2"], help="batch x threads")
    options = parser.parse_args()
    settings = [(int(batch), int(threads)) for batch, threads in (one.split("x") for one in options.settings)]
    for name in options.networks:
        print(f"\n{SUBJECTS[name].title}\n\n| form | MB | {' | '.join(options.settings)} |", flush=True)
        print("|" + "---|" * (2 + len(settings)))
        seconds = measured(SUBJECTS[name], settings)
        floats = {form.runtime: taken for form, taken in seconds.items() if form.title.endswith("float")}
        for form, taken in seconds.items():
            plain = floats[form.runtime]
            speeds = [f"{base / each:.2f} ×" for base, each in zip(plain, taken, strict=True)]
            cells = [f"{1000 * each:.2f} ms" for each in taken] if taken is plain else speeds
            print(f"| {form.title} | {form.size / 1e6:.2f} | {' | '.join(cells)} |")


def rows() -> list[Row]:
    """Return our files against the same runtime's float, and onnxruntime's own 8 bits; one image, one thread."""
    made = []
    for name in ("resnet18", "mobilenet_v2", "resnet20"):
        title = SUBJECTS[name].title
        took = {form.title: 1e3 * taken[0] for form, taken in measured(SUBJECTS[name], [(1, 1)]).items()}
        pairs = [(f"{runtime}, bitplan", f"{runtime}, float") for runtime in ("ONNX Runtime", "OpenVINO", "PyTorch")]
        for ours, peer in (*pairs, ("ONNX Runtime, bitplan", "ONNX Runtime, its own int8")):
            runtime, _, form = peer.partition(", ")
            against = "its float" if form == "float" else form
            made.append(Row(f"{title} in {runtime}", took[ours], took[peer], against, "ms", 1.0))
    return made


@dataclass(frozen=True)
class Form:
    """A network in one form: the runtime whose float it is compared with, its bytes, and how it is run."""

    title: str
    runtime: str
    size: int
    open: Callable[[int, int], Callable[[], Any]]


def measured(subject: Subject, settings: list[tuple[int, int]]) -> dict[Form, list[float]]:
    """Return the seconds of every form in every setting."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    network, example = load_model(subject.name)[0].eval(), subject.example()
    with tempfile.TemporaryDirectory() as folder:
        forms = [*files(subject, network, example, Path(folder)), *in_pytorch(subject, network, example)]
        seconds: dict[Form, list[float]] = {form: [] for form in forms}
        for batch, threads in settings:
            torch.set_num_threads(threads)
            clock = time.process_time if threads == 1 else time.perf_counter
            best = in_turn({form.title: form.open(batch, threads) for form in forms}, ROUNDS, clock=clock)
            for form in forms:
                seconds[form].append(best[form.title])
    return seconds


def files(subject: Subject, network: nn.Module, example: Any, folder: Path) -> list[Form]:
    """The files, of float and quantized networks, in both runtimes."""
    usual = planned(network, example, PLAN, rules=subject.rules)
    for_integers = planned(network, example, PLAN, rules=subject.rules, integer=True)
    plain = as_float(network, example, folder / "float.onnx")
    own = quantized_by_runtime(plain, folder / "int8.onnx", example, static=True)
    for_onnx = bitplan.export(for_integers, folder / "onnx.onnx", "onnx", example=example)
    for_openvino = bitplan.export(usual, folder / "openvino.onnx", "openvino", example=example)
    return [
        form("ONNX Runtime, float", Session, plain, example),
        form("ONNX Runtime, its own int8", Session, own, example),
        form("ONNX Runtime, bitplan", Session, for_onnx, example),
        form("OpenVINO, float", OpenVinoSession, plain, example),
        form("OpenVINO, bitplan", OpenVinoSession, for_openvino, example),
    ]


def form(title: str, runtime: Any, path: Path, example: Any) -> Form:
    """A file in a runtime."""

    def opened(batch: int, threads: int) -> Callable[[], Any]:
        session = runtime(path, threads=threads)
        inputs = arrays(repeated(example, batch), session.inputs)
        return lambda: session.run(inputs)

    return Form(title, title.partition(",")[0], path.stat().st_size, opened)


def in_pytorch(subject: Subject, network: nn.Module, example: Any) -> list[Form]:
    """The float network and the integer copy of the quantized one, in PyTorch."""
    made = bitplan.integer(planned(network, example, PLAN, rules=subject.rules))

    def called(model: nn.Module) -> Callable[[int, int], Callable[[], Any]]:
        def opened(batch: int, _: int) -> Callable[[], Any]:
            given = repeated(example, batch)

            def run() -> Any:
                with torch.inference_mode():
                    return model(**given) if isinstance(given, dict) else model(given)

            return run

        return opened

    return [
        Form("PyTorch, float", "PyTorch", 0, called(network)),
        Form("PyTorch, bitplan", "PyTorch", 0, called(made)),
    ]


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


if __name__ == "__main__":
    main()
