"""One training step (forward, backward, SGD) of w4a4 networks relative to FP32, next to Brevitas.

All variants of a network take turns in one process, by CPU time of one thread. A ratio is the median over rounds of a
time divided by that of FP32 in the same round. The process keeps what it frees, as bitplan's own do.

Memory is measured in another process, which gives freed memory back at once (`benchmarks/training.py`): the MB by which
its resident memory grows until the forward pass ends (`held`), and at most during a step (`peak`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitplan
from benchmarks.rows import Row
from benchmarks.training import GIVE_BACK, Loss, Trainer
from bitplan.adapters import torchvision
from bitplan.core.malloc_tuning import keep_freed_memory
from bitplan.core.records import Plan
from bitplan.quant.convert import quantize
from bitplan.quant.parameters import parameter_groups

ROUNDS = 9


def resnet18() -> nn.Module:
    """Return torchvision's ResNet-18 with ten classes."""
    return torchvision.build("resnet18", num_classes=10)


def brevitas() -> nn.Module:
    """Return ResNet-18 of Brevitas layers with learned scales per tensor; all inputs but the first are unsigned."""
    import brevitas.nn as qnn
    from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat, Uint8ActPerTensorFloat

    model = resnet18()
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    for place, (name, module) in enumerate(layers):
        bits = 8 if place in (0, len(layers) - 1) else 4
        options = {
            "bias": module.bias is not None,
            "weight_quant": Int8WeightPerTensorFloat,
            "weight_bit_width": bits,
            "weight_scaling_impl_type": "PARAMETER_FROM_STATS",
            "input_quant": Uint8ActPerTensorFloat if place else Int8ActPerTensorFloat,
            "input_bit_width": bits,
        }
        if isinstance(module, nn.Linear):
            new = qnn.QuantLinear(module.in_features, module.out_features, **options)
        else:
            options |= {"stride": module.stride, "padding": module.padding}
            new = qnn.QuantConv2d(module.in_channels, module.out_channels, module.kernel_size, **options)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
    return model


def _trainer(model: nn.Module, loss: Loss) -> Trainer:
    return Trainer(model, parameter_groups(model, lr=1e-3), loss)


def on_images(batch: int, size: int) -> dict[str, Trainer]:
    """Return trainers of ResNet-18 in FP32, by bitplan, and by Brevitas if it is installed."""
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))
    model = resnet18()
    plan = Plan.uniform(bitplan.trace(model, images[:1], rules=bitplan.Rules(narrow=0)), "w4a4")
    models = {"fp32": model, "bitplan": quantize(model, plan)}
    if importlib.util.find_spec("brevitas") is not None:
        models["brevitas"] = brevitas()

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(images), labels)

    return {name: _trainer(model, loss) for name, model in models.items()}


def on_text(batch: int, tokens: int = 128) -> dict[str, Trainer]:
    """Return trainers of MiniLM-L6 answering questions, in the plan that `trace` makes, with its usual dropout."""
    model, example = bitplan.load_model("minilm-l6")
    plan = Plan.uniform(bitplan.trace(model, example), "w4a4")
    ids, places = torch.randint(0, 30_000, (batch, tokens)), torch.randint(0, tokens, (batch,))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def loss(model: nn.Module) -> Tensor:
        out: Tensor = model(**inputs, start_positions=places, end_positions=places).loss
        return out

    networks = {"fp32": model, "bitplan": quantize(model, plan)}
    return {name: _trainer(network.train(), loss) for name, network in networks.items()}


NETWORKS: dict[str, Callable[[], dict[str, Trainer]]] = {
    "ResNet-18 w4a4, 64 images of 32 × 32": lambda: on_images(64, 32),
    "ResNet-18 w4a4, 32 images of 160 × 160": lambda: on_images(32, 160),
    "MiniLM-L6 w4a4, 16 × 128 tokens": lambda: on_text(16),
}
TIMED = ("ResNet-18 w4a4, 64 images of 32 × 32", "MiniLM-L6 w4a4, 16 × 128 tokens")
TARGET = 1.25  # of FP32's time


def memory(title: str) -> dict[str, dict[str, float]]:
    """Return `held` and `peak` of every variant, measured in a process that gives freed memory back."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.qat_step", title]
    environment = os.environ | GIVE_BACK | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    figures: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return figures


def time_rows(title: str) -> list[Row]:
    """Return the time of a step against FP32, and against Brevitas if it is installed."""
    trainers = NETWORKS[title]()
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for round_ in range(ROUNDS + 2):  # the first two warm up
        for name, trainer in trainers.items():
            seconds = trainer.step()
            times[name] += [seconds] if round_ >= 2 else []

    def row(name: str, peer: str, target: float) -> Row:
        ratio = statistics.median(mine / theirs for mine, theirs in zip(times[name], times[peer], strict=True))
        ours, theirs = (1e3 * statistics.median(times[variant]) for variant in (name, peer))
        what = f"{title}, a training step"
        return Row(what, ours, theirs, peer.replace("fp32", "FP32"), "ms", target, times=ratio)

    made = [row("bitplan", "fp32", TARGET)]
    return [*made, row("bitplan", "brevitas", 1.0)] if "brevitas" in times else made


def memory_rows(title: str) -> list[Row]:
    """Return the memory until the forward pass ends and at most during a step, against FP32 and Brevitas."""
    figures, made = memory(title), []
    for field, what in (("held", "held after the forward pass"), ("peak", "the most that a step holds")):
        for peer, against, target in (("fp32", "FP32", 1.10), ("brevitas", "brevitas", 1.00)):
            if peer in figures:
                ours, theirs = figures["bitplan"][field], figures[peer][field]
                made.append(Row(f"{title}, {what}", ours, theirs, against, "MB", target))
    return made


def rows() -> list[Row]:
    """Return times, then memory, of ResNet-18 and MiniLM-L6."""
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = [row for title in TIMED for row in time_rows(title)]
        return times + [row for title in NETWORKS for row in memory_rows(title)]


def main(title: str) -> None:
    """Print the memory of every variant of one network as JSON."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainers = NETWORKS[title]()
    for trainer in (*trainers.values(), *trainers.values()):
        trainer.step()
    print(json.dumps({name: trainer.memory() for name, trainer in trainers.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
