"""Exported files of whole networks: size and speed beside the same runtime's float, and onnxruntime's own 8 bits.

    python -m benchmarks.export [resnet18 resnet50 …] [--rounds 7] [--settings 1x1 8x1 1x2]

Every second group of layers is at 2 bits, the others at 4, first and last layer at 8 (the paper's rules; the narrow
layers of the CIFAR network are chosen too). ONNX Runtime gets networks made for integers (`integer=True`), OpenVINO and
PyTorch (`plugins/integer`) networks as they are usually trained. All forms take turns in one process; the figures are
the best of some rounds, as multiples of the best float in the same runtime, of the processor's time with one thread and
of the wall's with more. *Plan* is the size that the plan's bits come to, everything else in float32; *equal* says how
many of some random samples get the same prediction as from the model in PyTorch, and how many `verify` finds to differ
by more than ties; deep random networks turn every tie into another answer, and then it also says how many predictions
the model has in common with itself in double precision. Weights are random: speed, not accuracy
(`studies/exported_scores.py`).
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bitplan
from benchmarks.exported import (
    ALL_LAYERS,
    arrays,
    as_float,
    drawn,
    planned,
    planned_bytes,
    quantized_by_runtime,
    repeated,
)
from benchmarks.rows import Row
from benchmarks.timing import in_turn
from bitplan.adapters.onnxruntime import Session
from bitplan.models.bert import example as window
from bitplan.models.zoo import load_model
from bitplan.plugins.integer import integer
from bitplan.plugins.runtimes.openvino import OpenVinoSession

SETTINGS = ("1x1", "8x1", "1x2")  # batch and threads
PLAN = "w2a4,w4a4"
SAMPLES = 8  # whose answers are compared


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
    """Print a table for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(SUBJECTS)}; all without")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--settings", nargs="+", default=SETTINGS, help="batch x threads")
    asked, _ = parser.parse_known_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    settings = [(int(batch), int(threads)) for batch, threads in (one.split("x") for one in asked.settings)]
    columns = [f"batch {batch}, {threads} thread{'s' * (threads > 1)}" for batch, threads in settings]
    for name in asked.networks or SUBJECTS:
        print(f"\n{SUBJECTS[name].title}\n\n| form | MB | plan | × smaller | equal | {' | '.join(columns)} |")
        print("|" + "---|" * (5 + len(columns)), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            show(measured(SUBJECTS[name], Path(folder), asked.rounds, settings))


def rows() -> list[Row]:
    """Our files against the same runtime's float, and against onnxruntime's own 8 bits; one image, one thread."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    made = []
    for name in ("resnet18", "mobilenet_v2", "resnet20"):
        title = SUBJECTS[name].title
        with tempfile.TemporaryDirectory() as folder:
            seconds = measured(SUBJECTS[name], Path(folder), 7, [(1, 1)])
        took = {form.title: 1e3 * taken[0] for form, taken in seconds.items()}
        for runtime, suffix in (
            ("ONNX Runtime", "bitplan"),
            ("OpenVINO", "bitplan"),
            ("PyTorch", "bitplan"),
        ):
            taken = took[f"{runtime}, {suffix}"], took[f"{runtime}, float"]
            made.append(Row(f"{title} in {runtime}", *taken, "its float", "ms", 1.0))
        taken = took["ONNX Runtime, bitplan"], took["ONNX Runtime, its own int8"]
        made.append(Row(f"{title} in ONNX Runtime", *taken, "its own int8", "ms", 1.0))
    return made


@dataclass(frozen=True)
class Form:
    """A network in one form: which runtime's float it is compared with, its bytes, and how it is run.

    `planned` are the bytes that its plan comes to, `equal` what was found of its answers.
    """

    title: str
    runtime: str
    size: int
    open: Callable[[int, int], Callable[[], Any]]
    planned: int = 0
    equal: str = ""


def measured(subject: Subject, folder: Path, rounds: int, settings: list[tuple[int, int]]) -> dict[Form, list[float]]:
    """Seconds of every form in every setting."""
    torch.manual_seed(0)
    network, example = load_model(subject.name)[0].eval(), subject.example()
    forms = [*files(subject, network, example, folder), *in_pytorch(subject, network, example)]
    seconds: dict[Form, list[float]] = {form: [] for form in forms}
    for batch, threads in settings:
        torch.set_num_threads(threads)
        clock = time.process_time if threads == 1 else time.perf_counter
        best = in_turn({form.title: form.open(batch, threads) for form in forms}, rounds, clock=clock)
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
        checked(form("ONNX Runtime, bitplan", Session, for_onnx, example), for_onnx, for_integers, example),
        form("OpenVINO, float", OpenVinoSession, plain, example),
        checked(form("OpenVINO, bitplan", OpenVinoSession, for_openvino, example), for_openvino, usual, example),
    ]


def form(title: str, runtime: Any, path: Path, example: Any) -> Form:
    """A file in a runtime."""

    def opened(batch: int, threads: int) -> Callable[[], Any]:
        session = runtime(path, threads=threads)
        inputs = arrays(repeated(example, batch), session.inputs)
        return lambda: session.run(inputs)

    return Form(title, title.partition(",")[0], path.stat().st_size, opened)


def checked(form: Form, path: Path, model: nn.Module, example: Any) -> Form:
    """A form with what its plan predicts, and what `verify` says of it."""
    verdict = bitplan.verify(path, model, [drawn(example, SAMPLES)])
    equal = f"{verdict.predictions_equal} of {verdict.predictions}, {verdict.unexplained} unexplained"
    if verdict.control is not None:
        equal += f", the model with itself {verdict.control:.0%}"
    return replace(form, planned=planned_bytes(model), equal=equal)


def in_pytorch(subject: Subject, network: nn.Module, example: Any) -> list[Form]:
    """The float network and the integer copy of the quantized one, in PyTorch."""
    made = integer(planned(network, example, PLAN, rules=subject.rules))

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


def show(seconds: dict[Form, list[float]]) -> None:
    """A row for each form: milliseconds for float, multiples of its speed for others."""
    floats = {form.runtime: (form.size, taken) for form, taken in seconds.items() if form.title.endswith("float")}
    for form, taken in seconds.items():
        size, best = floats[form.runtime]
        if form.title.endswith("float"):
            cells = [f"{1000 * each:.2f} ms" for each in taken]
        else:
            cells = [f"{plain / each:.2f} ×" for plain, each in zip(best, taken, strict=True)]
        wanted = f"{form.planned / 1e6:.2f}" if form.planned else ""
        stored = f"{form.size / 1e6:.2f} | {wanted} | {size / form.size:.2f}" if form.size else " | | "
        print(f"| {form.title} | {stored} | {form.equal} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
