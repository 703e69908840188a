"""Hessian traces of every layer, with standard errors, against PyHessian's single one of the whole network.

python -m benchmarks.hawq        Both take the same samples in one batch and the same number of probes, interleaved.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from pyhessian import hessian as pyhessian
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bitplan
from benchmarks.rows import Row
from benchmarks.timing import in_turn
from bitplan.gains.hawq import Data, Traces, curvature, probe, traces
from bitplan.models.zoo import load_model

PROBES = 8
SAMPLES = 64
NEVER = float("-inf")  # PyHessian's tolerance: no early stop, as ours has none here
TASK = bitplan.load_task("digits")


@contextmanager
def only(model: nn.Module, layers: list[str]) -> Iterator[None]:
    """Only the weights of these layers to be differentiated by: PyHessian takes whatever requires a gradient."""
    wanted = {f"{layer}.weight" for layer in layers}
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in wanted)
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before[name])
            parameter.grad = None


def theirs(model: nn.Module, layers: list[str], batch: Any, seed: int | None = None) -> float:
    """PyHessian's trace of the whole network; with a seed, by our probes instead of its own."""
    with only(model, layers), sdpa_kernel(SDPBackend.MATH):  # fused attention stops it
        whole = pyhessian(model, nn.functional.cross_entropy, data=batch, cuda=False)
        signs = torch.randint_like if seed is None else _our_signs(whole.params, seed)
        with mock.patch("torch.randint_like", signs):
            return float(sum(whole.trace(PROBES, tol=NEVER)) / PROBES)


def ours(model: nn.Module, layers: list[str], data: Data, seed: int = 0) -> Traces:
    """All traces with their errors, as HAWQ's gains take them."""
    with curvature(model, TASK, data, layers) as curve:
        return traces(curve, probes=PROBES, least=PROBES, tolerance=0.0, seed=seed)


def rows() -> list[Row]:
    """A convolutional network and a transformer: all traces with errors against one number without."""
    torch.set_num_threads(1)
    return [
        Row(
            f"Hessian traces of {len(layers)} layers, {name}, {PROBES} probes",
            mine,
            peer,
            "PyHessian's one",
            target=1.2,
        )
        for name, layers, mine, peer, _ in measured()
    ]


def main() -> None:
    """Print seconds and their ratio, and how far both are apart for the same probes."""
    torch.set_num_threads(1)
    for name, layers, mine, peer, apart in measured():
        print(f"{name:20} {len(layers):3} layers: {mine:.2f} ÷ {peer:.2f} s = {mine / peer:.2f}, differ by {apart:.1e}")


def measured() -> Iterator[tuple[str, list[str], float, float, float]]:
    """Network, layers, our seconds and theirs, and by how much the totals differ for the same probes."""
    for name in ("digits_resnet", "digits_transformer"):
        model, example = load_model(name)
        model.eval()
        graph = bitplan.trace(model, example, rules=bitplan.Rules(narrow=0))
        chosen = {layer.name for group in graph.selectable for layer in group.layers}
        layers = [n.removesuffix(".weight") for n, _ in model.named_parameters() if n.removesuffix(".weight") in chosen]
        data = Data.draw(TASK, SAMPLES, SAMPLES, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyHessian keeps its graph by backward(create_graph=True)
            total = sum(ours(model, layers, data).values.values())
            same = theirs(model, layers, data.batches[0], seed=0)
            seconds = in_turn(
                {
                    "ours": lambda model=model, layers=layers, data=data: ours(model, layers, data),
                    "theirs": lambda model=model, layers=layers, data=data: theirs(model, layers, data.batches[0]),
                },
                clock=time.process_time,
            )
        yield name, layers, seconds["ours"], seconds["theirs"], abs(total / same - 1)


def _our_signs(weights: list[Tensor], seed: int) -> Any:
    """What PyHessian draws, 0 or 1 weight by weight, from our probes."""

    def draws() -> Iterator[Tensor]:
        for number in range(PROBES):
            yield from ((signs + 1) / 2 for signs in probe(weights, seed, number))

    source = draws()
    return lambda *_, **__: next(source)


if __name__ == "__main__":
    main()
