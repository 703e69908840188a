"""The verbs for files that other programs run: export and verify."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitplan.cli.options import Data, Input, Json, TextFile, Threads, Trust
from bitplan.cli.steps import fitting
from bitplan.cli.terminal import say, say_json, tell
from bitplan.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bitplan.core.verdicts import Speed, Verdict

Own = Annotated[
    str | None, typer.Option("--model", help="The model of a checkpoint that names none: package.module:factory.")
]
Method = Annotated[str | None, typer.Option(help="Of a run: the method, by its title; else the best at the budget.")]
Budget = Annotated[str | None, typer.Option(help="Of a run: the budget; else the study's middle one.")]
WhichSeed = Annotated[int | None, typer.Option("--seed", help="Of a run: the seed; else the first that is done.")]


def add(app: typer.Typer) -> None:
    """Put the verbs on the command line."""
    app.command()(export)
    app.command()(verify)


def export(
    source: Annotated[
        Path, typer.Argument(help="The folder of a run, a checkpoint folder, or for recipes a plan (.json).")
    ],
    to: Annotated[str, typer.Option(help="A format by name: `bitplan list exporters`.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write this file.")],
    method: Method = None,
    budget: Budget = None,
    seed: WhichSeed = None,
    option: Annotated[list[str], typer.Option("--option", help="An option of the format: KEY=VALUE. Repeats.")] = [],
    graph: Annotated[Path | None, typer.Option(help="The graph that the plan was made from, for its shapes.")] = None,
    model: Own = None,
    trust: Trust = False,
    input: Input = None,
    widen: Annotated[bool, typer.Option(help="Store wider, or leave float, what the format cannot hold.")] = False,
    force: Annotated[bool, typer.Option(help="Replace an existing file.")] = False,
    threads: Threads = None,
) -> None:
    """Write a quantized model, or a plan as a recipe, for another program.

    Of a run it is the network that its page recommends, unless --method, --budget or --seed say otherwise.
    """
    from bitplan.cli.door import Beside, Pick, RunNetwork, what_is
    from bitplan.core.option_parsing import read_options
    from bitplan.core.records import Graph, Plan
    from bitplan.exporters.base import check_free, make_exporter
    from bitplan.exporters.base import export as write
    from bitplan.store.files import load

    options: dict[str, Any] = read_options(option) | ({"widen": True} if widen else {})
    exporter = make_exporter(to, options)
    plan_only = not exporter.needs_model
    check_free(output, force=force, folder=exporter.folder)
    shapes = load(graph, Graph) if graph else None
    thing = what_is(source, Beside(shape=input, model=model, trust=trust), Pick(method, budget, seed, threads))
    made_of = thing.exported(plan_only=plan_only)
    example, spec = (None, None) if isinstance(made_of, Plan) else (thing.example, thing.spec)
    known: dict[str, Any] = {"graph": shapes or thing.recorded_graph, "example": example, "spec": spec}
    known["pretrained"] = thing.pretrained
    path = write(made_of, output, to, force=force, **known, **options)
    size = sum(one.stat().st_size for one in (path.iterdir() if path.is_dir() else [path]))
    tell(f"wrote {path} ({size:,} bytes)")
    if isinstance(thing, RunNetwork) and not plan_only:
        chosen = {"--method": method, "--budget": budget, "--seed": seed}
        words = [word for name, value in chosen.items() if value is not None for word in (name, str(value))]
        words += ["--trust"] * trust
        tell(f"Next: {shlex.join(['bitplan', 'verify', str(path), '--against', str(source), *words])}")


def verify(
    exported: Annotated[Path, typer.Argument(help="A file that `bitplan export` wrote.")],
    against: Annotated[Path, typer.Option(help="The checkpoint, or the run, that it was made from.")],
    task: Annotated[
        str | None, typer.Option(help="Whose test split both are run on: `bitplan list tasks`; a run has its own.")
    ] = None,
    method: Method = None,
    budget: Budget = None,
    seed: WhichSeed = None,
    option: Annotated[list[str], typer.Option("--option", help="An option of the task: KEY=VALUE. Repeats.")] = [],
    text: TextFile = None,
    data: Data = None,
    model: Own = None,
    trust: Trust = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Compare about this many samples; no scores then.")] = None,
    speed: Annotated[bool, typer.Option(help="Also measure size and time against the float network.")] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Run an exported file beside its checkpoint and compare codes, outputs and scores; exit code 1 if they differ."""
    from bitplan.cli.door import Beside, Pick, what_is
    from bitplan.cli.inputs import as_task
    from bitplan.exporters.verify import verify as compare

    task, options = as_task(task, option, text, data)
    thing = what_is(against, Beside(model=model, trust=trust), Pick(method, budget, seed, threads))
    given = _samples(task, options, data, thing)
    network = thing.quantized
    given = given or thing.task
    if given is None:
        yours = "--data package.module:loader for batches of yours"
        raise InputError(f"say whose test split to run both on: --task NAME (`bitplan list tasks`), or {yours}")
    if data is not None:
        limit = limit or given.size("test")  # which have no score
    with fitting(network, given):
        verdict = compare(exported, network, given, limit=limit, speed=speed)
    if json:
        say_json(verdict.to_json())
    else:
        _show(verdict)
    if not verdict.passed:
        raise typer.Exit(1)


