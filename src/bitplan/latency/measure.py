"""measure: how long each layer of a network takes at each choice, on this machine, in a runtime.

Whole networks are exported, one at each choice, and run in turn; a runtime tells how long each of its nodes took, and
each node belongs to a layer. So what a runtime does with neighbouring layers is in the times, which add up to those of
whole networks (docs/decisions/0019).
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from bitplan.core.defaults import CHOICES
from bitplan.core.errors import InputError
from bitplan.core.latencies import Latency, Measuring, Rounds
from bitplan.core.precision import Precision, PrecisionLike, parse_choices
from bitplan.core.progress import Progress
from bitplan.core.records import Graph, Plan
from bitplan.exporters.capture import inputs_of
from bitplan.exporters.turns import in_turn
from bitplan.graph.trace import trace
from bitplan.latency.adding_up import MIXED, latency_of
from bitplan.latency.contestants import Contestant, Inputs
from bitplan.latency.keeping import KeptMeasurement
from bitplan.latency.runtimes import Runtime, runtime_of
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.convert import quantize

_BLOCKS = 5  # each of them is kept when it is done
_ROUNDS = 5  # of each block
_LEAST = 0.1  # seconds of a turn
_LOOKS = 20  # at layers, at most, a round: a turn of a small network has thousands of runs, each told node by node

Announce = Callable[[float], None]


class How(TypedDict, total=False):
    """How a network is run, all with a default.

    `threads` (1) and `batch` (1); `integer` says whether it is made for integers (`quantize(…, integer=True)`), by
    default where the runtime is fast only then; `options` are those of the file's exporter; `announce` is told about
    how many seconds the rest will take, as soon as that is known.
    """

    threads: int
    batch: int
    integer: bool | None
    options: Mapping[str, Any]
    announce: Announce


def measure(
    model: nn.Module,
    example: Any,
    on: str = "onnxruntime",
    *,
    choices: str | Iterable[PrecisionLike] = CHOICES,
    graph: Graph | None = None,
    folder: str | Path | None = None,
    progress: Progress | None = None,
    **how: Unpack[How],
) -> Latency:
    """Time every layer of a network at every choice; `on` is a runtime by name (`latency/runtimes.py`).

    `graph` is that of `trace` with the rules that a plan will follow. With a `folder`, a killed measurement goes on
    where it was. With one thread the processor's time is taken, which other programs change less; else the wall's.
    """
    runtime, found = runtime_of(on), graph or trace(model, example)
    if not found.selectable:
        raise InputError(f"{found.model} has no layer to choose a precision for: free some of the rules")
    wanted = how.get("integer")
    about = Measuring(
        model=found.model,
        graph=found.id,
        on=on,
        runtime=runtime.version,
        machine=_machine(),
        threads=how.get("threads", 1),
        batch=how.get("batch", 1),
        integer=runtime.integer if wanted is None else wanted,
        options=dict(how.get("options", {})),
        choices=parse_choices(choices),
    )
    with _folder(folder, about) as kept:
        stage = _Stage(model, _drawn(example), found, about, runtime, kept, progress or (lambda *_: None))
        return stage.measured(how.get("announce", lambda _: None))


@dataclass(frozen=True)
class _Stage:
    """One measurement: the network, what it is called with, and where the rest stands."""

    model: nn.Module
    example: Any
    graph: Graph
    about: Measuring
    runtime: Runtime
    kept: KeptMeasurement
    progress: Progress

    def measured(self, announce: Announce) -> Latency:
        """Export what is not there yet, run what was not run yet, add up."""
        plans = self._plans()
        total = len(plans) + _BLOCKS
        opened: dict[str, Contestant] = {}
        for done, (name, plan) in enumerate(plans.items()):
            self.progress(done, total, f"exporting {name}")
            start = time.perf_counter()
            opened[name] = self._opened(name, plan)
            if not done:
                announce((time.perf_counter() - start) * (len(plans) - 1) + self._seconds_to_run(opened[name], plans))
        blocks = []
        for number in range(_BLOCKS):
            self.progress(len(plans) + number, total, "timing")
            block = self.kept.rounds(number)
            if block is None:
                block = _rounds(opened, self.about.threads)
                self.kept.keep(number, block)
            blocks.append(block)
        mixed = plans[MIXED].precisions if MIXED in plans else {}
        return latency_of(self.about, self.graph, blocks, mixed)

    def _plans(self) -> dict[str, Plan]:
        """A network at each choice, and one with every second group at the lowest, to see whether times add up."""
        fixed = self.graph.fixed_beside(self.about.choices)
        plans = {str(choice): _filled(self.graph, choice, fixed) for choice in self.about.choices}
        lowest, highest = (plans[str(choice)] for choice in (self.about.choices[0], self.about.choices[-1]))
        lowered = [layer.name for group in self.graph.selectable[::2] for layer in group.layers]
        if len(self.graph.selectable) > 1:
            precisions = highest.precisions | {name: lowest.precisions[name] for name in lowered}
            plans[MIXED] = highest.model_copy(update={"precisions": precisions, "method": MIXED})
        return plans

    def _opened(self, name: str, plan: Plan) -> Contestant:
        path, made = self.kept.file(name), None
        if not self.runtime.to or not path.exists():
            made = quantize(self.model, plan, integer=self.about.integer).eval()
            calibrate_(made, [(self.example,)])  # no part of an example holds labels
            made = self.runtime.prepare(made, self.example, path, self.about.options)
        inputs = Inputs(*inputs_of(self.example, self.about.batch))
        return self.runtime.open(made, path, inputs, self.about.threads, self.graph)

    def _seconds_to_run(self, contestant: Contestant, plans: Mapping[str, Plan]) -> float:
        contestant.run()
        start = time.perf_counter()
        contestant.run()
        return max(_LEAST, time.perf_counter() - start) * len(plans) * _BLOCKS * (2 * _ROUNDS + 1)


def _rounds(opened: Mapping[str, Contestant], threads: int) -> Rounds:
    """Whole networks in turn, then their layers in turn."""
    runs = {name: contestant.run for name, contestant in opened.items()}
    whole = in_turn(runs, _ROUNDS, least=_LEAST, threads=threads)
    layers: dict[str, dict[str, list[float]]] = {name: {} for name in opened}
    for name, contestant in opened.items():
        for ran in contestant.profile(_ROUNDS * min(_LOOKS, whole.runs[name])):
            for layer, seconds in ran.items():
                layers[name].setdefault(layer, []).append(seconds)
    return Rounds.model_validate({"whole": whole.seconds, "layers": layers})


def _filled(graph: Graph, choice: Precision, fixed: dict[str, Precision]) -> Plan:
    """All choosable layers at one choice, the fixed ones as they are beside all choices."""
    plan = Plan.uniform(graph, choice)
    return plan.model_copy(update={"precisions": plan.precisions | fixed})


def _drawn(example: Any) -> Any:
    """An example with values: floats are drawn where it is only described or all zeros, indices and masks are ones."""

    def draw(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_meta and (not value.is_floating_point() or value.any()):
            return value
        if not value.is_floating_point():
            return torch.ones(value.shape, dtype=value.dtype)
        return torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value.dtype)

    if isinstance(example, Mapping):
        return {name: draw(value) for name, value in example.items()}
    return tuple(map(draw, example)) if isinstance(example, tuple | list) else draw(example)


@contextmanager
def _folder(path: str | Path | None, about: Measuring) -> Iterator[KeptMeasurement]:
    """The folder that keeps what is done; where none is given, one that goes with the process."""
    if path is not None:
        kept = KeptMeasurement(path, about)
        yield kept
        return
    with tempfile.TemporaryDirectory() as folder:
        yield KeptMeasurement(Path(folder) / "measurement", about)


def _machine() -> str:
    """The processor, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
