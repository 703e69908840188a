"""verify: run an exported file beside its model and compare codes, outputs, scores and speed."""

from __future__ import annotations

import copy
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bitplan.adapters.torch import inference, multiplies_bytes
from bitplan.core.errors import InputError
from bitplan.core.verdicts import Speed, Verdict
from bitplan.exporters.base import Source, TieFinder, exporter_of
from bitplan.exporters.capture import batch_inputs
from bitplan.exporters.divergence import list_tensors
from bitplan.exporters.onnx_graph import Draft, Node
from bitplan.exporters.onnx_running import OpenedGraph, name_arrays
from bitplan.forward.batches import LABELS, run_batch
from bitplan.quant.convert import integer_weights, plan_of
from bitplan.quant.quantizers import InputQuantizer
from bitplan.quant.sites import unwrap
from bitplan.tasks.base import Task, WithData

_LOOKED_AT = 100  # samples whose ties are searched for
_CONTROLLED = 1000  # samples on which the model is compared with itself


def verify(
    path: str | Path,
    model: nn.Module,
    data: Task | Iterable[Any],
    *,
    limit: int | None = None,
    batch_size: int = 100,
    tolerance: float = 1e-4,
    speed: bool = False,
) -> Verdict:
    """Compare an exported file with its model on a task's test split, or on batches of inputs.

    `tolerance` is relative to the largest output of a batch. Batches are those that `calibrate_` takes; labels are
    ignored. With a task and no `limit` on the samples both scores are measured too. If all differences begin at ties
    but too few predictions are equal, the model is also compared with itself in double precision.
    `speed` also measures size and time against the float network, with one sample and one thread.
    """
    source = Path(path)
    exporter = exporter_of(source)
    stored, codes = exporter.read(source).codes, integer_weights(model)
    equal = stored.keys() == codes.keys() and all(torch.equal(stored[name], codes[name].cpu()) for name in codes)
    execution = exporter.opened(source, unwrap(model))
    task: Any = data if isinstance(data, WithData) else None
    given = data if isinstance(data, WithData) else list(data)
    with _reference(model, float_inputs=execution.float_inputs):
        both = _Both(model, execution.network, tolerance, execution.ties, execution.axis)
        scores: dict[str, Any] = {}
        if task is not None and limit is None:
            scores = {"reference": task.score(both), "score": task.score(execution.network), "metric": task.metric}
        else:
            _run(both, given, limit, batch_size)
        if not both.samples:
            raise InputError("there was no sample to compare: give at least one batch")
        verdict = Verdict(
            file=str(path),
            codes_equal=equal,
            layers=len(codes),
            tolerance=tolerance,
            rounds=execution.rounds,
            **both.counts(),
            **scores,
        )
        if equal and not verdict.unexplained and not verdict.enough and not execution.rounds:
            control = _control(model, given, min(_CONTROLLED, both.samples), batch_size)
            verdict = verdict.model_copy(update=control)
    return verdict.model_copy(update={"speed": measure_speed(path, model, both.example)}) if speed else verdict


def _control(model: nn.Module, data: Any, limit: int, batch_size: int) -> dict[str, Any]:
    """Return how often a model predicts the same in double precision."""
    both = _Both(model, InDoublePrecision(model), math.inf, None)
    _run(both, data, limit, batch_size)
    return {"control": both.predictions_equal / both.predictions, "control_samples": both.samples}


class InDoublePrecision(nn.Module):
    """A copy of a model that computes in double precision and returns single."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).double().eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the copy: float inputs become doubles, and outputs floats again."""
        args, kwargs = _cast((args, kwargs), torch.float32, torch.float64)
        return _cast(self.model(*args, **kwargs), torch.float64, torch.float32)


def _cast(tree: Any, before: torch.dtype, after: torch.dtype) -> Any:
    return tree_map(lambda leaf: leaf.to(after) if isinstance(leaf, Tensor) and leaf.dtype == before else leaf, tree)


class _Both(nn.Module):
    """Runs the model and the file on the same inputs, counts differences, and returns the model's outputs."""

    def __init__(
        self, model: nn.Module, executed: nn.Module, tolerance: float, ties: TieFinder | None, axis: int = 1
    ) -> None:
        super().__init__()
        self.axis = axis
        self.model = model
        self.executed = executed
        self.tolerance = tolerance
        self.tie_finder = ties
        self.samples = self.close = self.ties = self.unexplained = self.predictions = self.predictions_equal = 0
        self.largest = 0.0
        self.example: Any = None  # the arguments of the first batch

        @wraps(model.forward)  # tasks read a batch by the arguments of the model
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._compare(args, {name: value for name, value in kwargs.items() if name != LABELS})

        vars(self)["forward"] = run

    def counts(self) -> dict[str, Any]:
        """Return the counts for a verdict."""
        names = ("samples", "close", "ties", "unexplained", "predictions", "predictions_equal", "largest")
        return {name: getattr(self, name) for name in names}

    def _compare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compare one batch, without labels: with them a model may return its loss, which no file has."""
        self.example = self.example or kwargs or args
        outputs = self.model(*args, **kwargs)
        expected, actual = list_tensors(outputs), list_tensors(self.executed(*args, **kwargs))
        shapes, wanted = ([tuple(value.shape) for value in values] for values in (actual, expected))
        if shapes != wanted:
            raise InputError(f"the file gives outputs of shapes {shapes}, the model {wanted}: it is not this model's")
        off = torch.zeros(len(expected[0]), dtype=torch.bool)
        for own, other in zip(expected, actual, strict=True):
            own = own.detach().cpu()
            error = (own - other).abs().flatten(1).amax(1) if own.dim() > 1 else (own - other).abs()
            scale = max(1e-6, float(own[own.isfinite()].abs().max())) if own.numel() else 1.0
            off |= ~(error <= self.tolerance * scale)
            self.largest = max(self.largest, float(error.max()) / scale)
            if own.dim() > 1:
                same = own.argmax(self.axis) == other.argmax(self.axis)
                self.predictions += same.numel()
                self.predictions_equal += int(same.sum())
        self.samples += len(off)
        self.close += int((~off).sum())
        self._find_ties(off, args, kwargs)
        return outputs

    def _find_ties(self, off: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count the samples that are not close by whether their difference begins at a tie."""
        for place in off.nonzero().flatten().tolist():
            if self.tie_finder is None:
                self.unexplained += 1
            elif self.ties + self.unexplained < _LOOKED_AT:
                alone = tuple(_row(value, place) for value in args), {k: _row(v, place) for k, v in kwargs.items()}
                at_tie = self.tie_finder.begins_at_tie(*alone, tolerance=self.tolerance)
                self.ties += at_tie
                self.unexplained += not at_tie


