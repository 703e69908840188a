"""The contract of exporters."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitplan.core.errors import InputError, MissingExtra
from bitplan.core.precision import Precision
from bitplan.core.records import Plan
from bitplan.core.registry import EXPORTERS
from bitplan.exporters.base import Exporter, ReadBack, export
from bitplan.exporters.verify import verify
from bitplan.quant.convert import integer_weights, plan_of
from bitplan.testing.contract import Contract
from bitplan.testing.networks import Made, some_blocks

_NETWORKS = 2  # one of linear layers, one of convolutions


def check_exporter(exporter: Exporter, *, networks: Iterable[Made] | None = None) -> None:
    """Hold an exporter to its contract, on a few small networks of linear layers and convolutions.

    One with an option `widen` is tried with and without. What it refuses must be refused in one line by the name of a
    layer; of the first file that it can run, the answers must be those of the model.
    """
    contract = Contract(f"exporter {EXPORTERS.name_of(exporter)}")
    contract.has_all_of(exporter, Exporter, "an exporter")
    with contract.works("all its options have defaults"):
        type(exporter)()
    run = False
    for made in some_blocks(_NETWORKS) if networks is None else networks:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"net{exporter.suffix}"
            if check_file(exporter, made, path) is not None and not run:
                run = _check_execution(contract, exporter, path, made)


def check_file(exporter: Exporter, made: Made, path: Path) -> frozenset[str] | None:
    """One network and one file: the layers that the file has wider than the plan; None where all was refused."""
    contract = Contract(f"exporter {EXPORTERS.name_of(exporter)}")
    widens = "widen" in {field.name for field in dataclasses.fields(exporter)}  # type: ignore[arg-type]
    willing: Any = dataclasses.replace(exporter, widen=True) if widens else exporter  # type: ignore[type-var]
    plan = plan_of(made.model)
    refusal = _written(contract, willing, made, path)
    if refusal is not None:
        _check_refusal(contract, refusal, plan)
        return None
    with contract.works("it reads what it wrote"):
        found = willing.read(path)
    wider = _check_read(contract, found, made, exact=not widens)
    _check_codes(contract, found, made.model, all_of_them=exporter.needs_model)
    if widens:
        _check_unwilling(contract, exporter, made, path.with_name("other"), wider)
    return wider


def _written(contract: Contract, exporter: Exporter, made: Made, path: Path) -> str | None:
    """Write one file and nothing else; gives the refusal, if there is one."""
    source: nn.Module | Plan = made.model if exporter.needs_model else plan_of(made.model)
    before = set(path.parent.iterdir())
    refusal = None
    with contract.works("what it cannot write it refuses with an InputError"):
        try:
            export(source, path, exporter, graph=made.graph, example=made.example)
        except MissingExtra:
            raise
        except InputError as error:
            refusal = str(error)
    left = set(path.parent.iterdir()) - before - {path}
    contract.clause("it writes one file and leaves nothing beside it", not left, ", ".join(p.name for p in left))
    return refusal


def _check_refusal(contract: Contract, refusal: str, plan: Plan) -> None:
    contract.clause("a refusal is one line", "\n" not in refusal, refusal)
    named = any(layer in refusal for layer in plan.precisions) or "every layer" in refusal
    contract.clause("a refusal names a layer", named, refusal)


def _check_read(contract: Contract, found: ReadBack, made: Made, *, exact: bool) -> frozenset[str]:
    """Every layer of the plan, at its precision; with `widen` no lower than that. Gives those that are higher."""
    planned: Mapping[str, Precision] = plan_of(made.model).precisions
    lost = [layer for layer in planned if layer not in found.precisions]
    contract.clause("it reads back every layer of the plan", not lost, f"not {', '.join(lost[:3])}")
    wider = frozenset(layer for layer, asked in planned.items() if found.precisions[layer] != asked)
    for layer in wider:
        asked, given = planned[layer], found.precisions[layer]
        shown = f"{layer} is {asked} in the plan and {given} in the file"
        contract.clause("it reads back the plan's precisions", not exact, shown)
        contract.clause("to widen is never to narrow", given.above(asked), shown)
    return wider


def _check_codes(contract: Contract, found: ReadBack, model: nn.Module, *, all_of_them: bool) -> None:
    codes = integer_weights(model)
    for layer, read in found.codes.items():
        equal = layer in codes and torch.equal(read.long(), codes[layer].long())
        contract.clause("it reads back the model's codes", equal, f"not those of {layer}")
    lost = [layer for layer in codes if layer not in found.codes]
    contract.clause("it reads back the codes of every layer", not (all_of_them and lost), f"not {', '.join(lost[:3])}")


def _check_unwilling(contract: Contract, exporter: Any, made: Made, path: Path, wider: frozenset[str]) -> None:
    """Without `widen` just that is refused which was widened with it."""
    refusal = _written(contract, dataclasses.replace(exporter, widen=False), made, path)
    if not wider:
        contract.clause("without widen it writes what needs no widening", refusal is None, refusal or "")
        return
    contract.clause("without widen it refuses what it would widen", refusal is not None, ", ".join(sorted(wider)))
    assert refusal is not None
    contract.clause("a refusal is one line", "\n" not in refusal, refusal)
    contract.clause("a refusal says that widen would help", "widen" in refusal, refusal)
    named = any(layer in refusal for layer in wider)
    contract.clause("a refusal names a layer that would be widened", named, refusal)


def _check_execution(contract: Contract, exporter: Exporter, path: Path, made: Made) -> bool:
    """Run the file beside its model; tell whether it can be run."""
    try:
        exporter.opened(path, made.model)
    except InputError:
        return False
    contract.clause("it recognizes its own file", exporter.recognizes(path))
    batch = torch.randn(5, *made.example.shape[1:], generator=torch.Generator().manual_seed(0))
    known = any(EXPORTERS.get(name) is type(exporter) for name in EXPORTERS)
    meanwhile = nullcontext() if known else EXPORTERS.registered(type(exporter).__name__.lower(), type(exporter))
    with contract.works("its file runs"), meanwhile:
        verdict = verify(path, made.model, [batch])
    found = f"{verdict.predictions_equal} of {verdict.predictions} predictions equal, {verdict.unexplained} unexplained"
    contract.clause("its file does what the model does", verdict.passed, found)
    return True
