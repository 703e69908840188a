"""trials: a study → everything that it trains, each with an id that says what its score depends on."""

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
from bitplan.core.studies import FLOAT, Agenda, Estimation, Method, QuantizerAt, Start, Study
from bitplan.core.trials import Recipe, Trial
from bitplan.core.trust import names_code
from bitplan.gains.base import is_bound, make_gain
from bitplan.store.files import load, open_file
from bitplan.store.user_tables import is_table
from bitplan.study.spec import DATA

if TYPE_CHECKING:
    from bitplan.quant.methods import Quantizer


_NO_PART = ("workers",)  # options of a task that no score depends on


@dataclass(frozen=True)
class Starts:
    """The trials that others start from: the float network (None: there is none), and the high-precision one.

    `others` are networks at the highest choice that only methods look at, by their titles.
    """

    floating: Trial | None
    high: Trial
    others: dict[str, Trial]

    def of(self, method: Method) -> Trial:
        """The network that a method estimates from: its own, or the one that trials start from."""
        return self.others.get(method.title, self.high)

    @property
    def all(self) -> list[Trial]:
        """Each once, in the order in which they are made."""
        found = [self.high, *self.others.values()]
        found = [self.floating, *found] if self.floating is not None else found
        return list({trial.id: trial for trial in found}.values())


def all_starts(study: Study) -> tuple[Starts, ...]:
    """One for each seed of the study's start."""
    return tuple(starts(study, seed) for seed in study.start.seeds or (study.start.seed,))


def made_by(study: Study) -> list[Trial]:
    """The trials that make all starts, each once: one float network may serve several."""
    found = [trial for one in all_starts(study) for trial in one.all]
    return list({trial.id: trial for trial in found}.values())


def starts(study: Study, seed: int | None = None) -> Starts:
    """The float network from weights or trained, and from it the one at the highest choice; the first unless said.

    The seed has a part in the float network only where that is trained, or parts of it are random.
    """
    start, base = study.start, _base(study)
    seed = start.seed if seed is None else seed
    floating = None
    if start.weights is not None or start.float_recipe is not None:
        source = _digest_of_weights(start) if start.weights else "random weights"
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
    high = _high(study, made, start.options, f"{study.choices[-1]} start", seed)
    if start.checkpoint is not None:
        high = high.model_copy(update={"recipe": None})
    return Starts(floating, high, {one.title: _own(study, one, floating, seed) for one in _starting(study)})


def _starting(study: Study) -> list[Method]:
    """The methods that look at another network than the study's."""
    usual = study.start.options if study.start.checkpoint is None else None
    return [method for method in study.methods if method.start not in (None, usual)]


def _own(study: Study, method: Method, floating: Trial | None, seed: int) -> Trial:
    """The network that a method looks at."""
    assert method.start is not None, "_starting gives no other"
    if floating is None:
        raise InputError(
            f"{method.title} has a start of its own, and there is no float network to make it from: give weights in "
            "[start]"
        )
    shown = ", ".join(f"{key}={value}" for key, value in method.start.items())
    return _high(study, floating.id, method.start, f"{study.choices[-1]} start, {shown}", seed)


def _high(study: Study, origin: str, options: dict[str, Any], name: str, seed: int) -> Trial:
    """A network at the highest choice, quantized with these options."""
    if options:
        _check_options(study, options)
    return Trial(
        **_base(study),
        start=origin,
        role="start",
        method=name,
        precision=study.choices[-1],
        options={**options, "rules": study.rules.model_dump(mode="json")},
        recipe=study.start.recipe,
        seed=seed,
    )


def trials(study: Study) -> list[Trial]:
    """All trials: the starts, then from each the references over the seeds and every method at every budget over them.

    Quantizers are compared from the first float network alone.
    """
    found = all_starts(study)
    listed = made_by(study)
    of_quantizers = quantizer_trials(study, found[0].floating, _base(study))
    if not study.methods:  # quantizers alone begin with the float network
        return [trial for trial in listed[:1] if trial.role == "float"] + of_quantizers
    for start, seed in zip(found, study.start.seeds or (None,), strict=True):
        listed += _from(study, start.high.id, seed)
    return listed + of_quantizers


