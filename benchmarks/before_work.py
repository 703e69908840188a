"""What one version of bitplan takes for the work of `benchmarks/before.py`, which starts it with that version's source.

Only what both versions have is called. A line is the name of a task; the answer is `figure`, CPU seconds unless the
task is called otherwise, and `of`, what FP32 takes for the same in this process where there is such a thing.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bitplan
from benchmarks.peer_work import BATCH, network, serve, trainer
from benchmarks.training import Trainer

Answer = dict[str, Any]
BUDGETS = [f"{percent}%" for percent in (95, 90, 85, 80, 75, 70, 65, 60)]
FOLDER = tempfile.TemporaryDirectory()


def taken(work: Callable[[], Any]) -> Answer:
    """The processor's time of this process, all its threads."""
    begin = time.process_time()
    work()
    return {"figure": time.process_time() - begin}


# Training


@cache
def trainers() -> tuple[Trainer, Trainer]:
    """ResNet-18 in FP32 and at w4a4, which were warmed up."""
    model = network("resnet18", 10)
    plan = bitplan.Plan.uniform(bitplan.trace(model, BATCH[:1]), "w4a4")
    quantized = bitplan.quantize(model, plan)
    made = trainer(model, model.parameters()), trainer(quantized, bitplan.parameter_groups(quantized, lr=1e-3))
    for _ in range(3):
        for one in made:
            one.step()
    return made


