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
from bitplan.core.parsing import explain_failures, parse_toml
from bitplan.core.registry import COSTS
from bitplan.core.rules import Rules
from bitplan.core.studies import Choosing, Method, QuantizerAt, Start, Study
from bitplan.core.trials import FOR_FLOATS, Recipe, merge_recipes
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
    with explain_failures(source, "a study", "write it again"):
        content = parse_toml(read_text(source))
    try:
        return _read(content, source.resolve().parent)
    except InputError as error:
        raise FileError(f"{source}: {error}") from None


def _read(content: Content, home: Path) -> Study:
    _check_keys(content, _TOP, "the study")
    chosen = () if content.get("quantizers") and "methods" not in content else ("budgets", "methods")
    _check_needed(content, ("name", "task", "model", "choices", "seeds", "start", "recipe", *chosen))
    recipe = _get_table(content, "recipe")
    _check_recipe(recipe, "[recipe]")
    task = content["task"] if isinstance(content["task"], dict) else {"name": content["task"]}
    engine = _get_table(content, "engine")
    cost = _fill_text(content.get("cost", COST), False, home)
    return Study(
        **{key: content[key] for key in _PLAIN if key in content},
        task=_get_name(task, "task"),
        task_options=_fill_in(_without_name(task), DATA, home),
        rules=_read_section(Rules, _get_table(content, "rules"), "[rules]"),
        choosing=_read_section(Choosing, _get_table(content, "choosing"), "[choosing]"),
        choices=tuple(_get_list(content, "choices")),
        cost=cost,
        budgets=_read_budgets(content, cost),
        methods=tuple(_read_method(method, recipe, home) for method in _get_list(content, "methods")),
        quantizers=tuple(_read_quantizer(one, content, home) for one in _get_list(content, "quantizers")),
        seeds=tuple(_get_list(content, "seeds")),
        start=_read_start(_get_table(content, "start"), recipe, home),
        recipe=_read_recipe({}, recipe, "[recipe]"),
        lowest_recipe=_read_recipe(_get_table(content, "lowest_recipe"), recipe, "[lowest_recipe]")
        if "lowest_recipe" in content
        else None,
        engine=_get_name(engine, "[engine]") if engine else "local",
        engine_options=_without_name(engine),
    )


def _without_name(table: Content) -> Content:
    """Return the options of a table: all keys but the name."""
    return {key: value for key, value in table.items() if key != "name"}


def _read_budgets(content: Content, cost: Any) -> tuple[str, ...]:
    budgets = [_read_budget(written, cost) for written in _get_list(content, "budgets")]
    return tuple(str(budget) for budget in budgets)


def _read_budget(written: Any, cost: Any) -> Budget:
    """Return a budget that names the cost of its unit, unless the study's own table may count such units."""
    budget = Budget.parse(written)
    stands_for = budget.unit.usual
    own_table = is_table(str(cost))
    if budget.cost is not None or own_table or stands_for not in COSTS:
        return budget
    return replace(budget, cost=stands_for)


def _read_method(content: Any, base: Content, home: Path) -> Method:
    if not isinstance(content, dict):
        raise InputError(f"a method is a table: write [[methods]] with name = {content!r}")
    where = f"[[methods]] {content.get('name', '')}".rstrip()
    filled = dict(content)
    if "recipe" in content:
        filled["recipe"] = _read_recipe(content["recipe"], base, f"{where}: recipe")
    if "options" in content:
        filled["options"] = _fill_in(_get_table(content, "options"), ("path",), home)
    return _read_section(Method, filled, where)


def _read_quantizer(content: Any, study: Content, home: Path) -> QuantizerAt:
    """Return a quantizer; it is tried at every choice of the study unless it says at which precisions or plans."""
    if not isinstance(content, dict):
        raise InputError(f"a quantizer is a table: write [[quantizers]] with name = {content!r}")
    where = f"[[quantizers]] {content.get('name', '')}".rstrip()
    at = content["at"] if "at" in content else [str(choice) for choice in _get_list(study, "choices")]
    if not isinstance(at, list):
        raise InputError(f"{where}: at is a list of precisions or of plans, not {at!r}")
    return _read_section(QuantizerAt, {**content, "at": tuple(_fill_text(one, False, home) for one in at)}, where)


def _read_start(content: Content, base: Content, home: Path) -> Start:
    filled = _fill_in(content, ("weights", "checkpoint"), home)
    for key, changes in (("float_recipe", FOR_FLOATS), ("recipe", {})):
        if key in content:
            filled[key] = _read_recipe(_get_table(content, key), base | changes, f"[start.{key}]")
    if {"seed", "seeds"} <= content.keys():
        raise InputError("[start] says seed and seeds: say seeds, the first of which counts as the seed")
    start = _read_section(Start, filled, "[start]")
    if start.weights is None and start.float_recipe is None and start.checkpoint is None:
        raise InputError("[start] says nothing about the float network: give weights, or a float_recipe that trains it")
    return start


def _read_recipe(changes: Content, base: Content, where: str) -> Recipe:
    """Return a recipe that states only its differences from the base; a second stage states those from the first."""
    _check_recipe(changes, where)
    return _read_section(Recipe, merge_recipes(changes, base), where)


def _check_recipe(content: Content, where: str) -> None:
    _check_keys(content, Recipe.model_fields, where)
    if "then" in content:
        _check_recipe(_get_table(content, "then"), f"then of {where}")


def _read_section(kind: type[Any], content: Content, where: str) -> Any:
    _check_keys(content, kind.model_fields, where)
    try:
        return kind.model_validate(content)
    except InputError as error:
        raise InputError(f"{where}: {str(error).replace(f'{kind.__name__}: ', '')}") from None


def _check_keys(content: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for key in content:
        if key not in known:
            raise InputError(f"unknown key {key!r} in {where}{suggestion(key, known)}")


def _check_needed(content: Content, keys: Iterable[str]) -> None:
    for key in keys:
        if key not in content:
            raise InputError(f"the study does not say its {key}")


def _get_table(content: Content, key: str) -> Content:
    found = content.get(key, {})
    if not isinstance(found, dict):
        raise InputError(f"{key} must be a table, not {found!r}")
    return found


def _get_list(content: Content, key: str) -> list[Any]:
    found = content.get(key, [])
    if not isinstance(found, list):
        raise InputError(f"{key} must be a list, not {found!r}")
    return found


def _get_name(content: Content, what: str) -> str:
    if not isinstance(content.get("name"), str):
        raise InputError(f"{what} needs a name")
    return content["name"]


def _fill_in(content: Content, paths: Iterable[str], home: Path) -> Content:
    """Fill in variables in every text, and make paths absolute."""
    return {key: _fill_text(value, key in paths, home) for key, value in content.items()}


def _fill_text(value: Any, is_path: bool, home: Path) -> Any:
    if not isinstance(value, str):
        return value
    filled = os.path.expanduser(_VARIABLE.sub(_read_variable, value))
    return str((home / filled).resolve()) if is_path or is_table(filled) else filled


def _read_variable(match: re.Match[str]) -> str:
    name, default = match[1] or match[2], match[3]
    found = os.environ.get(name, default)
    if found is None:
        raise InputError(f"the environment variable {name} is not set: set it, or write ${{{name}:-a default}}")
    return found
