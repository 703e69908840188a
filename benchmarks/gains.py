"""Gains that run a network, by CPU time: lowered in place, against lowered copies.

python -m benchmarks.gains       ResNet-50 with random weights, 8 images of 64×64, choices w2a2 and w4a4, one thread.

Copies are what each lowering took before. Other libraries choose precisions for the same network
and images in 12.1 CPU seconds (ModelOpt 0.47, gradients), 22 (AIMET 2.42) and 36.7 (MCT 2.6.1), measured on this kind
of machine in environments of their own, since their pins clash with ours.
"""

from __future__ import annotations

import time
from functools import partial
from unittest import mock

import torch

import bitplan
from benchmarks.rows import Row
from bitplan.models.zoo import load_model

IMAGES, SIDE = 8, 64
CHOICES = "w2a2,w4a4"
TARGETS = {"drift": 8.0, "drop": 8.0, "fisher": 2.0}  # CPU seconds


def rows() -> list[Row]:
    """Each method as it is; drift and drop also by copies."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, _ = load_model("resnet50")
    images, labels = torch.randn(IMAGES, 3, SIDE, SIDE), torch.arange(IMAGES)
    graph = bitplan.trace(model, images[:1])
    start = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(start, [images])
    loss = torch.nn.functional.cross_entropy
    found = []
    for name, target in TARGETS.items():
        work = partial(
            bitplan.estimate, name, start, graph, choices=CHOICES, batches=[(images, labels)], loss=loss,
        )  # fmt: skip
        what = f"{name}, {len(graph.selectable)} groups of ResNet-50"
        found.append(Row(what, cpu_seconds(work), unit="CPU s", target=target))
        if name != "fisher":
            with mock.patch("bitplan.gains.rerun.can_switch", return_value=False):
                found.append(Row(f"{what}, beside copies", found[-1].ours, cpu_seconds(work), "copies", unit="CPU s"))
    return found


def cpu_seconds(work: partial[object]) -> float:
    """Of one run."""
    before = time.process_time()
    work()
    return time.process_time() - before


def main() -> None:
    """Print the rows."""
    for row in rows():
        print(" · ".join(row.cells()))


if __name__ == "__main__":
    main()
