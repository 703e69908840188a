"""Quantizers at one plan: their trials and their plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.core.errors import InputError
from bitplan.core.precision import Precision
from bitplan.core.records import Graph, Plan
from bitplan.core.store import load
from bitplan.core.studies import QuantizerAt, Study
from bitplan.core.tables import is_table
from bitplan.core.trials import Trial

if TYPE_CHECKING:
    from bitplan.quant.methods.base import Quantizer


def quantizer_trials(study: Study, floating: Trial | None, base: Mapping[str, Any]) -> list[Trial]:
    """Every quantizer at every plan over the seeds, all from the float network."""
    if not study.quantizers:
        return []
    if floating is None:
        raise InputError(
            "quantizers are compared from the float network, and there is none: give weights or a float_recipe in "
            "[start] beside the checkpoint"
        )
    listed: list[Trial] = []
    for one in study.quantizers:
        method = _checked(one)
        alike = dict(base) | {"start": floating.id, "role": "quantizer", "method": one.name, "recipe": study.recipe}
        for written in dict.fromkeys(one.at):
            at = _at(one, method, written)
            listed += [Trial(**alike, at=at, seed=seed) for seed in study.seeds]
    return listed


def quantizer_plans(study: Study, graph: Graph, wanted: Sequence[Trial]) -> dict[str, Plan]:
    """The plan of every trial of a quantizer: all layers at one precision, or as a file says.

    Fixed layers have theirs beside it, and a quantizer that has not their bits is refused before anything is trained.
    """
    from bitplan.quant.methods.base import check_bits, read_method

    files = {_name_of(written): written for one in study.quantizers for written in one.at if is_table(written)}
    plans: dict[str, Plan] = {}
    for trial in wanted:
        if trial.role != "quantizer":
            continue
        if trial.at in files:
            plans[trial.id] = _of_graph(files[trial.at], graph)
        else:
            plans[trial.id] = Plan.uniform(graph, Precision.parse(trial.at))
        try:
            check_bits(read_method(trial.method), plans[trial.id])
        except InputError as error:
            raise InputError(f"[[quantizers]] {study.title_of(trial)} at {trial.at}: {error}") from None
    return plans


def _checked(one: QuantizerAt) -> Quantizer:
    from bitplan.quant.methods.base import read_method

    try:
        return read_method(one.name)
    except InputError as error:
        raise InputError(f"[[quantizers]] {one.title}: {error}") from None


def _at(one: QuantizerAt, method: Quantizer, written: str) -> str:
    """How a trial calls the plan that it is tried at, once the quantizer is known to have its bits."""
    from bitplan.quant.methods.base import check_has

    try:
        if is_table(written):
            for layer, precision in load(written, Plan).precisions.items():
                check_has(method, precision, f"{written} gives layer {layer!r}")
            return _name_of(written)
        precision = Precision.parse(written)
        check_has(method, precision, f"{precision} asks for")
        return str(precision)
    except InputError as error:
        raise InputError(
            f"[[quantizers]] {one.title}: {error}. Say at which plans it is tried: at = [\"w2a2\"]"
        ) from None  # fmt: skip


def _of_graph(path: str, graph: Graph) -> Plan:
    plan = load(path, Plan)
    for layer in (layer.name for layer in graph.layers if layer.name not in plan.precisions):
        raise InputError(f"the plan {path} has no precision for {layer}: it is of another network")
    return plan


def _name_of(path: str) -> str:
    return f"{Path(path).stem} {load(path, Plan).id}"
