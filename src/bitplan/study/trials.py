"""trials: list everything that a study trains; each id covers all that the score depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from bitplan.core.errors import FileError, InputError
from bitplan.core.precision import Precision
from bitplan.core.records import Graph, Plan
from bitplan.core.registry import CHOOSERS, TASKS
from bitplan.core.studies import FLOAT, Agenda, Estimation, Method, QuantizerAt, Study
from bitplan.core.trials import Recipe, Trial
from bitplan.core.trust import names_code
from bitplan.gains.base import is_bound, make_gain
from bitplan.store.files import load, open_file
from bitplan.store.user_tables import is_table
from bitplan.study.spec import DATA

if TYPE_CHECKING:
    from bitplan.quant.methods import Quantizer


_WITHOUT_EFFECT = ("workers",)  # options of a task that no score depends on


@dataclass(frozen=True)
class Starts:
    """The trials that others start from: the float network (None: there is none), and the one at the highest choice.

    `others` are networks at the highest choice that only methods look at, by their titles.
    """

    floating: Trial | None
    high: Trial
    others: dict[str, Trial]

    def of(self, method: Method) -> Trial:
        """Return the network that a method estimates from: its own, or the one that trials start from."""
        return self.others.get(method.title, self.high)

    @property
    def all(self) -> list[Trial]:
        """Return each trial once, in the order in which they are made."""
        found = [self.high, *self.others.values()]
        found = [self.floating, *found] if self.floating is not None else found
        return list({trial.id: trial for trial in found}.values())


def all_starts(study: Study) -> tuple[Starts, ...]:
    """Return the starts, one for each seed of the study's start."""
    return tuple(starts(study, seed) for seed in study.start.seeds or (study.start.seed,))


def trials_of_starts(study: Study) -> list[Trial]:
    """Return the trials that make all starts, each once: one float network may serve several."""
    found = [trial for one in all_starts(study) for trial in one.all]
    return list({trial.id: trial for trial in found}.values())


def starts(study: Study, seed: int | None = None) -> Starts:
    """Return the float network, and from it the one at the highest choice; those of the first seed by default.

    The seed changes the float network only if that is trained, or parts of it are random.
    """
    start, base = study.start, _common_fields(study)
    seed = start.seed if seed is None else seed
    floating = None
    if start.weights is not None or start.float_recipe is not None:
        source = "random weights"
        if start.weights:
            advice = f"; download {start.weights_from} and put it there" if start.weights_from else ""
            source = _digest(Path(start.weights), "weights", advice)
        source += f" but {', '.join(start.fresh)}" if start.fresh else ""
        floating = Trial(
            **base,
            start=f"{source}, {_task_name(study)}",
            role="float",
            method=FLOAT,
            recipe=start.float_recipe,
            seed=seed if start.float_recipe or start.fresh else start.seed,
        )
    _check_teacher(study, floating)
    origin = floating.id if floating else _task_name(study)
    made = origin
    if start.checkpoint is not None:
        advice = f"; make it from {start.checkpoint_from}" if start.checkpoint_from else ""
        made = f"{origin}, {_digest(Path(start.checkpoint), 'checkpoint', advice)}"
    high = _high_start(study, made, start.options, f"{study.choices[-1]} start", seed)
    if start.checkpoint is not None:
        high = high.model_copy(update={"recipe": None})
    usual = start.options if start.checkpoint is None else None
    others = {
        method.title: _own_start(study, method, floating, seed)
        for method in study.methods
        if method.start not in (None, usual)
    }
    return Starts(floating, high, others)


def _own_start(study: Study, method: Method, floating: Trial | None, seed: int) -> Trial:
    """Return the network that only this method looks at."""
    assert method.start is not None, "`starts` gives no other"
    if floating is None:
        raise InputError(
            f"{method.title} has a start of its own, and there is no float network to make it from: give weights in "
            "[start]"
        )
    shown = ", ".join(f"{key}={value}" for key, value in method.start.items())
    return _high_start(study, floating.id, method.start, f"{study.choices[-1]} start, {shown}", seed)


