"""HAWQ-v3 as the paper re-implements it, HAWQ-v2 and HAWQ: what a layer gains by the curvature of the loss."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from bitplan.core.codes import code_range
from bitplan.core.errors import InputError
from bitplan.core.method_facts import About
from bitplan.core.precision import LEFT_ALONE_BITS, Precision
from bitplan.core.records import Graph
from bitplan.gains.base import Context, Gain, LayerGains
from bitplan.gains.curvature import Data, estimate_eigenvalues, estimate_traces, open_curvature
from bitplan.quant.lsq import codes
from bitplan.tasks.base import Task

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _ByTrace(Gain):
    """Average trace of the Hessian × a distance that the weights move, for every choice.

    The network is the one given. Of a quantized one, as in the paper (its 4-bit start), the loss is that of the
    quantized network, differentiated by its weights straight through the rounding, which LSQ's function allows twice;
    of a float one, that of the float network. Estimates below 0 count as 0 and are said; their errors stay. `samples`
    are rounded up to whole batches.
    """

    probes: int = 64
    min_probes: int = 20
    tolerance: float = 0.05
    samples: int = 256
    batch_size: int = 64

    def __post_init__(self) -> None:
        _check_data(self.samples, self.batch_size)
        if self.probes < 2 or self.min_probes < 2:
            raise InputError(
                f"HAWQ needs at least 2 probes for a trace with its standard error, got probes={self.probes} and "
                f"min_probes={self.min_probes}; 20 or more rank layers well"
            )
        if not self.tolerance >= 0:
            raise InputError(f"HAWQ's tolerance is a share of the trace, at least 0, not {self.tolerance}")

    @abstractmethod
    def _distances(self, weight: Tensor, choices: Sequence[Precision]) -> list[float]:
        """What the trace is multiplied by at each choice, 0 at the lowest."""

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """The gains, from a few hundred training samples; needs a task, changes nothing."""
        task, layers = _checked(model, graph, context)
        data = Data.draw(task, self.samples, self.batch_size, context.seed)
        with open_curvature(model, task, data, layers) as curve:
            found = estimate_traces(
                curve,
                probes=self.probes,
                least=min(self.min_probes, self.probes),
                tolerance=self.tolerance,
                seed=context.seed,
                context=context,
            )
            with torch.no_grad():
                moved = {name: self._distances(weight, choices) for name, weight in curve.weights.items()}
            sizes = {name: weight.numel() for name, weight in curve.weights.items()}
        clipped = _say_negative(found.values, "trace", found.probes)
        return LayerGains(
            values={name: _row(max(0.0, found.values.get(name, 0.0)), name, moved, sizes, choices) for name in layers},
            errors={name: _row(found.errors.get(name, 0.0), name, moved, sizes, choices) for name in layers},
            counts={"samples": data.samples, "probes": found.probes, "clipped": clipped},
            work=found.seconds,
        )


@final
@dataclass(frozen=True)
class Hawq(_ByTrace):
    """HAWQ-v3 as in the paper: average Hessian trace × ‖Q_c(W) − Q_c0(W)‖², c0 the lowest."""

    about: ClassVar[About] = About(True, True, passes="N·(3 + 4·probes)", source="HAWQ-V3, Yao et al. 2021")

    def _distances(self, weight: Tensor, choices: Sequence[Precision]) -> list[float]:
        lowest = quantize_absmax(weight, choices[0].weight_bits)
        return [_squared(quantize_absmax(weight, choice.weight_bits) - lowest) for choice in choices]


@final
@dataclass(frozen=True)
class HawqV2(_ByTrace):
    """HAWQ-v2: how much less of average Hessian trace × ‖Q_c(W) − W‖² there is than at the lowest choice."""

    about: ClassVar[About] = About(True, True, passes="N·(3 + 4·probes)", source="Dong et al. 2020")

    def _distances(self, weight: Tensor, choices: Sequence[Precision]) -> list[float]:
        errors = [_squared(quantize_absmax(weight, choice.weight_bits) - weight) for choice in choices]
        return [errors[0] - error for error in errors]


@final
@dataclass(frozen=True)
class HawqV1(Gain):
    """HAWQ: the largest Hessian eigenvalue of a layer over its number of weights, per choice above the lowest.

    Every layer takes Hessian products of its own, so this costs as many times more than the traces as there are layers.
    The network is taken as by HAWQ-v3; an eigenvalue below 0 counts as 0.
    """

    about: ClassVar[About] = About(True, True, passes="N·(3 + 4·iterations·G) at most", source="Dong et al. 2019")

    iterations: int = 30
    tolerance: float = 0.01
    samples: int = 256
    batch_size: int = 64

    def __post_init__(self) -> None:
        _check_data(self.samples, self.batch_size)
        if self.iterations < 1 or not self.tolerance >= 0:
            raise InputError(
                "HAWQ's power iteration needs at least one iteration and a tolerance of at least 0, got "
                f"iterations={self.iterations} and tolerance={self.tolerance}"
            )

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """The gains, from a few hundred training samples; needs a task, changes nothing."""
        task, layers = _checked(model, graph, context)
        data = Data.draw(task, self.samples, self.batch_size, context.seed)
        with open_curvature(model, task, data, layers) as curve:
            found, seconds = estimate_eigenvalues(
                curve,
                iterations=self.iterations,
                tolerance=self.tolerance,
                seed=context.seed,
                context=context,
            )
            sizes = {name: weight.numel() for name, weight in curve.weights.items()}
        each = {name: max(0.0, value) / sizes[name] for name, value in found.items()}
        return LayerGains(
            values={name: tuple(each.get(name, 0.0) * step for step in range(len(choices))) for name in layers},
            counts={"samples": data.samples, "clipped": _say_negative(found, "largest eigenvalue", self.iterations)},
            work=seconds,
        )


def quantize_absmax(weight: Tensor, bits: int) -> Tensor:
    """Q_b(W) with the step M/2^(b−1), M = max|W|; 16 bits leave the weights alone."""
    largest = weight.abs().amax() if weight.numel() else weight.new_zeros(())
    if bits >= LEFT_ALONE_BITS or largest == 0:
        return weight
    low, high = code_range(bits, signed=True)
    step = largest.float() / 2 ** (bits - 1)
    return codes(weight, step, low, high) * step


def _row(
    average: float, name: str, moved: dict[str, list[float]], sizes: dict[str, int], choices: Sequence[Precision]
) -> tuple[float, ...]:
    """What a whole trace comes to at each choice; nothing for a layer without weights."""
    return tuple(average / max(1, sizes.get(name, 0)) * distance for distance in moved.get(name, [0.0] * len(choices)))


def _squared(difference: Tensor) -> float:
    return float(difference.double().square().sum())


def _check_data(samples: int, batch_size: int) -> None:
    if samples < 1 or batch_size < 1:
        raise InputError(f"HAWQ needs at least one sample and a batch_size of at least 1, got {samples}, {batch_size}")


def _checked(model: Any, graph: Graph, context: Context) -> tuple[Task, list[str]]:
    """The task and the names of the selectable layers, where there is something to differentiate."""
    if not isinstance(model, nn.Module):
        shown = "only its graph" if model is None else f"a file ({getattr(model, 'path', model)})"
        raise InputError(
            f"HAWQ differentiates the loss of the network itself, got {shown}: load_checkpoint(path, model)"
        )
    if context.task is None:
        raise InputError(
            "HAWQ looks at the loss of a task, and none was given: --task, or --data package.module:loader (in Python: "
            "Context(task=…), or batches=… with loss=…)"
        )
    layers = [layer for group in graph.selectable for layer in group.layers]
    if not any(layer.weights for layer in layers):
        raise InputError("no selectable layer has weights, so there is no Hessian by them: free other layers")
    return context.task, [layer.name for layer in layers]


def _say_negative(found: Mapping[str, float], what: str, after: int) -> int:
    negative = sorted(name for name, value in found.items() if value < 0)
    if negative:
        shown = ", ".join(negative[:3]) + (", …" if len(negative) > 3 else "")
        _log.warning(
            "the Hessian's %s is below 0 after %d rounds for %d of %d layers, counted as 0: %s; the network is not at "
            "a minimum there, or more probes are needed",
            what, after, len(negative), len(found), shown,
        )  # fmt: skip
    return len(negative)