def _row(value: Any, place: int) -> Any:
    return value[place : place + 1] if isinstance(value, Tensor) and value.dim() else value


@contextmanager
def _reference(model: nn.Module, *, float_inputs: bool) -> Iterator[None]:
    """Put the model into inference mode, with its input quantizers off if the file keeps activations float."""
    disabled = [m for m in model.modules() if isinstance(m, InputQuantizer) and m.enabled] if float_inputs else []
    for quantizer in disabled:
        quantizer.enabled = False
    try:
        with inference(model), torch.no_grad():
            yield
    finally:
        for quantizer in disabled:
            quantizer.enabled = True


def _run(both: _Both, data: Any, limit: int | None, batch_size: int) -> None:
    task = data if isinstance(data, WithData) else None
    for batch in data if task is None else task.batches("test", batch_size):
        if limit is not None and both.samples >= limit:
            break
        if task is not None:
            task.forward(both, batch)
        else:
            run_batch(both, batch)


_log = logging.getLogger(__name__)
_OPSET = 21
_ROUNDS = 11
_LEAST = 0.02  # seconds of each turn


def measure_speed(
    path: str | Path, model: nn.Module, example: Any, *, batch: int = 1, threads: int = 1, rounds: int = _ROUNDS
) -> Speed:
    """Time an exported file and the float network interleaved, and return their bytes and times.

    The float network is the model without its quantizers in the same runtime, which folds its batch norms.
    """
    source = Path(path)
    runtime = exporter_of(source).opened(source, unwrap(model)).runtime
    if runtime is None:
        raise InputError(f"{path} has no float form in a runtime to be compared with: speed is for onnx, openvino …")
    if not multiplies_bytes():
        _log.warning("this CPU has no instructions for products of bytes (VNNI, AMX): integers will not be fast here")
    args, kwargs = batch_inputs(example, batch)
    with tempfile.TemporaryDirectory() as folder, inference(model):
        plain = Path(folder) / "float.onnx"
        write_float(model, example, plain)
        opened = {"file": runtime(source, threads=threads), "float": runtime(plain, threads=threads)}
        runs = {name: _timed_run(graph, args, kwargs) for name, graph in opened.items()}
        taken = time_interleaved(runs, rounds, least=_LEAST, threads=threads).seconds
        sizes = source.stat().st_size, plain.stat().st_size
    return Speed(
        runtime=runtime.name,
        batch=batch,
        threads=threads,
        bytes=sizes[0],
        float_bytes=sizes[1],
        seconds=statistics.median(taken["file"]),
        float_seconds=statistics.median(taken["float"]),
    )


def write_float(model: nn.Module, example: Any, path: Path) -> None:
    """Write the network without its quantizers as ONNX: the values of its codes as weights, float activations."""
    source = Source(plan_of(model), None, unwrap(model), example)
    draft = Draft(source, _OPSET)
    draft.leave_inputs_float_()

    def rewrite(node: Node, about: dict[str, Any]) -> list[Node]:
        weight = draft.weights[about["layer"]]
        if weight.layer not in draft.written:
            draft.written[weight.layer] = draft.floats(f"{weight.layer}.values", weight.codes * weight.steps)
        return [draft.node("Identity", (draft.written[weight.layer],), node.output[0], node.name)]

    draft.replace("Weight", rewrite)
    draft.save(source, path, exporter="float")


def _timed_run(graph: OpenedGraph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    arrays = name_arrays(graph, args, kwargs)
    return lambda: graph.run(arrays)


class Timings(NamedTuple):
    """The seconds per run in every round, and the runs per turn, of each timed function."""

    seconds: dict[str, list[float]]
    runs: dict[str, int]


def time_interleaved(
    contestants: Mapping[str, Callable[[], Any]], rounds: int, *, least: float, threads: int
) -> Timings:
    """Time functions interleaved, round after round, so that other load falls on all alike.

    A turn takes at least `least` seconds: shorter ones measure the clock. With one thread CPU time is measured, which
    other programs change less, else wall time.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    runs: dict[str, int] = {}
    for name, run in contestants.items():
        run()  # the first takes longer
        start = time.perf_counter()
        run()
        runs[name] = max(1, round(least / max(1e-6, time.perf_counter() - start)))
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            start = clock()
            for _ in range(runs[name]):
                run()
            seconds[name].append((clock() - start) / runs[name])
    return Timings(seconds, runs)
