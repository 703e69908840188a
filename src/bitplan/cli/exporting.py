"""Commands for files that other programs run: export and verify."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitplan.cli.options import Data, InputShape, Json, ModelName, TaskName, Threads, Trust, read_data, read_task
from bitplan.cli.planning import fitting
from bitplan.cli.terminal import say, say_json, tell
from bitplan.core.errors import InputError
from bitplan.core.option_parsing import read_named

if TYPE_CHECKING:
    from bitplan.core.verdicts import Speed, Verdict

MethodTitle = Annotated[
    str | None, typer.Option(show_default="the best at the budget", help="Of a run: the method, by its title.")
]
RunBudget = Annotated[str | None, typer.Option(show_default="the study's middle one", help="Of a run: the budget.")]
RunSeed = Annotated[int | None, typer.Option("--seed", show_default="the first done", help="Of a run: the seed.")]


def export(
    source: Annotated[
        Path, typer.Argument(help="The folder of a run, a checkpoint folder, or for recipes a plan (.json).")
    ],
    format: Annotated[
        str,
        typer.Option("--format", help="A format with its options: onnx, mlx:group_size=64 (`bitplan list exporters`)."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write this file.")],
    method: MethodTitle = None,
    budget: RunBudget = None,
    seed: RunSeed = None,
    graph: Annotated[
        Path | None, typer.Option(show_default="none", help="The graph that the plan was made from, for its shapes.")
    ] = None,
    model: ModelName = None,
    trust: Trust = False,
    input: InputShape = None,
    widen: Annotated[
        bool, typer.Option("--widen", help="Store wider, or leave float, what the format cannot hold.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    threads: Threads = None,
) -> None:
    """Write a quantized model, or a plan as a recipe, for another program.

    Of a run it is the network that its page recommends, unless --method, --budget or --seed say otherwise.
    """
    from bitplan.cli.inputs import InputOptions, RunChoice, RunNetwork, read_input
    from bitplan.core.records import Graph, Plan
    from bitplan.exporters.base import check_free, make_exporter
    from bitplan.exporters.base import export as write
    from bitplan.store.files import load

    name, options = read_named(format, "--format")
    options |= {"widen": True} if widen else {}
    exporter = make_exporter(name, options)
    plan_only = not exporter.needs_model
    check_free(output, force=force, folder=exporter.folder)
    shapes = load(graph, Graph) if graph else None
    options_beside = InputOptions(input=input, model=model, trust=trust)
    network = read_input(source, options_beside, RunChoice(method, budget, seed, threads))
    content = network.get_content(plan_only=plan_only)
    example, spec = (None, None) if isinstance(content, Plan) else (network.example, network.spec)
    known: dict[str, Any] = {"graph": shapes or network.recorded_graph, "example": example, "spec": spec}
    known["pretrained"] = network.pretrained
    path = write(content, output, name, force=force, **known, **options)
    size = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))
    tell(f"wrote {path} ({size:,} bytes)")
    if isinstance(network, RunNetwork) and not plan_only:
        chosen = {"--method": method, "--budget": budget, "--seed": seed}
        words = [word for flag, value in chosen.items() if value is not None for word in (flag, str(value))]
        words += ["--trust"] * trust
        tell(f"Next: {shlex.join(['bitplan', 'verify', str(path), '--against', str(source), *words])}")


def verify(
    exported: Annotated[Path, typer.Argument(help="A file that `bitplan export` wrote.")],
    against: Annotated[Path, typer.Option(help="The checkpoint, or the run, that it was made from.")],
    task: TaskName = None,
    data: Data = None,
    method: MethodTitle = None,
    budget: RunBudget = None,
    seed: RunSeed = None,
    model: ModelName = None,
    trust: Trust = False,
    limit: Annotated[
        int | None, typer.Option(min=1, show_default="all", help="Compare about this many samples; no scores then.")
    ] = None,
    speed: Annotated[
        bool, typer.Option("--speed", help="Also measure size and time against the float network.")
    ] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Run an exported file beside its checkpoint and compare codes, outputs and scores; exit code 1 if they differ."""
    from bitplan.cli.inputs import InputOptions, RunChoice, read_input
    from bitplan.exporters.verify import verify as compare

    options = InputOptions(model=model, trust=trust)
    network = read_input(against, options, RunChoice(method, budget, seed, threads))
    samples = _read_samples(task, data, network)
    quantized = network.quantized_model
    samples = samples or network.task
    if samples is None:
        yours = "--data package.module:loader for batches of yours"
        raise InputError(f"say whose test split to run both on: --task NAME (`bitplan list tasks`), or {yours}")
    if data is not None:
        limit = limit or samples.size("test")  # which have no score
    with fitting(quantized, samples):
        verdict = compare(exported, quantized, samples, limit=limit, speed=speed)
    if json:
        say_json(verdict.to_json())
    else:
        _show(verdict)
    if not verdict.passed:
        raise typer.Exit(1)


def _read_samples(task: str | None, data: str | None, network: Any) -> Any:
    """Return the task, or one whose test split are the batches that `--data` names; None if neither is typed."""
    from dataclasses import replace

    from bitplan.tasks.loaded import Loaded

    if data is None:
        return None if task is None else read_task(task, network)
    loaded = read_data(task, data)
    return replace(loaded, test=loaded.train) if isinstance(loaded, Loaded) and loaded.test is None else loaded


def _show(verdict: Verdict) -> None:
    said = "equal" if verdict.codes_equal else "DIFFERENT"
    say(f"codes        {said} in {verdict.layers} layers")
    off = verdict.samples - verdict.close
    say(f"outputs      {verdict.close:,} of {verdict.samples:,} samples within {verdict.tolerance:g}", end="")
    say(f"; {_describe_ties(verdict, off)}" if off and not verdict.rounds else "")
    counts = f"{verdict.predictions_equal:,} of {verdict.predictions:,} equal ({100 * verdict.share:.2f} %)"
    say(f"predictions  {counts}")
    if verdict.control is not None:
        say(f"control      {100 * verdict.control:.2f} % equal to the model's own in double precision, ", end="")
        say(f"{verdict.control_samples:,} samples")
    if verdict.score is not None:
        say(f"{verdict.metric:12} {verdict.score:.2f} exported, {verdict.reference:.2f} here")
    if verdict.speed is not None:
        _show_speed(verdict.speed)
    say(f"verdict      {_verdict_text(verdict)}")


def _show_speed(speed: Speed) -> None:
    """Ratios first: the times are this machine's."""
    say(f"size         {speed.smaller:.2f} x smaller than float ({speed.bytes:,} bytes)")
    counts = f"batch {speed.batch}, {speed.threads} thread{'s' * (speed.threads > 1)}"
    milliseconds = f"{1000 * speed.seconds:.2f} ms"
    say(f"speed        {speed.faster:.2f} x the speed of float in {speed.runtime} ({milliseconds}, {counts})")


def _verdict_text(verdict: Verdict) -> str:
    if not verdict.passed:
        return "THE FILE DIFFERS"
    if verdict.rounds:
        return f"the file does what the model does, as near as its runtime can: {verdict.rounds}"
    if verdict.enough:
        return "the file does what the model does"
    return "the file does what the model does, as far as the model does it itself: ties decide the rest"


def _describe_ties(verdict: Verdict, off: int) -> str:
    rest = off - verdict.ties - verdict.unexplained
    parts = [f"{verdict.ties} begin at a rounding tie"]
    parts += [f"{verdict.unexplained} UNEXPLAINED"] if verdict.unexplained else []
    parts += [f"{rest} not looked at"] if rest else []
    return ", ".join(parts)
