"""Hessian traces of every layer, with standard errors, against PyHessian's single one of the whole network.

Both take the same samples in one batch and the same number of probes, interleaved.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from pyhessian import hessian as pyhessian
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bitplan
from benchmarks.rows import Row
from benchmarks.timing import in_turn
from bitplan.gains.curvature import Data, Traces, estimate_traces, open_curvature
from bitplan.models.zoo import load_model

PROBES = 8
SAMPLES = 64
NEVER = float("-inf")  # PyHessian's tolerance: no early stop, as ours has none here
TASK = bitplan.load_task("digits")


def theirs(model: nn.Module, batch: Any) -> float:
    """Return PyHessian's trace of all weights that require a gradient."""
    with sdpa_kernel(SDPBackend.MATH):  # fused attention stops it
        whole = pyhessian(model, nn.functional.cross_entropy, data=batch, cuda=False)
        return float(sum(whole.trace(PROBES, tol=NEVER)) / PROBES)


def ours(model: nn.Module, layers: list[str], data: Data) -> Traces:
    """Return all traces with their errors, as HAWQ's gains take them."""
    with open_curvature(model, TASK, data, layers) as curve:
        return estimate_traces(curve, probes=PROBES, least=PROBES, tolerance=0.0, seed=0)


def rows() -> list[Row]:
    """Return the seconds for a convolutional network and for a transformer."""
    torch.set_num_threads(1)
    return [
        Row(f"Hessian traces of {layers} layers, {name}, {PROBES} probes", mine, peer, "PyHessian's one", target=1.2)
        for name, layers, mine, peer in measured()
    ]


def measured() -> Iterator[tuple[str, int, float, float]]:
    """Yield each network, its number of layers, our seconds and theirs."""
    for name in ("digits_resnet", "digits_transformer"):
        model, example = load_model(name)
        model.eval()
        graph = bitplan.trace(model, example, rules=bitplan.Rules(narrow=0))
        chosen = {layer.name for group in graph.selectable for layer in group.layers}
        layers = [n.removesuffix(".weight") for n, _ in model.named_parameters() if n.removesuffix(".weight") in chosen]
        data = Data.draw(TASK, SAMPLES, SAMPLES, 0)
        copy = deepcopy(model)
        for name_, parameter in copy.named_parameters():
            parameter.requires_grad_(name_.removesuffix(".weight") in layers)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyHessian keeps its graph by backward(create_graph=True)
            seconds = in_turn(
                {
                    "ours": lambda model=model, layers=layers, data=data: ours(model, layers, data),
                    "theirs": lambda model=copy, data=data: theirs(model, data.batches[0]),
                },
                clock=time.process_time,
            )
        yield name, len(layers), seconds["ours"], seconds["theirs"]
