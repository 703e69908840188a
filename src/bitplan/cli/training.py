"""The verbs that have data: quantize, finetune, evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bitplan.cli.options import (
    Data,
    Device,
    First,
    Fix,
    Free,
    Fresh,
    Input,
    Json,
    Last,
    ModelName,
    Narrow,
    RecipeFile,
    Seed,
    Set,
    TaskName,
    TaskOption,
    Teacher,
    TeacherWeights,
    TextFile,
    Threads,
    TrainDevice,
    Trust,
    Unreached,
    Weights,
    WithValues,
)
from bitplan.cli.progress import showing_progress
from bitplan.cli.steps import fitting, limit_threads, read_rules, refuse_rules, told_graph
from bitplan.cli.terminal import tell
from bitplan.core.errors import InputError

Source = Annotated[str, typer.Argument(help="A zoo name, package.module:factory, or a checkpoint folder.")]
Needed = Annotated[
    str, typer.Option("--task", help="The task: its data, loss and score; a name, or package.module:factory.")
]
Folder = Annotated[Path, typer.Option("--output", "-o", help="The checkpoint folder to write.")]


def add(app: typer.Typer) -> None:
    """Add the verbs of this file."""
    for verb in (quantize, finetune, evaluate):
        app.command()(verb)


def quantize(
    source: Source,
    output: Folder,
    plan: Annotated[Path | None, typer.Option(help="A plan file.")] = None,
    to: Annotated[str | None, typer.Option(help="Instead of a plan: one precision for all, such as w4a4.")] = None,
    task: TaskName = None,
    task_option: TaskOption = [],
    text: TextFile = None,
    data: Data = None,
    samples: Annotated[int, typer.Option(min=1, help="Training samples that set the input steps.")] = 512,
    plain: Annotated[bool, typer.Option(help="Take the first samples, unshuffled and not augmented.")] = False,
    method: Annotated[str | None, typer.Option(help="lsq, pact:decay=0.01 …: `bitplan list quantizers`.")] = None,
    finish: Annotated[str, typer.Option(help="Of weights as they are: round, compensate (GPTQ), or tune.")] = "round",
    percentile: Annotated[float | None, typer.Option(help="For faq and pact: of magnitudes, such as 99.99.")] = None,
    per_channel: Annotated[bool | None, typer.Option(help="One weight step per output channel.")] = None,
    integer: Annotated[bool | None, typer.Option(help="Make a network that integer kernels compute exactly.")] = None,
    unreached: Unreached = "raise",
    weights: Weights = None,
    fresh: Fresh = [],
    model: ModelName = None,
    trust: Trust = False,
    input: Input = None,
    values: WithValues = False,
    fix: Fix = [],
    free: Free = [],
    first: First = None,
    last: Last = None,
    narrow: Narrow = None,
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Quantize by a plan, or all layers alike; a task sets the input steps: model + plan → checkpoint."""
    from bitplan.cli.door import Beside, what_is
    from bitplan.cli.inputs import as_task
    from bitplan.quant.convert import quantize as quantize_model

    task, task_option = as_task(task, task_option, text, data)
    _refuse_contradictions(plan, to, method, percentile)
    warn = _check_before(finish, task or data, output, unreached)
    limit_threads(threads)
    network = what_is(source, Beside(input, weights, fresh, model, seed, values, trust))
    rules = read_rules(to or "", first=first, last=last, narrow=narrow, fix=fix, free=free)
    chosen = _planned(network, rules, plan, to or "")
    method = method or _method_for(chosen.target)
    told: dict[str, Any] = {"method": method, "percentile": percentile, "per_channel": per_channel}
    unseen = network.example if integer and chosen.integers is None else None  # by which an older plan is completed
    made = quantize_model(network.model, chosen, example=unseen, integer=integer, **told)
    _finish_(made, (task, task_option, data, network), finish, samples, seed=None if plain else seed, warn=warn)
    _keep(made, output, network)


def finetune(
    source: Source,
    task: Needed,
    output: Folder,
    recipe: RecipeFile = None,
    set: Set = [],
    teacher: Teacher = None,
    teacher_weights: TeacherWeights = None,
    task_option: TaskOption = [],
    unreached: Unreached = "raise",
    weights: Weights = None,
    fresh: Fresh = [],
    model: ModelName = None,
    trust: Trust = False,
    seed: Seed = 0,
    threads: Threads = None,
    device: TrainDevice = None,
    json: Json = False,
) -> None:
    """Train by a recipe and score: checkpoint → checkpoint. Run again after a kill, it goes on where it was."""
    from bitplan.cli.door import Beside, teacher_of, what_is
    from bitplan.cli.inputs import read_recipe, read_task
    from bitplan.core.malloc_tuning import keep_freed_memory
    from bitplan.quant.checkpoint import check_replaceable
    from bitplan.quant.proof import allow_unreached_
    from bitplan.quant.sites import is_quantized
    from bitplan.tune.log import LOG
    from bitplan.tune.loop import finetune_, training_on

    limit_threads(threads)
    keep_freed_memory()
    check_replaceable(output)
    with training_on(device):
        network = what_is(source, Beside(None, weights, fresh, model, seed, trust=trust))
        told, chosen = read_recipe(recipe, set), read_task(task, task_option, network)
        trained, guide = network.model, teacher_of(teacher, teacher_weights, model, trust=trust)
        if _only_warns(unreached) and is_quantized(trained):
            allow_unreached_(trained)
        work = output.with_name(f"{output.name}.training")
        with showing_progress("fine-tuning") as progress, fitting(trained, chosen):
            log = finetune_(trained, chosen, told, teacher=guide, seed=seed, folder=work, progress=progress)
    _keep(trained, output, network)
    facts = {"steps": len(log.lines), "seconds": round(log.seconds, 1), "log": str(work / LOG)}
    _score(trained, chosen, json, **facts)


