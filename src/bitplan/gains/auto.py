"""auto: which method is taken for what is there. `TABLE` says it all; evidence changes its rows and no code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from bitplan.core.defaults import AUTO
from bitplan.core.errors import InputError
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.registry import CHOOSERS
from bitplan.weights.opened import CheckpointLike, learned_step, open_if_path
from bitplan.weights.pretrained_folders import says_network

There = Literal["no weights", "float weights", "learned steps"]
"""Of a model: nothing that says something about it, a float network or file, or one whose layers all have steps."""

_DATA = "a few batches (--data package.module:loader, in Python batches=loader): {passes} passes over 512 samples"


Time = Literal["seconds", "minutes", "hours"]
"""What choosing may take on a network that trains for hours; the words of the option `time`."""
_TIMES: tuple[Time, ...] = get_args(Time)


@dataclass(frozen=True)
class Advice:
    """Where this is there, the method and its options that are taken, why; what would be better, and what that costs.

    `data` is True where the network can be run on some and lowered from the highest choice. `time` is what choosing may
    take at least; where a table has no row for it, that of less time holds. A row with `alone` is for choices that
    quantize weights alone, and comes before others there. Texts may name {top}, the highest choice, and {passes}, the
    forward passes that drift takes.
    """

    there: There
    data: bool
    method: str
    why: str
    better: str
    alone: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    time: Time = "seconds"


# The evidence is in docs/measurements: CIFAR-10, 4 and 2 bits, 70 % of the bit operations, a ResNet-20, five seeds from
# each of two starts. Top-1 there: uniform 84.50, 84.44; eagl 85.07, 84.95; fisher 86.20, 84.97; drift 86.27, 86.04;
# drift_in_context 86.44, 86.38; with spreads of 0.3 to 0.6. alps chose drift's plan from the second, and had
# 86.67 from a third, where drift had 86.09. From two more, ten seeds, at 80 and 65 %: uniform 86.11, 83.47; eagl 87.49,
# 85.23; drift 88.70, 84.61; drift_in_context 88.69, 85.01; alps_racing 88.70, 85.12; alps 88.82, 85.04: at the tight
# budget drift is surely below alps_racing. No other difference between these four is significant there. Of a small
# language model at 75 % of its bytes (stories.md) drift_in_context is surely better than alps and uniform: perplexity
# 10.57, 11.27, 11.22; drift 10.79, eagl 10.94. On a ResNet-44 from two starts at 80 and 65 % (cifar-resnet44.md):
# uniform 88.49, 86.43; eagl 88.33, 86.10; drift 90.53, 87.65; drift_in_context 90.38, 87.68; alps_racing 90.68, 87.81;
# alps 90.59, 87.71. alps_racing else: 86.28 (third start), alps's plan (second); 10.60. Of a small PSPNet from 3 to 8
# bits (camvid.md), two starts, drift_in_context is surely far below all others, 33.32; drift 39.70, alps_racing and
# alps 40.36. plan_racing (0057) is level with these on the ResNet-44, 90.34 and 87.57 from one start, and 1.8 below on
# the PSPNet: alps_racing stays.
TABLE: tuple[Advice, ...] = (
    Advice(
        "no weights", False, "uniform",
        why="there are no trained weights, and structure alone says that every layer counts the same",
        better="eagl, in seconds, from trained weights: a checkpoint, or package.module:factory that loads them",
    ),
    # SmolLM2-135M at 3 bits: perplexity 127 for all alike, 145 by weight_error, 297 by eagl (docs/language.md).
    Advice(
        "float weights", False, "equal_bits", alone=True,
        why="of a language model scores of weights alone made worse plans than all layers alike, or hardly better ones",
        better="fisher, from a text (--task text:data=FILE): some windows, no labels",
    ),
    Advice(
        "float weights", False, "eagl", options={"steps": "mse"},
        why="weights are all there is, and without learned steps each layer gets that of least squared error (mse)",
        better=f"drift (a point of top-1 above eagl on a CIFAR ResNet-20, but at a tight budget), from {_DATA}",
    ),
    Advice(
        "learned steps", False, "eagl",
        why="all layers have learned steps, and the entropy of their codes needs no data; on a CIFAR ResNet-20 it was "
        "0.5 to 2 points above uniform, from five starts, on a ResNet-44 a third of a point below",
        better=f"drift (1 to 2 points above eagl there, but once at a tight budget), from {_DATA}",
    ),
    # Rank correlation with ALPS on ResNet-20: drift 0.90.
    Advice(
        "float weights", True, "drift",
        why="there is data to see how far answers move; the float network is calibrated at {top}, not trained there",
        better="the same from a network trained at {top} (bitplan quantize --bits {top}, bitplan finetune)",
    ),
    # SmolLM2-135M: surely better than all layers alike at 2.5, 3 and 3.5 bits (docs/language.md).
    Advice(
        "float weights", True, "drift", alone=True,
        why="there is data to see how far answers of the float network move; of a small language model it made better "
        "plans than all layers alike, at three sizes",
        better="the same on more samples (--gain drift:samples=16)",
    ),
    Advice(
        "learned steps", True, "drift",
        why="there is data to see how far answers move when a group is lowered from {top}; on CIFAR-10 (ResNet-20, "
        "five seeds, three starts; ResNet-44) it was within 0.4 points of the best, at a tight budget once 1 below",
        better="with labels, a recipe and minutes (--gain auto:time=minutes) alps_racing, which fine-tunes where the "
        "choice is in doubt",
    ),
    Advice(
        "learned steps", True, "alps_racing", options={"steps": 20, "rounds": 2}, time="minutes",
        why="there are labels, a recipe and minutes to fine-tune groups whose choice drift leaves in doubt; on four "
        "networks, bound to a part of alps's training (spend=0.05), it was never surely below drift, and at "
        "most 0.4 points below alps",
        better="with hours (--gain auto:time=hours) alps, a training per group and choice",
    ),
    Advice(
        "learned steps", True, "alps", time="hours",
        why="there are labels, a recipe and hours to fine-tune a network for every group and choice; on CIFAR-10 "
        "(ResNet-20) it was 0.6 points above drift from one start, and chose drift's own plan from another",
        better="a study of your own (bitplan sweep), and bitplan run ceiling for what is left above all methods",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class TakenMethod:
    """A method by name with its options, and the line that explains it; empty where the user named the method."""

    method: Any
    options: dict[str, Any]
    note: str = ""


def choose_method(
    method: Any, options: Mapping[str, Any], model: Any, graph: Graph, choices: tuple[Precision, ...], task: Any
) -> TakenMethod:
    """The method asked for; where that is `auto`, the row of what is there. Options asked for come over the row's.

    `auto` has an option of its own, `time`: what choosing may take.
    """
    if not (isinstance(method, str) and method == AUTO):
        return TakenMethod(method, dict(options))
    time, others = _time(options), {key: value for key, value in options.items() if key != "time"}
    there = what_is_there(model, graph)
    idle = "" if task is None else _why_idle(there, model, graph, choices)
    data = task is not None and not idle
    alone = not any(choice.quantizes_inputs for choice in choices)
    row = _row(there, data, time, alone)
    words = {"top": choices[-1], "passes": f"{2 * len(graph.selectable) * (len(choices) - 1):,}"}
    why, better = (text.format(**words) for text in (row.why, row.better))
    unused = f"; the data is not used, since {idle}" if idle else ""
    note = f"gains: auto takes {row.method}, since {why}{unused}. Better: {better}"
    return TakenMethod(row.method, {**row.options, **others}, note)


def _time(options: Mapping[str, Any]) -> Time:
    told = options.get("time", _TIMES[0])
    for time in _TIMES:
        if told == time:
            return time
    raise InputError(f"auto: time is {', '.join(_TIMES[:-1])} or {_TIMES[-1]}, not {told!r}")


def _row(there: There, data: bool, time: Time, alone: bool) -> Advice:
    """Return the row of what is there that takes the most of the time, among methods that are installed.

    Where weights alone are quantized, a row for that comes first.
    """
    fitting = [row for row in TABLE if (row.there, row.data) == (there, data) and _within(row.time, time)]
    fitting = [row for row in fitting if (alone or not row.alone) and row.method in CHOOSERS]
    return max(fitting, key=lambda row: (row.alone, _TIMES.index(row.time)))


def _within(needed: Time, time: Time) -> bool:
    return _TIMES.index(needed) <= _TIMES.index(time)


def what_is_there(model: Any, graph: Graph) -> There:
    """What a model, an opened file or a path has that a method could look at."""
    layers = [layer.name for group in graph.selectable for layer in group.layers if layer.weights]
    if model is None:
        return "no weights"
    if isinstance(model, CheckpointLike):
        opened = open_if_path(model)
        learned = [learned_step(layer, opened.tensors) is not None for layer in layers]
        return "learned steps" if learned and all(learned) else "float weights"
    if any(parameter.is_meta for parameter in model.parameters()):
        return "no weights"
    from bitplan.gains.eagl_modules import module_weights

    weights = module_weights(model, layers).values()
    return "learned steps" if weights and all(one.learned is not None for one in weights) else "float weights"


def _why_idle(there: There, model: Any, graph: Graph, choices: tuple[Precision, ...]) -> str:
    """Why data is of no use; empty where it is."""
    if there == "no weights":
        return "an untrained network answers at random"
    if isinstance(model, CheckpointLike):
        alone = not any(choice.quantizes_inputs for choice in choices)
        return "" if alone and says_network(open_if_path(model).folder) else "a file of weights cannot be run"
    from bitplan.gains.lowering import check_top
    from bitplan.quant.sites import is_quantized

    try:
        if is_quantized(model):
            check_top(model, graph, choices, "drift")
    except InputError:
        return f"drift starts from every layer at {choices[-1]}"
    return ""
