"""Commands that have data: quantize, finetune, evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bitplan.cli.options import (
    Data,
    Device,
    Fresh,
    InputShape,
    Json,
    ModelName,
    QuantizerName,
    RecipeWords,
    RuleWords,
    Seed,
    TaskName,
    Threads,
    Trust,
    Unreached,
    Weights,
    limit_threads,
    read_data,
    read_recipe,
    read_rules,
    read_task,
    refuse_rules,
)
from bitplan.cli.planning import fitting, trace_input
from bitplan.cli.terminal import showing_progress, tell
from bitplan.core.errors import InputError, UnknownName
from bitplan.core.option_parsing import read_options, split_options

Source = Annotated[str, typer.Argument(help="A zoo name, package.module:factory, or a checkpoint folder.")]
NeededTask = Annotated[
    str,
    typer.Option(
        "--task",
        help="The task (data, loss and score) with its options: digits, imagenet:data=DIR, or package.module:factory.",
    ),
]
Folder = Annotated[Path, typer.Option("--output", "-o", help="The checkpoint folder to write.")]
FINISH = {"nearest": "round", "gptq": "compensate", "blockwise": "tune"}
"""--rounding → the argument `finish` of quantize."""
SHARED_OPTIONS = ("per_channel", "percentile")  # of every quantizer, unlike those of one


def quantize(
    source: Source,
    output: Folder,
    plan: Annotated[Path | None, typer.Option(show_default="none", help="A plan file.")] = None,
    bits: Annotated[
        str | None, typer.Option(show_default="none", help="Instead of a plan: one precision for all, such as w4a4.")
    ] = None,
    task: TaskName = None,
    data: Data = None,
    samples: Annotated[int, typer.Option(min=1, help="Training samples that set the scales of inputs.")] = 512,
    plain: Annotated[
        bool, typer.Option("--plain", help="Take the first samples, unshuffled and not augmented.")
    ] = False,
    quantizer: QuantizerName = None,
    rounding: Annotated[
        str, typer.Option(help="How weights are rounded: nearest, gptq, or blockwise (trained block by block).")
    ] = "nearest",
    integer: Annotated[
        bool | None,
        typer.Option(show_default="as the source", help="Make a network that integer kernels compute exactly."),
    ] = None,
    unreached: Unreached = "raise",
    weights: Weights = None,
    fresh: Fresh = [],
    model: ModelName = None,
    trust: Trust = False,
    input: InputShape = None,
    rules: RuleWords = [],
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Quantize by a plan, or all layers alike; a task sets the scales of inputs: model + plan → checkpoint.

    A quantizer also takes per_channel=true (a scale per output channel) and percentile=99.99 (faq and pact begin
    there): --quantizer lsq:per_channel=true.
    """
    from bitplan.cli.inputs import InputOptions, read_input
    from bitplan.quant.convert import quantize as quantize_model

    if (plan is None) == (bits is None):
        raise InputError("give either --plan FILE or --bits PRECISION, such as --bits w4a4")
    method, shared = read_quantizer(quantizer)
    finish, may_miss_layers = _check_before(rounding, task or data, output, unreached)
    limit_threads(threads)
    network = read_input(source, InputOptions(input, weights, fresh, model, seed, trust))
    chosen = _load_plan(network, rules, plan, bits or "")
    method = method or _quantizer_of(chosen.target)
    example = network.example if integer and chosen.integers is None else None  # completes a plan without integers
    made = quantize_model(network.model, chosen, example=example, integer=integer, method=method, **shared)
    order = None if plain else seed
    _finish_(made, read_data(task, data, network), finish, samples, seed=order, may_miss_layers=may_miss_layers)
    _save(made, output, network)


def finetune(
    source: Source,
    task: NeededTask,
    output: Folder,
    recipe: RecipeWords = [],
    unreached: Unreached = "raise",
    weights: Weights = None,
    fresh: Fresh = [],
    model: ModelName = None,
    trust: Trust = False,
    seed: Seed = 0,
    threads: Threads = None,
    device: Annotated[
        str | None, typer.Option(show_default="the one that accelerate finds", help="Where to train: cpu, cuda:1, mps.")
    ] = None,
    json: Json = False,
) -> None:
    """Train by a recipe and score: checkpoint → checkpoint. If it was killed, run it again and it goes on."""
    from bitplan.cli.inputs import InputOptions, load_teacher, read_input
    from bitplan.core.malloc_tuning import keep_freed_memory
    from bitplan.core.trials import Recipe
    from bitplan.quant.checkpoint import check_replaceable
    from bitplan.quant.proof import allow_unreached_
    from bitplan.quant.sites import is_quantized
    from bitplan.tune.log import LOG
    from bitplan.tune.loop import finetune_, training_on

    limit_threads(threads)
    keep_freed_memory()
    check_replaceable(output)
    with training_on(device):
        network = read_input(source, InputOptions(None, weights, fresh, model, seed, trust))
        (read, teacher), chosen = read_recipe(recipe, trust=trust), read_task(task, network)
        trained = network.model
        guide = load_teacher(teacher.get("teacher"), teacher.get("teacher_weights"), model, trust=trust)
        if _only_warns(unreached) and is_quantized(trained):
            allow_unreached_(trained)
        work = output.with_name(f"{output.name}.training")
        with showing_progress("fine-tuning") as progress, fitting(trained, chosen):
            log = finetune_(trained, chosen, read or Recipe(), teacher=guide, seed=seed, folder=work, progress=progress)
    _save(trained, output, network)
    facts = {"steps": len(log.lines), "seconds": round(log.seconds, 1), "log": str(work / LOG)}
    _score(trained, chosen, json, **facts)


