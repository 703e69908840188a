"""Tracing by shapes against what it replaces: a forward pass, and torch.export; CPU time.

python -m benchmarks.trace
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import bitplan
from benchmarks.rows import Row, table
from benchmarks.timing import in_turn
from bitplan.models.zoo import load_model

NETWORKS = ("resnet50", "vit_b_16", "densenet121")
RECURRENT = "timm/sequencer2d_s"  # the slowest of timm's to trace: its recurrent layers are opened step by step
SECONDS = 3.1  # a tenth of what it took before


def rows() -> list[Row]:
    """Each network against one forward pass and against torch.export; a recurrent one against its forward pass."""
    warnings.simplefilter("ignore")
    made = []
    for name in NETWORKS:
        trace, forward, export = measured(name, exported=True).values()
        made.append(Row(f"trace {name}", trace, forward, "a forward pass"))
        made.append(Row(f"trace {name}", trace, export, "torch.export", target=0.5))
    trace, forward = measured(RECURRENT, exported=False).values()
    made.append(Row(f"trace {RECURRENT}", trace, forward, "a forward pass"))
    return [*made, Row(f"trace {RECURRENT}", trace, unit="CPU s", target=SECONDS)]


def measured(name: str, *, exported: bool) -> dict[str, float]:
    """Seconds of each way, in turn."""
    model, example = load_model(name)
    model.eval()
    data = torch.zeros(example.shape)
    ways: dict[str, Callable[[], Any]] = {
        "trace": lambda: bitplan.trace(model, example),
        "forward": lambda: model(data),
    }
    if exported:
        ways["export"] = lambda: torch.export.export(model, (data,))
    with torch.no_grad():
        return in_turn(ways, rounds=3, clock=time.process_time)


def main() -> None:
    """Print the table."""
    print(table(rows()))


if __name__ == "__main__":
    main()
