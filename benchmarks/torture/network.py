"""A study whose trials take milliseconds, and a diary of the trainings that any process begins.

Whichever process loads the network writes down the trainings that it begins, in the diary of the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from bitplan.core.records import Graph
from bitplan.quant import proof
from bitplan.quant.proof import take_proof_off_
from bitplan.store import lease
from bitplan.study import context, scheduling
from bitplan.study.context import RunContext
from bitplan.tune import resume

PATIENCE = 1.5  # seconds, where people have sixty: holders that are frozen are given up sooner

STUDY = """
name = "torture"
task = "digits"
model = "benchmarks.torture.network:network"
choices = ["w2a2", "w4a4"]
budgets = ["85%", "70%"]
seeds = [0, 1]
keep_networks = true
[rules]
narrow = 0
[recipe]
steps = 3
batch_size = 16
lr = 0.05
[start]
[start.float_recipe]
steps = 4
lr = 0.1
[start.recipe]
steps = 3
[[methods]]
name = "eagl"
[[methods]]
name = "drop"
options = { samples = 32 }
[[methods]]
name = "last_to_first"
"""


def network() -> nn.Module:
    """Five small linear layers, three of them to choose."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, 12), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(12, 12), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(12, 10))


def diary_of(run: Path) -> Path:
    """Return the file of the trainings that began, a line each."""
    return run.parent / f"{run.name}.diary"


def _noted(finetune: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*given: Any, folder: Any, **options: Any) -> Any:
        diary = diary_of(Path(folder).parents[1])
        if diary.is_file():
            number = os.open(diary, os.O_WRONLY | os.O_APPEND)
            os.write(number, f"{Path(folder).name}\n".encode())
            os.close(number)
        return finetune(*given, folder=folder, **options)

    return noted


def _traced_once(trace: Callable[[RunContext], Graph]) -> Callable[[RunContext], Graph]:
    """Tracing gives the same every time and takes as long as five trials: forked drivers find it done."""
    known: list[Graph] = []

    def traced(setting: RunContext) -> Graph:
        if not known:
            known.append(trace(setting))
        return known[0]

    return traced


proof._prove_once = lambda root, *_: take_proof_off_(root)  # half of the time, and not what is tortured here
RunContext.trace = _traced_once(RunContext.trace)  # type: ignore[method-assign]
for _module in (context, scheduling):
    _module.finetune_ = _noted(_module.finetune_)  # type: ignore[attr-defined]
resume.SAVE_SECONDS, resume.SAVE_SHARE = 0.0, 1e9  # a checkpoint after every step, so that kills meet them
lease.PATIENCE = PATIENCE