def _high_start(study: Study, origin: str, options: dict[str, Any], name: str, seed: int) -> Trial:
    """Return a network at the highest choice, quantized with these options."""
    if options:
        _check_options(study, options)
    return Trial(
        **_common_fields(study),
        start=origin,
        role="start",
        method=name,
        precision=study.choices[-1],
        options={**options, "rules": study.rules.model_dump(mode="json")},
        recipe=study.start.recipe,
        seed=seed,
    )


def trials(study: Study) -> list[Trial]:
    """Return all trials: the starts, then from each the references and every method at every budget, over the seeds.

    Quantizers are compared from the first float network alone.
    """
    found = all_starts(study)
    listed = trials_of_starts(study)
    of_quantizers = quantizer_trials(study, found[0].floating, _common_fields(study))
    if not study.methods:  # quantizers alone begin with the float network
        return [trial for trial in listed[:1] if trial.role == "float"] + of_quantizers
    for start, seed in zip(found, study.start.seeds or (None,), strict=True):
        listed += _trials_from(study, start.high.id, seed)
    return listed + of_quantizers


def _trials_from(study: Study, start: str, start_seed: int | None) -> list[Trial]:
    """Return the references and the methods' trials from one start."""
    base = _common_fields(study) | {"start": start, "recipe": study.recipe, "start_seed": start_seed}
    listed: list[Trial] = []
    if study.references:
        ends = (study.choices[0], study.choices[-1])
        for choice in ends:
            alike = base | {"recipe": study.reference_recipe(choice), "method": str(choice), "precision": choice}
            listed += [Trial(**alike, role="reference", seed=seed) for seed in study.seeds]
    first_of: dict[str, str] = {}
    for method in study.methods:
        chosen = base | {
            "role": "choice",
            "method": method.name,
            "options": method.options,
            "selector": selector_of(method),
            "cost": study.cost,
            "gain_recipe": method.recipe,
            "gain_seed": study.gain_seed,
            "gain_hold_out": study.choosing.hold_out,
            "gain_start": method.start,
        }
        own = [
            Trial(**chosen | _random_fields(study, method, seed), budgets=(budget,), seed=seed)
            for budget in study.budgets
            for seed in study.seeds
        ]
        same = first_of.setdefault(own[0].id, method.title)
        if same != method.title:
            unsaid = f"{method.name} selects by {own[0].selector} unless said"
            raise InputError(f"{same!r} and {method.title!r} are the same method, since {unsaid}: leave one out")
        listed += own
    return listed


def agenda(study: Study) -> Agenda:
    """Return the trials as a record."""
    return Agenda(study=study.id, trials=tuple(trials(study)))


def selector_of(method: Method) -> str:
    """Return the selector asked for, or the method's own."""
    gain, _ = make_gain(method.name, method.options)
    return method.selector or gain.selector


def gain_recipe(study: Study, method: Method) -> Recipe:
    """Return the recipe that a method trains with: its own, or that of the network it starts from."""
    return method.recipe or study.start.recipe or study.recipe


def _random_fields(study: Study, method: Method, seed: int) -> dict[str, Any]:
    """Return the seed and the spend of a method that chooses within a budget; they differ with the seed of training."""
    if not chooses_within_budget(method):
        return {}
    return {"gain_seed": study.gain_seed + seed, "gain_spend": _spend_of(study, method)}


def chooses_within_budget(method: Method) -> bool:
    """Return True if a method chooses within a budget; a name that is no chooser is the path of a table."""
    return method.name in CHOOSERS and is_bound(CHOOSERS.get(method.name))


def _spend_of(study: Study, method: Method) -> float | None:
    """Return the study's spend, or None if the method has its own."""
    return None if "spend" in method.options else study.spend


def estimations(study: Study, graph: str, method: Method, first: Starts | None = None) -> list[Estimation]:
    """Return everything that the gains of a method from one start depend on; `graph` is the graph's id.

    A method that chooses within a budget has an estimate for each budget and seed of the study; others have one.
    """
    one = estimation(study, graph, method, first)
    if not chooses_within_budget(method):
        return [one]
    alike = {"cost": study.cost, "spend": _spend_of(study, method)}
    return [
        one.model_copy(update={"budgets": (budget,), "seed": study.gain_seed + seed, **alike})
        for budget in study.budgets
        for seed in study.seeds
    ]


