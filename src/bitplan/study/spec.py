"""read_study: a study as people write it, one TOML file.

name = "digits"                                 [recipe]            how every trial is trained
task = "digits"   # or { name = …, data = … }   steps = 100
model = "digits_resnet"                         [start]             weights or float_recipe, then recipe
choices = ["w2a2", "w4a4"]                      [start.recipe]      only what differs from [recipe]
budgets = ["80%", "60%"]                        [rules]             first, last, narrow, fix, free
spend = 0.5   # epochs, for each search         [choosing]          hold_out = 0.1: samples to judge by
seeds = [0, 1, 2]                               [engine]            name and its options
keep_networks = true   # else only scores       [[methods]]         name, options, selector, label, recipe, start
in_integers = true   # scored by their kernels  [[quantizers]]      name, label, at = ["w4a4", "plan.json"]

Paths are relative to the file; ~, $NAME and ${NAME:-default} in them are filled in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bitplan.core.budget import Budget
from bitplan.core.defaults import COST
from bitplan.core.errors import FileError, InputError, suggestion
from bitplan.core.parsing import parse_toml, parsing
from bitplan.core.registry import COSTS
from bitplan.core.rules import Rules
from bitplan.core.studies import Choosing, Method, QuantizerAt, Start, Study
from bitplan.core.trials import FOR_FLOATS, Recipe, on_top
from bitplan.store.files import read_text
from bitplan.store.user_tables import is_table

_TOP = (
    "name", "task", "model", "choices", "cost", "budgets", "seeds", "gain_seed", "spend", "references",
    "keep_networks", "in_integers", "rules", "choosing", "start", "recipe", "lowest_recipe", "methods", "quantizers",
    "engine",
)  # fmt: skip
_PLAIN = ("name", "model", "gain_seed", "spend", "references", "keep_networks", "in_integers")
DATA = ("data", "tokenizer")
"""Options of tasks that are paths."""
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")
Content = dict[str, Any]


def read_study(path: str | Path) -> Study:
    """Read a study; every complaint names the file, the section and what to write instead."""
    source = Path(path)
    with parsing(source, "a study", "write it again"):
        content = parse_toml(read_text(source))
    try:
        return _study(content, source.resolve().parent)
    except InputError as error:
        raise FileError(f"{source}: {error}") from None


def _study(content: Content, home: Path) -> Study:
    _check_keys(content, _TOP, "the study")
    chosen = () if content.get("quantizers") and "methods" not in content else ("budgets", "methods")
    _need(content, ("name", "task", "model", "choices", "seeds", "start", "recipe", *chosen))
    recipe = _table(content, "recipe")
    _check_recipe(recipe, "[recipe]")
    task = content["task"] if isinstance(content["task"], dict) else {"name": content["task"]}
    engine = _table(content, "engine")
    cost = _text(content.get("cost", COST), False, home)
    return Study(
        **{key: content[key] for key in _PLAIN if key in content},
        task=_named(task, "task"),
        task_options=_located(_options(task), DATA, home),
        rules=_section(Rules, _table(content, "rules"), "[rules]"),
        choosing=_section(Choosing, _table(content, "choosing"), "[choosing]"),
        choices=tuple(_list(content, "choices")),
        cost=cost,
        budgets=_budgets(content, cost),
        methods=tuple(_method(method, recipe, home) for method in _list(content, "methods")),
        quantizers=tuple(_quantizer(one, content, home) for one in _list(content, "quantizers")),
        seeds=tuple(_list(content, "seeds")),
        start=_start(_table(content, "start"), recipe, home),
        recipe=_recipe({}, recipe, "[recipe]"),
        lowest_recipe=_recipe(_table(content, "lowest_recipe"), recipe, "[lowest_recipe]")
        if "lowest_recipe" in content
        else None,
        engine=_named(engine, "[engine]") if engine else "local",
        engine_options=_options(engine),
    )


def _options(table: Content) -> Content:
    """What a table says beside the name."""
    return {key: value for key, value in table.items() if key != "name"}


def _budgets(content: Content, cost: Any) -> tuple[str, ...]:
    budgets = [_budget(written, cost) for written in _list(content, "budgets")]
    return tuple(str(budget) for budget in budgets)


def _budget(written: Any, cost: Any) -> Budget:
    """A budget that names the cost which its unit stands for, unless the study's own table may count such units."""
    budget = Budget.parse(written)
    stands_for = budget.unit.usual
    own_table = is_table(str(cost))
    if budget.cost is not None or own_table or stands_for not in COSTS:
        return budget
    return replace(budget, cost=stands_for)