def step() -> Answer:
    """The medians of seven steps, FP32's and a quantized one's in turn."""
    floats, ours = trainers()
    rounds = [(floats.step(), ours.step()) for _ in range(7)]
    of, figure = (sorted(seconds)[len(rounds) // 2] for seconds in zip(*rounds, strict=True))
    return {"figure": figure, "of": of}


@cache
def calibrated() -> list[torch.nn.Module]:
    """ResNet-18 by LSQ, whose first steps look at means, and by FAQ, which looks at percentiles.

    Both were calibrated: the first time a version may also look at how the network runs.
    """
    model = network("resnet18", 10).eval()
    plan = bitplan.Plan.uniform(bitplan.trace(model, BATCH[:1]), "w4a4")
    both = [bitplan.quantize(model, plan, method=method).eval() for method in ("lsq", "faq")]
    for quantized in both:
        bitplan.calibrate_(quantized, [BATCH])
    return both


def calibrating() -> Answer:
    """Both, by four batches."""
    both = calibrated()
    return taken(lambda: [bitplan.calibrate_(quantized, [BATCH] * 4) for quantized in both])


# Selection


@cache
def problem(layers: int, choices: str) -> tuple[Any, Any, list[Any]]:
    """Layers of random sizes, gains that grow by random numbers, and two costs."""
    draw = random.Random(layers)
    graph = bitplan.Graph(
        model="random",
        layers=tuple(
            bitplan.Layer(
                name=f"layer{n}", kind="linear", macs=draw.randrange(1, 10**9), weights=draw.randrange(1, 10**6),
                in_features=1024,
            )
            for n in range(layers)
        ),
    )  # fmt: skip
    return graph, drawn(graph, choices), [bitplan.price(name, graph, choices=choices) for name in ("bmac", "memory")]


def drawn(graph: Any, choices: str) -> Any:
    """Random gains of all groups."""
    draw, precisions = random.Random(1), bitplan.estimate("uniform", None, graph, choices=choices).choices
    rows = {}
    for group in graph.selectable:
        steps = [draw.random() for _ in precisions[1:]]
        rows[group.name] = (0.0, *np.cumsum(steps).tolist())
    return bitplan.Gains(method="random", choices=precisions, rows=rows, graph=graph.id)


def selecting(layers: int, choices: str, *budgets: str) -> Answer:
    """One plan within one or two budgets."""
    graph, gains, costs = problem(layers, choices)
    return taken(lambda: bitplan.select(graph, gains, costs, budget=list(budgets)))


def eight_budgets() -> Answer:
    """ResNet-50 at eight budgets: in one call where there is one."""
    graph = bitplan.trace(network("resnet50", 1000).eval(), torch.zeros(1, 3, 224, 224))
    gains, cost = drawn(graph, "w2a2,w4a4"), bitplan.price("bmac", graph, choices="w2a2,w4a4")
    try:
        from bitplan.selection import base
    except ImportError:  # the code of before
        from bitplan.plan import base

    together = getattr(base, "select_each", None)
    if together is not None:
        return taken(lambda: together(graph, gains, cost, budgets=BUDGETS))
    return taken(lambda: [bitplan.select(graph, gains, cost, budget=budget) for budget in BUDGETS])


# Files


@cache
def quantized_file() -> Path:
    """ResNet-50's checkpoint with learned steps, 102 MB."""
    model = network("resnet50", 1000)
    start = bitplan.quantize(model, bitplan.Plan.uniform(bitplan.trace(model, torch.zeros(1, 3, 64, 64)), "w4a4"))
    bitplan.calibrate_(start, [torch.randn(2, 3, 64, 64)])
    folder = Path(FOLDER.name) / "quantized"
    bitplan.save_checkpoint(start, folder)
    return folder / "model.safetensors"


@cache
def half_file() -> Path:
    """180 million weights in bf16."""
    from safetensors.torch import save_file

    path = Path(FOLDER.name) / "half.safetensors"
    save_file({f"layers.{n}.weight": torch.randn(4096, 4096).mul_(0.02).bfloat16() for n in range(11)}, path)
    return path


def counting(file: Callable[[], Path], **options: str) -> Answer:
    """EAGL from a file's name to its gains; and what reading its bytes takes."""
    from bitplan.gains.eagl import Eagl
    from bitplan.graph.names import read_graph

    path, gain = file(), Eagl(**options)
    graph, choices = read_graph(path), bitplan.estimate("uniform", None, read_graph(path), choices="w2a2,w4a4").choices
    gain.layer_gains(path, graph, choices)  # compiles, and brings the file into memory
    ours = min(taken(lambda: gain.layer_gains(path, graph, choices))["figure"] for _ in range(5))
    whole = np.memmap(path, np.uint8, "r")
    words = whole[: whole.size // 8 * 8].view(np.uint64)
    return {"figure": ours, "of": min(taken(words.sum)["figure"] for _ in range(5))}


def tracing(name: str) -> Answer:
    """The graph of a network, by shapes."""
    model, example = bitplan.load_model(name)
    return taken(lambda: bitplan.trace(model, example))


def cold(*words: str) -> Answer:
    """A command in a new process, and `import torch` in another."""
    return {"figure": _process("-m", "bitplan", *words), "of": _process("-c", "import torch")}


def _process(*words: str) -> float:
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-P", *words], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def exporting(name: str) -> Answer:
    """A whole file for ONNX Runtime."""
    model, example = bitplan.load_model(name)
    graph = bitplan.trace(model, example, rules=bitplan.Rules(narrow=0))
    quantized = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(quantized, [torch.randn(4, *example.shape[1:])])
    path = Path(FOLDER.name) / "network.onnx"
    return taken(lambda: bitplan.export(quantized.eval(), path, "onnx", example=example, force=True))


# Gains


def estimating(method: str, **options: Any) -> Answer:
    """A method that runs the network for handwritten digits."""
    from bitplan.gains.base import Context

    task, (model, example) = bitplan.load_task("digits"), bitplan.load_model("digits_resnet")
    graph = bitplan.trace(model, example, rules=bitplan.Rules(narrow=0))
    start = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(start, [_first(task.batches("train", 128, seed=0))])
    context = Context(task=task)
    return taken(lambda: bitplan.estimate(method, start.eval(), graph, choices="w2a2,w4a4", context=context, **options))


def _first(batches: Any) -> Tensor:
    found: Tensor = next(iter(batches))[0]
    return found


TASKS: dict[str, Callable[[], Answer]] = {
    "step": step,
    "calibrate": calibrating,
    "eight": eight_budgets,
    "select 1": lambda: selecting(1000, "w2a2,w3a3,w4a4,w8a8", "70%"),
    "select 2": lambda: selecting(1000, "w2a2,w3a3,w4a4,w8a8", "70%", "memory=70%"),
    "select large": lambda: selecting(20_000, "w2a2,w4a4", "70%"),
    "file": lambda: counting(quantized_file, steps="learned"),
    "half": lambda: counting(half_file),
    "trace": lambda: tracing("resnet50"),
    "trace recurrent": lambda: tracing("timm/sequencer2d_s"),
    "cold": lambda: cold("plan", "resnet50", "--gain", "uniform", "--budget", "70%"),
    "onnx": lambda: exporting("resnet44"),
    "hawq": lambda: estimating("hawq", probes=8, samples=64),
    "drift": lambda: estimating("drift", samples=256),
}


def main() -> None:
    """Say which version this is at first."""
    torch.manual_seed(0)
    serve(lambda task: {"source": bitplan.__file__} if task == "source" else TASKS[task]())


if __name__ == "__main__":
    main()
