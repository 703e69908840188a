"""Controls: what every study with a limit on choosing runs beside its searches, whether it names them or not."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import JsonValue

from bitplan.core.registry import CHOOSERS
from bitplan.core.studies import Method, Study
from bitplan.gains.base import is_bound

PLAIN, LOTS = "uniform", "random_search"
"""What knows nothing, and what searches without learning."""
_JUDGE, _SPEND = "judge", "spend"


def with_controls(study: Study) -> Study:
    """The study with its controls: `uniform`, and random search with each judge and spend that its choosers have.

    They are added where the study sets `spend` and a method chooses within a budget, of whichever kind it is; those
    that the study names itself are not doubled. A study that has them is given back as it is.
    """
    bound = [method for method in study.methods if _is_bound(method)]
    if study.spend is None or not bound:
        return study
    there = {_way(method) for method in study.methods}
    added: list[Method] = []
    for wanted in [Method(name=PLAIN), *(_lots_like(method) for method in bound)]:
        if _way(wanted) not in there:
            there.add(_way(wanted))
            added.append(wanted)
    several = sum(control.name == LOTS for control in added) > 1
    added = [_labelled(control, details=several) for control in added]
    return study.model_validate(dict(study) | {"methods": (*study.methods, *added)}) if added else study


def _is_bound(method: Method) -> bool:
    return method.name in CHOOSERS and is_bound(CHOOSERS.get(method.name))  # else it is a table's path


def _lots_like(method: Method) -> Method:
    """Random search with the judge of a method, where it has one, its spend, where it says one, and its recipe."""
    told: dict[str, JsonValue] = {_JUDGE: _option(method, _JUDGE), _SPEND: method.options.get(_SPEND)}
    usual = {_JUDGE: _default(LOTS, _JUDGE), _SPEND: None}
    options: dict[str, JsonValue] = {}
    options |= {name: value for name, value in told.items() if value is not None and value != usual[name]}
    return Method(name=LOTS, options=options, recipe=method.recipe)


def _option(method: Method, name: str) -> Any:
    """What a method is told, or else its own default; None where it has no such option."""
    return method.options.get(name, _default(method.name, name))


def _default(chooser: str, name: str) -> Any:
    for option in dataclasses.fields(CHOOSERS.get(chooser)):
        if option.name == name:
            return option.default
    return None


def _way(method: Method) -> tuple[Any, ...]:
    """What makes a control the same as another, however it is written."""
    if not _is_bound(method):
        return method.name, str(method.options), method.recipe
    others = {name: value for name, value in method.options.items() if name not in (_JUDGE, _SPEND)}
    return method.name, str(others), method.recipe, _option(method, _JUDGE), method.options.get(_SPEND)


def _labelled(control: Method, *, details: bool) -> Method:
    """What tables call it; where there are several, with what tells them apart."""
    told = ", ".join(str(value) for value in control.options.values()) if details else ""
    return control.model_copy(update={"label": f"{control.name} ({f'control, {told}' if told else 'control'})"})