def evaluate(
    source: Source,
    task: NeededTask,
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
    from bitplan.cli.inputs import InputOptions, read_input

    network = read_input(source, InputOptions(None, weights, fresh, model, seed, trust))
    chosen, place = read_task(task, network), usable_device(device)
    limit_threads(threads)
    placed = network.model.to(place)
    _score(_in_integers(placed, chosen) if integer else placed, chosen, json)


def read_quantizer(typed: str | None) -> tuple[str | None, dict[str, Any]]:
    """Return the quantizer with its own options, as the library takes it, and the options of every quantizer."""
    from bitplan.core.registry import QUANTIZERS
    from bitplan.quant.methods import read_method

    if typed is None:
        return None, {}
    name, _, options = typed.partition(":")
    pairs = split_options(options)
    shared = read_options([pair for pair in pairs if pair.partition("=")[0] in SHARED_OPTIONS], "--quantizer")
    own = ",".join(pair for pair in pairs if pair.partition("=")[0] not in SHARED_OPTIONS)
    method = f"{name}:{own}" if own else name
    if "percentile" in shared and not read_method(method).percentile:
        users = [user for user in QUANTIZERS if getattr(QUANTIZERS.get(user), "percentile", False)]
        raise InputError(
            f"--quantizer {typed}: percentile is for {', '.join(users)}, and {name} has no use for it: leave it out"
        )
    return method, shared


def _in_integers(model: Any, task: Any) -> Any:
    from bitplan.core.registry import EXECUTIONS

    with fitting(model, task):
        return EXECUTIONS.get("integer")(model, task.example())


def _check_before(rounding: str, data: str | None, output: Path, unreached: str) -> tuple[str, bool]:
    """Refuse, before long work begins, a rounding without its data and an output that may not be replaced.

    Return the library's word for the rounding, and True if layers that are never run are only warned of.
    """
    from bitplan.quant.checkpoint import check_replaceable

    if rounding not in FINISH:
        raise UnknownName("rounding", rounding, FINISH)
    if rounding != "nearest" and data is None:
        raise InputError(f"--rounding {rounding} looks at the inputs of layers: give --task or --data")
    check_replaceable(output)
    return FINISH[rounding], _only_warns(unreached)


def _quantizer_of(target: str) -> str | None:
    """Return the quantizer that makes the numbers that a plan's target stores."""
    if not target:
        return None
    from bitplan.costs.files import read_form

    method = read_form(target).method
    tell(f"the plan is for {target}, which stores what --quantizer {method} makes")
    return method


def _only_warns(unreached: str) -> bool:
    if unreached not in ("raise", "warn"):
        raise InputError(f"--unreached is raise or warn, not {unreached!r}")
    return unreached == "warn"


def _load_plan(network: Any, rules: list[str], plan: Path | None, bits: str) -> Any:
    """Return the plan in a file, or all layers at one precision."""
    from bitplan.cli.inputs import read_input
    from bitplan.core.records import Plan

    fixed, links = read_rules(bits, rules)
    if plan is None:
        return Plan.uniform(trace_input(network, fixed, links), bits)
    refuse_rules(fixed, f"{plan} says the precision of every layer")
    return read_input(plan).plan


def _finish_(model: Any, task: Any, finish: Any, samples: int, *, seed: int | None, may_miss_layers: bool) -> None:
    """Let a task or batches set the scales of inputs, say so if nothing does, and finish the weights."""
    import itertools
    from functools import partial

    from bitplan.quant.ptq import finish_

    if task is None:
        if _is_uncalibrated(model):
            tell("no --task and no --data: the first training batch will set the scales of inputs")
        return
    size = min(64, samples, task.size("train"))
    batches = itertools.islice(task.batches("train", size, seed), -(-samples // size))
    with showing_progress("finishing") as progress, fitting(model, task):
        finish_with = partial(finish_, model, batches, finish, forward=task.forward, progress=progress)
        finish_with(unreached="warn" if may_miss_layers else "raise")


def _is_uncalibrated(model: Any) -> bool:
    from bitplan.quant.convert import quantizers_of

    inputs = [quantizer for both in quantizers_of(model).values() for quantizer in both.inputs]
    return any(quantizer.range is None for quantizer in inputs)


def _save(model: Any, output: Path, network: Any) -> None:
    from bitplan.quant.checkpoint import save_checkpoint

    save_checkpoint(model, output, spec=network.spec, pretrained=network.pretrained)
    tell(f"wrote {output}")


def _score(model: Any, task: Any, json: bool, **facts: Any) -> None:
    """Evaluate, and say so."""
    from bitplan.cli.show import show_score

    with fitting(model, task):
        scores = task.scores(model)
    show_score(task, scores, facts, as_json=json)