def evaluate(
    source: Source,
    task: TaskName = None,
    task_option: TaskOption = [],
    text: TextFile = None,
    integer: Annotated[bool, typer.Option("--integer", help="Compute in integers, by PyTorch's kernels.")] = False,
    weights: Weights = None,
    fresh: Fresh = [],
    model: ModelName = None,
    trust: Trust = False,
    seed: Seed = 0,
    threads: Threads = None,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Score a network on the test split of a task: checkpoint → score."""
    from bitplan.adapters.torch import usable_device
    from bitplan.cli.door import Beside, what_is
    from bitplan.cli.inputs import as_task, read_task

    task, task_option = as_task(task, task_option, text)
    if task is None:
        raise InputError(
            "`bitplan evaluate` needs --task, a task by name, for its data, loss and score (`bitplan list tasks`), "
            "or --text FILE"
        )
    typed = what_is(source, Beside(None, weights, fresh, model, seed, trust=trust))
    chosen, place = read_task(task, task_option, typed), usable_device(device)
    limit_threads(threads)
    network = typed.model.to(place)
    _score(_in_integers(network, chosen) if integer else network, chosen, json)


def _in_integers(model: Any, task: Any) -> Any:
    from bitplan.quant.integer_copy import integer

    with fitting(model, task):
        return integer(model, task.example())


def _refuse_contradictions(plan: Path | None, to: str | None, method: str | None, percentile: float | None) -> None:
    if (plan is None) == (to is None):
        raise InputError("give either --plan FILE or --to PRECISION, such as --to w4a4")
    if percentile is not None and method is not None:
        from bitplan.core.registry import QUANTIZERS
        from bitplan.quant.methods import read_method

        if not read_method(method).percentile:
            users = [name for name in QUANTIZERS if getattr(QUANTIZERS.get(name), "percentile", False)]
            raise InputError(
                f"--percentile is for --method {', '.join(users)}, and {method} has no use for it: leave one out"
            )


def _check_before(finish: str, seen: str | None, output: Path, unreached: str) -> bool:
    """Refuse, before long work begins, a finish that has no data and an output that may not be replaced.

    Tells whether layers that are never run are only warned of.
    """
    from bitplan.quant.checkpoint import check_replaceable
    from bitplan.quant.convert import check_finish

    check_finish(finish, seen)
    check_replaceable(output)
    return _only_warns(unreached)


def _method_for(target: str) -> str | None:
    """The quantizer that makes what a plan's target stores."""
    if not target:
        return None
    from bitplan.costs.files import read_form

    method = read_form(target).method
    tell(f"the plan is for {target}, which stores what --method {method} makes")
    return method


def _only_warns(unreached: str) -> bool:
    if unreached not in ("raise", "warn"):
        raise InputError(f"--unreached is raise or warn, not {unreached!r}")
    return unreached == "warn"


def _planned(network: Any, rules: Any, plan: Path | None, to: str) -> Any:
    """The plan in a file, or all layers at one precision."""
    from bitplan.cli.door import what_is
    from bitplan.core.records import Plan

    if plan is None:
        return Plan.uniform(told_graph(network, rules), to)
    refuse_rules(rules, f"{plan} says what every layer gets")
    return what_is(plan).plan


def _finish_(model: Any, data: tuple[Any, ...], finish: Any, samples: int, *, seed: int | None, warn: bool) -> None:
    """Let a task or batches set the input steps, say where nothing does, and finish the weights."""
    import itertools
    from functools import partial

    from bitplan.cli.inputs import read_data
    from bitplan.quant.ptq import finish_

    task = read_data(*data)
    if task is None:
        if _uncalibrated(model):
            tell("no --task and no --data: the first training batch will set the input steps")
        return
    size = min(64, samples, task.size("train"))
    batches = itertools.islice(task.batches("train", size, seed), -(-samples // size))
    with showing_progress("finishing") as progress, fitting(model, task):
        done = partial(finish_, model, batches, finish, forward=task.forward, progress=progress)
        done(unreached="warn" if warn else "raise")


def _uncalibrated(model: Any) -> bool:
    from bitplan.quant.convert import quantizers_of

    inputs = [quantizer for both in quantizers_of(model).values() for quantizer in both.inputs]
    return any(quantizer.range is None for quantizer in inputs)


def _keep(model: Any, output: Path, network: Any) -> None:
    from bitplan.quant.checkpoint import save_checkpoint

    save_checkpoint(model, output, spec=network.spec, pretrained=network.pretrained)
    tell(f"wrote {output}")


def _score(model: Any, task: Any, json: bool, **facts: Any) -> None:
    """Evaluate, and say so."""
    from bitplan.cli.show import show_score

    with fitting(model, task):
        scores = task.scores(model)
    show_score(task, scores, facts, as_json=json)
