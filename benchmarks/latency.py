"""Budgets in milliseconds: plans by measured time, exported and timed; how far the file is from its budget.

A network is measured at two choices; budgets lie a quarter and half way from the lowest choice's time to the highest's.
Gains are random, so that any layer may be the one that is raised. A file is timed in rounds with the one at the lowest
choice, and scaled by the time of that one when it was measured. Weights are random.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bitplan
from benchmarks.export import SUBJECTS
from benchmarks.matmulnbits import WIDTH, Stack
from benchmarks.rows import Row
from benchmarks.timing import in_turn
from bitplan.core.latencies import Latency
from bitplan.exporters.capture import batch_inputs
from bitplan.models.zoo import load_model
from bitplan.plugins.runtimes.latency import measure
from bitplan.plugins.runtimes.timed_networks import RUNTIMES, Inputs

SHARES = (0.25, 0.5)
ROUNDS = 40
FREE = bitplan.Rules(narrow=0)


@dataclass(frozen=True)
class Case:
    """A network, where it runs, and what there is to choose from."""

    title: str
    model: nn.Module
    example: Any
    on: str
    choices: str
    options: dict[str, Any]


def cases() -> Iterator[Case]:
    """Yield ResNet-18 in both runtimes, then linear layers whose time depends on their bits."""
    torch.manual_seed(0)
    subject = SUBJECTS["resnet18"]
    for on in ("onnxruntime", "openvino"):
        model, _ = load_model(subject.name)
        yield Case(f"{subject.title} in {on}", model, subject.example(), on, "w8a8,w16a16", {})
    title, example = "BERT-base's linear layers, 1 token", torch.randn(1, 1, WIDTH)
    yield Case(title, Stack(), example, "matmulnbits", "w2a16,w4a16,w8a16", {"accuracy_level": 4})


def rows() -> list[Row]:
    """Return the time of every planned file beside its budget."""
    logging.disable(logging.WARNING)
    return [
        Row(f"{case.title}, planned for {budget:.2f} ms", took, budget, "its budget", "ms", 1.05)
        for case in cases()
        for budget, took in budgets(case)
    ]


def budgets(case: Case) -> Iterator[tuple[float, float]]:
    """Yield each budget and the time of the file that was planned for it, in milliseconds."""
    graph = bitplan.trace(case.model, case.example, rules=FREE, name="network")
    found = measure(case.model, case.example, case.on, choices=case.choices, graph=graph, options=case.options)
    whole = {choice: found.whole[choice].taken.ns / 1e6 for choice in found.about.choices}
    with tempfile.TemporaryDirectory() as folder:
        path = bitplan.save(found, Path(folder) / "latency.json")
        costs = bitplan.price(str(path), graph, case.choices)
        low, high = min(whole.values()), max(whole.values())
        for share in SHARES:
            budget = low + share * (high - low)
            gains = bitplan.estimate("random", None, graph, choices=case.choices)
            plan = bitplan.select(graph, gains, [costs], budget=[f"{budget:.6f}ms"])
            yield budget, timed(case, found, graph, plan, Path(folder))


def timed(case: Case, found: Latency, graph: bitplan.Graph, plan: bitplan.Plan, folder: Path) -> float:
    """Milliseconds of a plan's file, beside that of the lowest choice in the same rounds."""
    runtime, contestants = RUNTIMES[case.on], {}
    lowest = min(found.whole, key=lambda choice: found.whole[choice].taken.ns)
    for name, each in {"lowest": bitplan.Plan.uniform(graph, lowest), "plan": plan}.items():
        path = folder / f"{name}.onnx"
        if name == "plan" or not path.exists():
            model = bitplan.quantize(case.model, each, integer=found.about.integer).eval()
            bitplan.calibrate_(model, [case.example])
            runtime.prepare(model, case.example, path, case.options)
        contestants[name] = runtime.open(None, path, Inputs(*batch_inputs(case.example, 1)), 1, graph).run
    seconds = in_turn(contestants, ROUNDS, clock=time.process_time)
    return seconds["plan"] / seconds["lowest"] * found.whole[lowest].taken.ns / 1e6