def _method(content: Any, base: Content, home: Path) -> Method:
    if not isinstance(content, dict):
        raise InputError(f"a method is a table: write [[methods]] with name = {content!r}")
    where = f"[[methods]] {content.get('name', '')}".rstrip()
    filled = dict(content)
    if "recipe" in content:
        filled["recipe"] = _recipe(content["recipe"], base, f"{where}: recipe")
    if "options" in content:
        filled["options"] = _located(_table(content, "options"), ("path",), home)
    return _section(Method, filled, where)


def _quantizer(content: Any, study: Content, home: Path) -> QuantizerAt:
    """At every choice of the study, unless it says at which precisions or plans."""
    if not isinstance(content, dict):
        raise InputError(f"a quantizer is a table: write [[quantizers]] with name = {content!r}")
    where = f"[[quantizers]] {content.get('name', '')}".rstrip()
    at = content["at"] if "at" in content else [str(choice) for choice in _list(study, "choices")]
    if not isinstance(at, list):
        raise InputError(f"{where}: at is a list of precisions or of plans, not {at!r}")
    return _section(QuantizerAt, {**content, "at": tuple(_text(one, False, home) for one in at)}, where)


def _start(content: Content, base: Content, home: Path) -> Start:
    filled = _located(content, ("weights", "checkpoint"), home)
    for key, changes in (("float_recipe", FOR_FLOATS), ("recipe", {})):
        if key in content:
            filled[key] = _recipe(_table(content, key), base | changes, f"[start.{key}]")
    if {"seed", "seeds"} <= content.keys():
        raise InputError("[start] says seed and seeds: say seeds, the first of which counts as the seed")
    start = _section(Start, filled, "[start]")
    if start.weights is None and start.float_recipe is None and start.checkpoint is None:
        raise InputError("[start] says nothing about the float network: give weights, or a float_recipe that trains it")
    return start


def _recipe(changes: Content, base: Content, where: str) -> Recipe:
    """A recipe that says only what differs from the base; a second stage, what differs from the first."""
    _check_recipe(changes, where)
    return _section(Recipe, on_top(changes, base), where)


def _check_recipe(content: Content, where: str) -> None:
    _check_keys(content, Recipe.model_fields, where)
    if "then" in content:
        _check_recipe(_table(content, "then"), f"then of {where}")


def _section(kind: type[Any], content: Content, where: str) -> Any:
    _check_keys(content, kind.model_fields, where)
    try:
        return kind.model_validate(content)
    except InputError as error:
        raise InputError(f"{where}: {str(error).replace(f'{kind.__name__}: ', '')}") from None


def _check_keys(content: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for key in content:
        if key not in known:
            raise InputError(f"unknown key {key!r} in {where}{suggestion(key, known)}")


def _need(content: Content, keys: Iterable[str]) -> None:
    for key in keys:
        if key not in content:
            raise InputError(f"the study does not say its {key}")


def _table(content: Content, key: str) -> Content:
    found = content.get(key, {})
    if not isinstance(found, dict):
        raise InputError(f"{key} must be a table, not {found!r}")
    return found


def _list(content: Content, key: str) -> list[Any]:
    found = content.get(key, [])
    if not isinstance(found, list):
        raise InputError(f"{key} must be a list, not {found!r}")
    return found


def _named(content: Content, what: str) -> str:
    if not isinstance(content.get("name"), str):
        raise InputError(f"{what} needs a name")
    return content["name"]


def _located(content: Content, paths: Iterable[str], home: Path) -> Content:
    """Fill in variables in every text, and make what is a path absolute."""
    return {key: _text(value, key in paths, home) for key, value in content.items()}


def _text(value: Any, is_path: bool, home: Path) -> Any:
    if not isinstance(value, str):
        return value
    filled = os.path.expanduser(_VARIABLE.sub(_variable, value))
    return str((home / filled).resolve()) if is_path or is_table(filled) else filled


def _variable(match: re.Match[str]) -> str:
    name, default = match[1] or match[2], match[3]
    found = os.environ.get(name, default)
    if found is None:
        raise InputError(f"the environment variable {name} is not set: set it, or write ${{{name}:-a default}}")
    return found
