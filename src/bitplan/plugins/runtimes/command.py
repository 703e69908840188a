"""The command `bitplan measure`, which times a network layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitplan.cli.options import Bits, InputShape, Json, RuleWords, Target, Trust, read_rules
from bitplan.cli.planning import write_record
from bitplan.cli.terminal import showing_progress, tell
from bitplan.core.defaults import CHOICES

if TYPE_CHECKING:
    from bitplan.core.latencies import Latency

_KEPT = ".measuring"  # ends the name of the folder beside the output that a killed measurement goes on from


def measure(
    target: Target,
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the record to this file.")],
    on: Annotated[
        str,
        typer.Option(help="The runtime, with options of its format: onnxruntime, openvino, torch, or matmulnbits."),
    ] = "onnxruntime",
    bits: Bits = CHOICES,
    threads: Annotated[int, typer.Option(min=1, help="How many CPU threads the runtime may use.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="How many samples at once.")] = 1,
    integer: Annotated[
        bool | None, typer.Option(show_default="if the runtime needs them", help="Time networks made for integers.")
    ] = None,
    input: InputShape = None,
    trust: Trust = False,
    rules: RuleWords = [],
    json: Json = False,
) -> None:
    """Time every layer at every precision, on this machine: a cost for plan (--cost FILE).

    If it was killed, run it again and it goes on.
    """
    from bitplan.cli.inputs import InputOptions, read_input
    from bitplan.core.option_parsing import read_named
    from bitplan.core.progress import clock
    from bitplan.plugins.runtimes.latency import How, forget
    from bitplan.plugins.runtimes.latency import measure as measure_layers

    fixed, links = read_rules(bits, rules)
    runtime, options = read_named(on, "--on")
    network = read_input(target, InputOptions(input=input, trust=trust))
    model, graph, folder = network.model, network.graph(fixed, links), output.with_name(output.name + _KEPT)
    how = How(threads=threads, batch=batch, integer=integer, options=options)
    how["announce"] = lambda seconds: tell(f"about {clock(seconds)} to go")
    with showing_progress("measuring", left=False) as progress:
        found = measure_layers(
            model, network.example, runtime, choices=bits, graph=graph, folder=folder, progress=progress, **how
        )
    done = write_record(found, output, json)
    forget(folder)
    if not done:
        _show(found, output)


def _show(found: Latency, output: Path) -> None:
    """Print the times of whole networks, whether those of layers add up, and the next command."""
    from bitplan.cli.show import console, table

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
    out.print(f"\nNext: bitplan plan {about.model} --cost {output} --bits {written} --budget {budget}{made}")