def _from(study: Study, start: str, start_seed: int | None) -> list[Trial]:
    """The references and the methods' trials from one start."""
    base = _base(study) | {"start": start, "recipe": study.recipe, "start_seed": start_seed}
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
            Trial(**chosen | _lots(study, method, seed), budgets=(budget,), seed=seed)
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
    """The trials as a record."""
    return Agenda(study=study.id, trials=tuple(trials(study)))


def selector_of(method: Method) -> str:
    """The selector asked for, or the one that the method is defined with."""
    gain, _ = make_gain(method.name, method.options)
    return method.selector or gain.selector


def gain_recipe(study: Study, method: Method) -> Recipe:
    """What a method trains with: its own recipe, or that of the network it starts from."""
    return method.recipe or study.start.recipe or study.recipe


def _lots(study: Study, method: Method, seed: int) -> dict[str, Any]:
    """What a method that chooses within a budget, and draws lots, begins with for a seed of training."""
    if not _chooses_within_budget(method):
        return {}
    return {"gain_seed": study.gain_seed + seed, "gain_spend": _spend(study, method)}


def _chooses_within_budget(method: Method) -> bool:
    return method.name in CHOOSERS and is_bound(CHOOSERS.get(method.name))  # else it is a table's path


def _spend(study: Study, method: Method) -> float | None:
    """The study's, unless the method has its own."""
    return None if "spend" in method.options else study.spend


def estimations(study: Study, graph: str, method: Method, first: Starts | None = None) -> list[Estimation]:
    """What the gains of a method from one of the starts depend on; `graph` is the graph's id.

    A method that chooses within a budget has an estimate for each budget and seed of the study; others have one.
    """
    one = estimation(study, graph, method, first)
    if not _chooses_within_budget(method):
        return [one]
    alike = {"cost": study.cost, "spend": _spend(study, method)}
    return [
        one.model_copy(update={"budgets": (budget,), "seed": study.gain_seed + seed, **alike})
        for budget in study.budgets
        for seed in study.seeds
    ]


def estimation(study: Study, graph: str, method: Method, first: Starts | None = None) -> Estimation:
    """What one estimate depends on, whatever the budget."""
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


def _base(study: Study) -> dict[str, Any]:
    return {"task": study.task, "model": study.model, "choices": study.choices, "selector": "none"}


def _task_name(study: Study) -> str:
    """Name, version, options and how it is scored; of the data only its folder's name, so that it may be moved.

    Of a task that code makes the name is all, since nothing is imported to tell which trials there are.
    It stands in what the first network starts from, so the ids of all trials depend on it.
    """
    options = {key: value for key, value in study.task_options.items() if key not in _NO_PART}
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
    """Refuse options of quantize that there are not, and choices that the method has no bits for."""
    from bitplan.quant.methods import check_has, read_method, told_by

    try:
        method = read_method(told_by(options).get("method") or "lsq")
        for choice in study.choices:
            check_has(method, choice, f"the choice {choice} asks for")
    except InputError as error:
        raise InputError(f"[start] options: {error}") from None


def _digest_of_weights(start: Start) -> str:
    advice = f"; download {start.weights_from} and put it there" if start.weights_from else ""
    return _digest(Path(start.weights or ""), "weights", advice)


def _digest(path: Path, what: str, advice: str) -> str:
    """The content of a file, or of all files of a folder; where it is missing, what to do is said."""
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


# --- Quantizers at one plan: their trials and their plans.


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
    from bitplan.quant.methods import check_bits, read_method

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
    from bitplan.quant.methods import read_method

    try:
        return read_method(one.name)
    except InputError as error:
        raise InputError(f"[[quantizers]] {one.title}: {error}") from None


def _at(one: QuantizerAt, method: Quantizer, written: str) -> str:
    """How a trial calls the plan that it is tried at, once the quantizer is known to have its bits."""
    from bitplan.quant.methods import check_has

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


# --- Controls: what every study with a limit on choosing runs beside its searches, whether it names them or not.

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
