"""measure: how long each layer of a network takes at each choice, on this machine, in a runtime.

Whole networks are exported, one at each choice, and run in turn; a runtime tells how long each of its nodes took, and
each node belongs to a layer. So what a runtime does with neighbouring layers is in the times, which add up to those of
whole networks.
"""

from __future__ import annotations

import platform
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from bitplan.core.defaults import CHOICES
from bitplan.core.errors import FileError, InputError
from bitplan.core.latencies import Latency, MeasuredTime, Measuring, MixedNetworkTime, Rounds, WholeNetworkTime
from bitplan.core.precision import Precision, PrecisionLike, parse_choices
from bitplan.core.progress import Progress
from bitplan.core.records import Graph, Plan
from bitplan.exporters.capture import batch_inputs
from bitplan.exporters.verify import time_interleaved
from bitplan.graph.trace import trace
from bitplan.plugins.runtimes.timed_networks import Contestant, Inputs, Runtime, runtime_of
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.convert import quantize
from bitplan.store.files import clear_left, load, save, write_text

# --- Rounds of whole networks and of their layers → the time that each layer takes at each choice.

MIXED = "mixed"
_ALIKE = 0.05  # whole networks that differ by less than this share, or than their spread, take the same time
_LEAST_TIME = 0.5  # of what raising a layer adds where all are raised


def latency_of(about: Measuring, graph: Graph, blocks: Sequence[Rounds], mixed: Mapping[str, Precision]) -> Latency:
    """Add up all rounds; `mixed` are the precisions of the network that checks the sums, empty where there is none."""
    whole = {name: _taken(_seconds(block.whole[name] for block in blocks)) for name in blocks[0].whole}
    layers = {name: _layers(name, blocks) for name in blocks[0].layers}
    sums = {name: sum(taken.ns for taken in row.values()) for name, row in layers.items()}
    scaled = {
        name: {layer: _times(taken, whole[name].ns / max(1, sums[name])) for layer, taken in row.items()}
        for name, row in layers.items()
    }
    alike = _alike({choice: whole[str(choice)] for choice in about.choices})
    rows = {
        layer.name: _row(layer.name, graph.fixed_beside(about.choices).get(layer.name), about.choices, scaled, alike)
        for layer in graph.layers
    }
    expected = sum(rows[layer][precision].ns for layer, precision in mixed.items())
    among_others = _among_others(rows, mixed, expected, whole[MIXED].ns) if mixed else 1.0
    return Latency(
        about=about,
        rounds=sum(len(block.whole[str(about.choices[0])]) for block in blocks),
        macs={layer.name: layer.macs for layer in graph.layers},
        rows={layer: _raised(row, among_others) for layer, row in rows.items()},
        whole={
            choice: WholeNetworkTime(taken=whole[str(choice)], layers=sums[str(choice)]) for choice in about.choices
        },
        alike=tuple(tuple(group) for group in alike if len(group) > 1),
        mixed=MixedNetworkTime(expected=expected, taken=whole[MIXED], among_others=among_others) if mixed else None,
        beside=tuple(name for name in rows if all(name not in row for row in layers.values())),
    )


def _among_others(
    rows: Mapping[str, Mapping[Precision, MeasuredTime]], mixed: Mapping[str, Precision], expected: int, took: int
) -> float:
    """How many times more, or less, a raised layer adds among lowered ones than in a network where all are raised.

    Where floats and integers meet, a runtime converts and reorders, which no network at one choice does. Small networks
    were quicker than their layers, too. It is never less than `_LEAST`: one mixed network does not show that raising a
    layer is free.
    """
    added = sum(max(0, rows[layer][precision].ns - _lowest(rows[layer])) for layer, precision in mixed.items())
    return max(_LEAST_TIME, 1.0 + (took - expected) / added) if added > 0 else 1.0


def _raised(row: Mapping[Precision, MeasuredTime], times: float) -> dict[Precision, MeasuredTime]:
    """A layer's times with so many times what its choices add to the lowest, where they add something."""
    low = _lowest(row)
    return {
        choice: MeasuredTime(ns=round(low + times * (one.ns - low)), spread=one.spread) if one.ns > low else one
        for choice, one in row.items()
    }


def _lowest(row: Mapping[Precision, MeasuredTime]) -> int:
    """What a layer takes at its lowest choice."""
    return next(iter(row.values())).ns


def _row(
    layer: str,
    fixed: Precision | None,
    choices: Sequence[Precision],
    scaled: Mapping[str, Mapping[str, MeasuredTime]],
    alike: Sequence[Sequence[Precision]],
) -> dict[Precision, MeasuredTime]:
    """A layer's times; choices that take the same time share the mean of theirs, and a fixed layer has one."""
    nothing = MeasuredTime(ns=0)
    if fixed is not None:
        return {fixed: _mean([scaled[str(choice)].get(layer, nothing) for choice in choices])}
    row: dict[Precision, MeasuredTime] = {}
    for group in alike:
        row |= dict.fromkeys(group, _mean([scaled[str(choice)].get(layer, nothing) for choice in group]))
    return {choice: row[choice] for choice in choices}


