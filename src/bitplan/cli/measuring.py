"""The verb that times a network layer by layer: measure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitplan.cli.options import Choices, First, Fix, Free, Input, Json, Last, Narrow, Target, Trust, WithValues
from bitplan.cli.progress import showing_progress
from bitplan.cli.steps import emit, read_rules
from bitplan.cli.terminal import tell
from bitplan.core.defaults import CHOICES

if TYPE_CHECKING:
    from bitplan.core.latencies import Latency

_KEPT = ".measuring"  # ends the name of the folder beside the output that a killed measurement goes on from


def add(app: typer.Typer) -> None:
    """Put the verb on the command line."""
    app.command()(measure)


def measure(
    target: Target,
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the record to this file.")],
    on: Annotated[str, typer.Option(help="onnxruntime, openvino, torch, or matmulnbits.")] = "onnxruntime",
    choices: Choices = CHOICES,
    threads: Annotated[int, typer.Option(min=1, help="How many CPU threads the runtime may use.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="How many samples at once.")] = 1,
    integer: Annotated[
        bool | None, typer.Option(help="Networks made for integers; where a runtime needs them unless said.")
    ] = None,
    option: Annotated[list[str], typer.Option("--option", help="An option of the file's format. Repeats.")] = [],
    input: Input = None,
    values: WithValues = False,
    trust: Trust = False,
    fix: Fix = [],
    free: Free = [],
    first: First = None,
    last: Last = None,
    narrow: Narrow = None,
    json: Json = False,
) -> None:
    """Time every layer at every choice, on this machine: a cost for plan, price and frontier (--cost FILE).

    Killed and typed again, it goes on where it was.
    """
    from bitplan.cli.door import Beside, what_is
    from bitplan.core.option_parsing import read_options
    from bitplan.core.progress import clock
    from bitplan.plugins.runtimes.latency import How, forget
    from bitplan.plugins.runtimes.latency import measure as measure_layers

    rules = read_rules(choices, first=first, last=last, narrow=narrow, fix=fix, free=free)
    thing = what_is(target, Beside(shape=input, values=values, trust=trust))
    model, graph, folder = thing.model, thing.graph(rules), output.with_name(output.name + _KEPT)
    how = How(threads=threads, batch=batch, integer=integer, options=read_options(option))
    how["announce"] = lambda seconds: tell(f"about {clock(seconds)} to go")
    with showing_progress("measuring", left=False) as progress:
        found = measure_layers(
            model, thing.example, on, choices=choices, graph=graph, folder=folder, progress=progress, **how
        )
    done = emit(found, output, json)
    forget(folder)
    if not done:
        _show(found, output)


def _show(found: Latency, output: Path) -> None:
    """Whole networks, what does not differ, whether times add up, and what to type next."""
    from bitplan.cli.console import console
    from bitplan.cli.show import table

    about = found.about
    named = f"{about.model} in {about.runtime}, {about.threads} thread{'s' * (about.threads > 1)}, batch {about.batch}"
    rows = table("choice", ">ms", ">±", ">× the highest", ">sum of layers", title=named)
    highest = found.whole[about.choices[-1]].taken.ns
    for choice, whole in found.whole.items():
        ms, spread = whole.taken.ns / 1e6, whole.taken.spread / 1e6
        rows.add_row(str(choice), f"{ms:.3f}", f"{spread:.3f}", f"{highest / whole.taken.ns:.2f}", f"{whole.share:.0%}")
    out = console()
    out.print(rows)
    for group in found.alike:
        names = " and ".join((", ".join(map(str, group[:-1])), str(group[-1])))
        out.print(f"\n{names} take the same time here: lower bits save memory, not time (--budget memory=…)")
    if found.mixed is not None:
        expected, took = found.mixed.expected / 1e6, found.mixed.taken.ns / 1e6
        charged = ", which raised layers are charged" if found.mixed.among_others != 1 else ""
        out.print(
            f"\nEvery second group at {about.choices[0]}: {took:.3f} ms, where its layers add up to {expected:.3f} ms "
            f"({found.mixed.error:+.1%}{charged})"
        )
    if found.beside:
        shown = ", ".join(found.beside[:3]) + (" …" if len(found.beside) > 3 else "")
        out.print(f"\nNot told apart, their time is in the layers before them: {shown}")
    written = ",".join(map(str, about.choices))
    low = found.whole[about.choices[0]].taken.ns
    budget = f"{(low + highest) / 2e6:.3g}ms"
    made = ", and quantize with --integer" if about.integer else ""
    out.print(f"\nNext: bitplan plan {about.model} --cost {output} --choices {written} --budget {budget}{made}")