def _samples(task: str | None, option: Sequence[str], data: str | None, thing: Any) -> Any:
    """The task of that name, or one whose test split are the batches that `--data` names; None if neither is typed."""
    from dataclasses import replace

    from bitplan.cli.inputs import read_data, read_task
    from bitplan.tasks.loaded import Loaded

    if data is None:
        return read_task(task, option, thing) if task else None
    found = read_data(task, (), data)
    return replace(found, test=found.train) if isinstance(found, Loaded) and found.test is None else found


def _show(verdict: Verdict) -> None:
    said = "equal" if verdict.codes_equal else "DIFFERENT"
    say(f"codes        {said} in {verdict.layers} layers")
    off = verdict.samples - verdict.close
    say(f"outputs      {verdict.close:,} of {verdict.samples:,} samples within {verdict.tolerance:g}", end="")
    say(f"; {_ties(verdict, off)}" if off and not verdict.rounds else "")
    counts = f"{verdict.predictions_equal:,} of {verdict.predictions:,} equal ({100 * verdict.share:.2f} %)"
    say(f"predictions  {counts}")
    if verdict.control is not None:
        say(f"control      {100 * verdict.control:.2f} % equal to the model's own in double precision, ", end="")
        say(f"{verdict.control_samples:,} samples")
    if verdict.score is not None:
        say(f"{verdict.metric:12} {verdict.score:.2f} exported, {verdict.reference:.2f} here")
    if verdict.speed is not None:
        _show_speed(verdict.speed)
    say(f"verdict      {_said(verdict)}")


def _show_speed(speed: Speed) -> None:
    """Ratios first: the times are this machine's."""
    say(f"size         {speed.smaller:.2f} x smaller than float ({speed.bytes:,} bytes)")
    counts = f"batch {speed.batch}, {speed.threads} thread{'s' * (speed.threads > 1)}"
    milliseconds = f"{1000 * speed.seconds:.2f} ms"
    say(f"speed        {speed.faster:.2f} x the speed of float in {speed.runtime} ({milliseconds}, {counts})")


def _said(verdict: Verdict) -> str:
    if not verdict.passed:
        return "THE FILE DIFFERS"
    if verdict.rounds:
        return f"the file does what the model does, as near as its runtime can: {verdict.rounds}"
    if verdict.enough:
        return "the file does what the model does"
    return "the file does what the model does, as far as the model does it itself: ties decide the rest"


def _ties(verdict: Verdict, off: int) -> str:
    rest = off - verdict.ties - verdict.unexplained
    parts = [f"{verdict.ties} begin at a rounding tie"]
    parts += [f"{verdict.unexplained} UNEXPLAINED"] if verdict.unexplained else []
    parts += [f"{rest} not looked at"] if rest else []
    return ", ".join(parts)
