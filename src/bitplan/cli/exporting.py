"""The verbs for files that other programs run: export and verify."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitplan.cli.options import Input, Json

if TYPE_CHECKING:
    from bitplan.core.verdicts import Verdict

Own = Annotated[
    str | None, typer.Option("--model", help="The model of a checkpoint that names none: package.module:factory.")
]


def add(app: typer.Typer) -> None:
    """Put the verbs on the command line."""
    app.command()(export)
    app.command()(verify)


def export(
    source: Annotated[Path, typer.Argument(help="A checkpoint folder, or for recipes a plan (.json).")],
    to: Annotated[str, typer.Option(help="A format by name: `bitplan list exporters`.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write this file.")],
    option: Annotated[list[str], typer.Option("--option", help="An option of the format: KEY=VALUE. Repeats.")] = [],
    graph: Annotated[Path | None, typer.Option(help="The graph that the plan was made from, for its shapes.")] = None,
    model: Own = None,
    input: Input = None,
    widen: Annotated[bool, typer.Option(help="Store wider, or leave float, what the format cannot hold.")] = False,
    force: Annotated[bool, typer.Option(help="Replace an existing file.")] = False,
) -> None:
    """Write a quantized model, or a plan as a recipe, for another program."""
    from bitplan.cli.inputs import read_options
    from bitplan.core.records import Graph, Plan
    from bitplan.core.store import load
    from bitplan.exporters.base import export as write

    options: dict[str, Any] = read_options(option) | ({"widen": True} if widen else {})
    shapes = load(graph, Graph) if graph else None
    if source.suffix == ".json":
        path = write(load(source, Plan), output, to, graph=shapes, force=force, **options)
    else:
        quantized, example, spec = _opened(source, model, input)
        path = write(quantized, output, to, graph=shapes, example=example, spec=spec, force=force, **options)
    print(f"wrote {path} ({path.stat().st_size:,} bytes)", file=sys.stderr)


def verify(
    exported: Annotated[Path, typer.Argument(help="A file that `bitplan export` wrote.")],
    against: Annotated[Path, typer.Option(help="The checkpoint that it was made from.")],
    task: Annotated[str, typer.Option(help="Whose test split both are run on: `bitplan list tasks`.")],
    option: Annotated[list[str], typer.Option("--option", help="An option of the task: KEY=VALUE. Repeats.")] = [],
    model: Own = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Compare about this many samples; no scores then.")] = None,
    json: Json = False,
) -> None:
    """Run an exported file beside its checkpoint and compare codes, outputs and scores; exit code 1 if they differ."""
    from bitplan.cli.inputs import read_options
    from bitplan.exporters.verify import verify as compare
    from bitplan.tasks.base import load_task

    data = load_task(task, **read_options(option))
    verdict = compare(exported, _opened(against, model, None)[0], data, limit=limit)
    if json:
        print(verdict.to_json(), end="")
    else:
        _show(verdict)
    if not verdict.passed:
        raise typer.Exit(1)


def _opened(folder: Path, own: str | None, shape: str | None) -> tuple[Any, Any, str | None]:
    """The model of a checkpoint, an example of its input, and its name in the zoo."""
    from bitplan.cli.inputs import example_of
    from bitplan.core.checkpoints import Checkpoint
    from bitplan.core.errors import FileError
    from bitplan.core.store import load
    from bitplan.models.zoo import load_model
    from bitplan.quant.checkpoint import load_checkpoint

    about = folder / "checkpoint.json"
    if not about.is_file():
        raise FileError(
            f"{folder} is no checkpoint folder of bitplan's (it has no checkpoint.json), nor a plan (.json)"
        )
    spec = load(about, Checkpoint).spec
    base, example = load_model(own) if own else load_model(spec, weightless=True) if spec else (None, None)
    model = load_checkpoint(folder, base if own else None)
    return model, example_of(shape) if shape else example, spec


def _show(verdict: Verdict) -> None:
    said = "equal" if verdict.codes_equal else "DIFFERENT"
    print(f"codes        {said} in {verdict.layers} layers")
    off = verdict.samples - verdict.close
    print(f"outputs      {verdict.close:,} of {verdict.samples:,} samples within {verdict.tolerance:g}", end="")
    print(f"; {_ties(verdict, off)}" if off else "")
    share = 100 * verdict.predictions_equal / max(1, verdict.predictions)
    print(f"predictions  {verdict.predictions_equal:,} of {verdict.predictions:,} equal ({share:.2f} %)")
    if verdict.score is not None:
        print(f"{verdict.metric:12} {verdict.score:.2f} exported, {verdict.reference:.2f} here")
    print("verdict      " + ("the file does what the model does" if verdict.passed else "THE FILE DIFFERS"))


def _ties(verdict: Verdict, off: int) -> str:
    rest = off - verdict.ties - verdict.unexplained
    parts = [f"{verdict.ties} begin at a rounding tie"]
    parts += [f"{verdict.unexplained} UNEXPLAINED"] if verdict.unexplained else []
    parts += [f"{rest} not looked at"] if rest else []
    return ", ".join(parts)
