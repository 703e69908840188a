"""Budgets in milliseconds: plans by measured time, exported and timed; how far the file is from its budget.

    python -m benchmarks.latency [resnet50 resnet18 …] [--on onnxruntime openvino]

A network is measured at two choices; budgets lie a quarter and half way from the lowest choice's time to the highest's.
Gains are drawn, three times, so that any layer may be the one that is raised. `of budget` is what the exported file
takes, timed in turn with the one at the lowest choice and scaled by what that one took when it was measured. With
`matmulnbits` the same among 2, 4 and 8 bits, at one token, where bits do differ in time. Weights are random.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bitplan
from benchmarks.export import SUBJECTS
from benchmarks.matmulnbits import WIDTH, Stack
from benchmarks.rows import Row
from bitplan.core.latencies import Latency
from bitplan.exporters.capture import inputs_of
from bitplan.gains.base import Context
from bitplan.models.zoo import load_model
from bitplan.plugins.runtimes.latency import measure
from bitplan.plugins.runtimes.timed_networks import RUNTIMES, Inputs

SHARES = (0.25, 0.5)
SEEDS = (0, 1, 2)
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


def cases(names: list[str], runtimes: list[str]) -> Iterator[Case]:
    for name in names:
        subject = SUBJECTS[name]
        model, _ = load_model(subject.name)
        for on in runtimes:
            yield Case(f"{subject.title} in {on}", model, subject.example(), on, "w8a8,w16a16", {})
    torch.manual_seed(0)
    level = {"accuracy_level": 4}
    yield Case(
        "BERT-base's linear layers, 1 token",
        Stack(),
        torch.randn(1, 1, WIDTH),
        "matmulnbits",
        "w2a16,w4a16,w8a16",
        level,
    )


def rows() -> list[Row]:
    """What files of ResNet-18, planned by milliseconds, take of their budgets."""
    logging.disable(logging.WARNING)
    made = []
    for case in cases(["resnet18"], ["onnxruntime", "openvino"]):
        for budget, took, _ in budgets(case, SEEDS[:1]):
            made.append(Row(f"{case.title}, planned for {budget:.2f} ms", took, budget, "its budget", "ms", 1.05))
    return made


def main(words: list[str] | None = None) -> None:
    """Print a table for each case."""
    reader = argparse.ArgumentParser(prog="python -m benchmarks.latency", description=(__doc__ or "").splitlines()[0])
    reader.add_argument("networks", nargs="*", choices=[*SUBJECTS, []], help="resnet50 unless said")
    reader.add_argument("--on", nargs="+", default=["onnxruntime", "openvino"], choices=["onnxruntime", "openvino"])
    told = reader.parse_args([] if words is None else words)
    logging.disable(logging.WARNING)
    for case in cases(told.networks or ["resnet50"], told.on):
        compare(case)


def compare(case: Case) -> None:
    """Measure, plan by milliseconds, export, time."""
    print(f"\n{case.title}")
    print(f"{'budget':>10} {'layers raised':>14} {'took':>9} {'of budget':>10}")
    for budget, took, raised in budgets(case):
        print(f"{budget:7.2f} ms {raised:>14} {took:6.2f} ms {took / budget:9.1%}")


def budgets(case: Case, seeds: Sequence[int] = SEEDS) -> Iterator[tuple[float, float, str]]:
    """Each budget in milliseconds, what the file that was planned for it takes, and how many layers were raised."""
    graph = bitplan.trace(case.model, case.example, rules=FREE, name="network")
    found = measure(case.model, case.example, case.on, choices=case.choices, graph=graph, options=case.options)
    whole = {choice: found.whole[choice].taken.ns / 1e6 for choice in found.about.choices}
    with tempfile.TemporaryDirectory() as folder:
        path = bitplan.save(found, Path(folder) / "latency.json")
        costs = bitplan.price(str(path), graph, case.choices)
        low, high = min(whole.values()), max(whole.values())
        for share in SHARES:
            budget = low + share * (high - low)
            for seed in seeds:
                gains = bitplan.estimate("random", None, graph, choices=case.choices, context=Context(seed=seed))
                plan = bitplan.select(graph, gains, [costs], budget=[f"{budget:.6f}ms"])
                raised = sum(plan.precisions[group.name] != costs.choices[0] for group in graph.selectable)
                took = timed(case, found, graph, plan, Path(folder))
                yield budget, took, f"{raised} of {len(graph.selectable)}"


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
        contestants[name] = runtime.open(None, path, Inputs(*inputs_of(case.example, 1)), 1, graph).run
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(ROUNDS):
        for name, run in contestants.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    plan_took, lowest_took = (statistics.median(seconds[name]) for name in ("plan", "lowest"))
    return plan_took / lowest_took * found.whole[lowest].taken.ns / 1e6


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
