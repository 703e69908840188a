"""Gains that run a network, in CPU seconds: ResNet-50 with random weights, 8 images of 64 × 64, w2a2 or w4a4."""

from __future__ import annotations

import time

import torch

import bitplan
from benchmarks.rows import Row
from bitplan.models.zoo import load_model

TARGETS = {"drift": 8.0, "drop": 8.0, "fisher": 2.0}  # CPU seconds


def rows() -> list[Row]:
    """Return the CPU seconds of each method."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, _ = load_model("resnet50")
    images, labels = torch.randn(8, 3, 64, 64), torch.arange(8)
    graph = bitplan.trace(model, images[:1])
    start = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(start, [images])
    made = []
    for name, target in TARGETS.items():
        begin = time.process_time()
        bitplan.estimate(
            name, start, graph, choices="w2a2,w4a4", batches=[(images, labels)], loss=torch.nn.functional.cross_entropy
        )
        seconds = time.process_time() - begin
        made.append(Row(f"{name}, {len(graph.selectable)} groups of ResNet-50", seconds, unit="CPU s", target=target))
    return made
