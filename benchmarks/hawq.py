"""Hessian traces of every layer, with standard errors, against PyHessian's single one of the whole network.

python -m benchmarks.hawq        Both take the same samples in one batch and the same number of probes, interleaved.
"""

from __future__ import annotations

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
from benchmarks.timing import in_turn
from bitplan.gains.hessian import Data, curvature
from bitplan.gains.spectrum import Traces, probe, traces
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


def main() -> None:
    """Print the agreement for the same probes, then seconds and their ratio."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # PyHessian keeps its graph by backward(create_graph=True)
    print(
        f"{'model':20} {'layers':>6} {'our total':>12} {'PyHessian':>12} {'differ by':>10} {'ours':>7} {'theirs':>7}  "
        "ours ÷ theirs"
    )
    for name in ("digits_resnet", "digits_transformer"):
        model, example = load_model(name)
        model.eval()
        graph = bitplan.trace(model, example, rules=bitplan.Rules(narrow=0))
        layers = [layer.name for group in graph.selectable for layer in group.layers]
        ordered = [
            n.removesuffix(".weight") for n, _ in model.named_parameters() if n.removesuffix(".weight") in layers
        ]
        data = Data.draw(TASK, SAMPLES, SAMPLES, 0)
        total = sum(ours(model, ordered, data).values.values())
        same = theirs(model, layers, data.batches[0], seed=0)
        seconds = in_turn(
            {
                "ours": lambda model=model, ordered=ordered, data=data: ours(model, ordered, data),
                "theirs": lambda model=model, layers=layers, data=data: theirs(model, layers, data.batches[0]),
            }
        )
        print(
            f"{name:20} {len(layers):6} {total:12.6g} {same:12.6g} {abs(total / same - 1):10.1e} "
            f"{seconds['ours']:7.2f} {seconds['theirs']:7.2f}  {seconds['ours'] / seconds['theirs']:.2f}"
        )


def _our_signs(weights: list[Tensor], seed: int) -> Any:
    """What PyHessian draws, 0 or 1 weight by weight, from our probes."""

    def draws() -> Iterator[Tensor]:
        for number in range(PROBES):
            yield from ((signs + 1) / 2 for signs in probe(weights, seed, number))

    source = draws()
    return lambda *_, **__: next(source)


if __name__ == "__main__":
    main()