def estimation(study: Study, graph: str, method: Method, first: Starts | None = None) -> Estimation:
    """Return everything that one estimate depends on but its budget."""
    return Estimation(
        start=(first or all_starts(study)[0]).of(method).id,
        graph=graph,
        method=method.name,
        options=method.options,
        choices=study.choices,
        recipe=gain_recipe(study, method),
        seed=study.gain_seed,
        hold_out=study.choosing.hold_out,
    )


def _common_fields(study: Study) -> dict[str, Any]:
    return {"task": study.task, "model": study.model, "choices": study.choices, "selector": "none"}


def _task_name(study: Study) -> str:
    """Return name, version, options and scoring of the task; of the data only its folder's name, so that it may move.

    For a task that code makes, the name is all, since nothing is imported here. It is part of the first network's
    origin, so the ids of all trials depend on it.
    """
    options = {key: value for key, value in study.task_options.items() if key not in _WITHOUT_EFFECT}
    options |= {key: Path(str(options[key])).name for key in DATA if key in options}
    shown = json.dumps(options, sort_keys=True) if options else ""
    version = "" if names_code(study.task) else f" version {TASKS.get(study.task).version}"
    scored = ", scored in integers" if study.in_integers else ""
    return f"{study.task}{version} {shown}".rstrip() + scored


def _check_teacher(study: Study, floating: Trial | None) -> None:
    recipes = [
        study.recipe,
        study.lowest_recipe,
        study.start.recipe,
        *(gain_recipe(study, method) for method in study.methods),
    ]
    if floating is None and any(recipe is not None and recipe.distills for recipe in recipes):
        raise InputError("a recipe distills but there is no float network to teach: give weights in [start]")


def _check_options(study: Study, options: dict[str, Any]) -> None:
    """Raise InputError for unknown options of quantize, and for choices that the method has no bits for."""
    from bitplan.quant.methods import check_options, check_precision, read_method

    try:
        method = read_method(check_options(options).get("method") or "lsq")
        for choice in study.choices:
            check_precision(method, choice, f"the choice {choice} asks for")
    except InputError as error:
        raise InputError(f"[start] options: {error}") from None


def _digest(path: Path, what: str, advice: str) -> str:
    """Return a hash of a file, or of all files of a folder; if it is missing, raise with advice."""
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    try:
        for file in files:
            digest.update(str(file.relative_to(path)).encode())
            with open_file(file) as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    except OSError as error:
        raise FileError(f"cannot read the start's {what} {file}: {error.strerror or error}{advice}") from None
    return f"{what} {digest.hexdigest()[:12]}"


# Quantizers at one plan: their trials and their plans.


def quantizer_trials(study: Study, floating: Trial | None, base: Mapping[str, Any]) -> list[Trial]:
    """Return every quantizer at every plan over the seeds, all from the float network."""
    if not study.quantizers:
        return []
    if floating is None:
        raise InputError(
            "quantizers are compared from the float network, and there is none: give weights or a float_recipe in "
            "[start] beside the checkpoint"
        )
    listed: list[Trial] = []
    for one in study.quantizers:
        method = _load_quantizer(one)
        alike = dict(base) | {"start": floating.id, "role": "quantizer", "method": one.name, "recipe": study.recipe}
        for written in dict.fromkeys(one.at):
            at = _name_plan(one, method, written)
            listed += [Trial(**alike, at=at, seed=seed) for seed in study.seeds]
    return listed


def quantizer_plans(study: Study, graph: Graph, wanted: Sequence[Trial]) -> dict[str, Plan]:
    """Return the plan of every quantizer's trial: all layers at one precision, or as a file says.

    Fixed layers keep their precision. A quantizer without the bits of a layer is refused before anything is trained.
    """
    from bitplan.quant.methods import check_bits, read_method

    files = {_name_of(written): written for one in study.quantizers for written in one.at if is_table(written)}
    plans: dict[str, Plan] = {}
    for trial in wanted:
        if trial.role != "quantizer":
            continue
        if trial.at in files:
            plans[trial.id] = _load_plan(files[trial.at], graph)
        else:
            plans[trial.id] = Plan.uniform(graph, Precision.parse(trial.at))
        try:
            check_bits(read_method(trial.method), plans[trial.id])
        except InputError as error:
            raise InputError(f"[[quantizers]] {study.title_of(trial)} at {trial.at}: {error}") from None
    return plans