def _alike(whole: Mapping[Precision, MeasuredTime]) -> list[list[Precision]]:
    """The choices, those of them together that whole networks do not tell apart by their time."""
    ordered = sorted(whole, key=lambda choice: whole[choice].ns)
    groups = [[ordered[0]]]
    for before, choice in pairwise(ordered):
        apart = whole[choice].ns - whole[groups[-1][0]].ns
        spread = max(whole[before].spread, whole[choice].spread)
        if apart > max(_ALIKE * whole[groups[-1][0]].ns, min(spread, 2 * _ALIKE * whole[choice].ns)):
            groups.append([])
        groups[-1].append(choice)
    return [[choice for choice in whole if choice in group] for group in groups]


def _layers(network: str, blocks: Sequence[Rounds]) -> dict[str, MeasuredTime]:
    names = dict.fromkeys(layer for block in blocks for layer in block.layers[network])
    found = {layer: _seconds(block.layers[network].get(layer, ()) for block in blocks) for layer in names}
    return {layer: _taken(seconds, best=True) for layer, seconds in found.items()}


def _seconds(parts: Iterable[Sequence[float]]) -> list[float]:
    return [seconds for part in parts for seconds in part]


def _taken(seconds: Sequence[float], *, best: bool = False) -> MeasuredTime:
    """The median; or of layers, whose times are the wall's, the best round, for others' programs only add to it."""
    usual = min(seconds) if best else statistics.median(seconds)
    if len(seconds) < 2:
        return MeasuredTime(ns=round(1e9 * usual))
    first, _, third = statistics.quantiles(seconds, n=4)
    return MeasuredTime(ns=round(1e9 * usual), spread=round(1e9 * (third - first)))


def _times(taken: MeasuredTime, factor: float) -> MeasuredTime:
    return MeasuredTime(ns=round(factor * taken.ns), spread=round(factor * taken.spread))


def _mean(several: Sequence[MeasuredTime]) -> MeasuredTime:
    return MeasuredTime(
        ns=round(statistics.mean(taken.ns for taken in several)),
        spread=round(statistics.mean(taken.spread for taken in several)),
    )


# --- The folder of a measurement that is going on: what is exported and which rounds are run, so that a kill costs
# little.

_ABOUT = "measuring.json"


class KeptMeasurement:
    """The files of one measurement."""

    def __init__(self, path: str | Path, about: Measuring) -> None:
        """Take over the folder if it is new or this measurement's."""
        self.path, self._about = Path(path), about
        known = self.path / _ABOUT
        clear_left(self.path)
        if not known.exists():
            if self.path.exists() and any(self.path.iterdir()):
                raise FileError(f"{self.path} is in the way of a measurement: move it, or write to another file")
            save(about, known)
            return
        before = load(known, Measuring, sealed=True)
        if before.id != about.id:
            fields = [name for name in Measuring.model_fields if getattr(before, name) != getattr(about, name)]
            raise FileError(
                f"{self.path} holds an unfinished measurement with another {', '.join(fields)}: finish that one with "
                "what was typed for it, or delete the folder"
            )

    def file(self, network: str) -> Path:
        """Where an exported network is, or will be."""
        return self.path / f"{re.sub('[^a-z0-9]', '-', network)}.onnx"

    def rounds(self, number: int) -> Rounds | None:
        """The rounds of that number, where they were run before."""
        path = self._rounds_file(number)
        return load(path, Rounds, of=self._about.id, sealed=True) if path.exists() else None

    def keep(self, number: int, rounds: Rounds) -> None:
        """Put rounds away."""
        write_text(self._rounds_file(number), rounds.to_json(of=self._about.id))

    def _rounds_file(self, number: int) -> Path:
        return self.path / f"rounds-{number}.json"


def forget(path: Path) -> None:
    """Delete a measurement's folder: its record is written."""
    if (path / _ABOUT).exists():
        shutil.rmtree(path, ignore_errors=True)


# --- measure: how long each layer of a network takes at each choice, on this machine, in a runtime.

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
    """Time every layer of a network at every choice; `on` is a runtime by name (`plugins/runtimes/timed_networks.py`).

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
        inputs = Inputs(*batch_inputs(self.example, self.about.batch))
        return self.runtime.open(made, path, inputs, self.about.threads, self.graph)

    def _seconds_to_run(self, contestant: Contestant, plans: Mapping[str, Plan]) -> float:
        contestant.run()
        start = time.perf_counter()
        contestant.run()
        return max(_LEAST, time.perf_counter() - start) * len(plans) * _BLOCKS * (2 * _ROUNDS + 1)


def _rounds(opened: Mapping[str, Contestant], threads: int) -> Rounds:
    """Whole networks in turn, then their layers in turn."""
    runs = {name: contestant.run for name, contestant in opened.items()}
    whole = time_interleaved(runs, _ROUNDS, least=_LEAST, threads=threads)
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