def _load_quantizer(one: QuantizerAt) -> Quantizer:
    from bitplan.quant.methods import read_method

    try:
        return read_method(one.name)
    except InputError as error:
        raise InputError(f"[[quantizers]] {one.title}: {error}") from None


def _name_plan(one: QuantizerAt, method: Quantizer, written: str) -> str:
    """Return a trial's name for its plan, after a check that the quantizer has the bits."""
    from bitplan.quant.methods import check_precision

    try:
        if is_table(written):
            for layer, precision in load(written, Plan).precisions.items():
                check_precision(method, precision, f"{written} gives layer {layer!r}")
            return _name_of(written)
        precision = Precision.parse(written)
        check_precision(method, precision, f"{precision} asks for")
        return str(precision)
    except InputError as error:
        raise InputError(
            f"[[quantizers]] {one.title}: {error}. Say at which plans it is tried: at = [\"w2a2\"]"
        ) from None  # fmt: skip


def _load_plan(path: str, graph: Graph) -> Plan:
    plan = load(path, Plan)
    for layer in (layer.name for layer in graph.layers if layer.name not in plan.precisions):
        raise InputError(f"the plan {path} has no precision for {layer}: it is of another network")
    return plan


def _name_of(path: str) -> str:
    return f"{Path(path).stem} {load(path, Plan).id}"


# Controls: every study that limits the spend runs them beside its searches.

PLAIN, RANDOM = "uniform", "random_search"
"""The controls: one knows nothing, the other searches without learning."""
_JUDGE, _SPEND = "judge", "spend"


def with_controls(study: Study) -> Study:
    """Return the study with its controls: `uniform`, and random search with each judge and spend of its choosers.

    They are added if the study sets `spend` and a method chooses within a budget. Controls that the study names itself
    are not doubled.
    """
    bound = [method for method in study.methods if chooses_within_budget(method)]
    if study.spend is None or not bound:
        return study
    there = {_identity(method) for method in study.methods}
    added: list[Method] = []
    for wanted in [Method(name=PLAIN), *(_random_search_like(method) for method in bound)]:
        if _identity(wanted) not in there:
            there.add(_identity(wanted))
            added.append(wanted)
    several = sum(control.name == RANDOM for control in added) > 1
    added = [_add_label(control, details=several) for control in added]
    return study.model_validate(dict(study) | {"methods": (*study.methods, *added)}) if added else study


def _random_search_like(method: Method) -> Method:
    """Return random search with the judge, the spend and the recipe of a method."""
    like: dict[str, JsonValue] = {_JUDGE: _get_option(method, _JUDGE), _SPEND: method.options.get(_SPEND)}
    usual = {_JUDGE: _get_default(RANDOM, _JUDGE), _SPEND: None}
    options: dict[str, JsonValue] = {}
    options |= {name: value for name, value in like.items() if value is not None and value != usual[name]}
    return Method(name=RANDOM, options=options, recipe=method.recipe)


def _get_option(method: Method, name: str) -> Any:
    """Return a method's option, or else its default; None if it has no such option."""
    return method.options.get(name, _get_default(method.name, name))


def _get_default(chooser: str, name: str) -> Any:
    for option in dataclasses.fields(CHOOSERS.get(chooser)):
        if option.name == name:
            return option.default
    return None


def _identity(method: Method) -> tuple[Any, ...]:
    """Return the key by which two methods are the same control, however they are written."""
    if not chooses_within_budget(method):
        return method.name, str(method.options), method.recipe
    others = {name: value for name, value in method.options.items() if name not in (_JUDGE, _SPEND)}
    return method.name, str(others), method.recipe, _get_option(method, _JUDGE), method.options.get(_SPEND)


def _add_label(control: Method, *, details: bool) -> Method:
    """Return the control with its label for tables; `details` add its options."""
    words = ["control", *(str(value) for value in control.options.values() if details)]
    return control.model_copy(update={"label": f"{control.name} ({', '.join(words)})"})
