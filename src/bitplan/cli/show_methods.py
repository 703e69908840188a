"""What methods look at, what they cost and where they come from, as tables."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from bitplan.cli.console import console
from bitplan.cli.show import table
from bitplan.cli.terminal import say, say_json
from bitplan.core.about import about_of

_LETTERS = (
    "passes: of one sample through the network, backwards counts 2; N samples that are looked at, T of an epoch of "
    "training, G groups, C choices, P plans. docs/methods.md has the formulas."
)


def show_methods(methods: Mapping[str, type], *, as_json: bool) -> None:
    """One row for each; of a method that says nothing of itself only what it is."""
    if as_json:
        told = {name: about_of(method) for name, method in methods.items()}
        plain = {name: None if about is None else dataclasses.asdict(about) for name, about in told.items()}
        say_json(json.dumps(plain, indent=1, ensure_ascii=False))
        return
    rows = table("name", "what it is", "data", "labels", "trains", "passes", "source")
    for name, method in methods.items():
        about, what = about_of(method), (method.__doc__ or "").split("\n")[0]
        if about is None:
            rows.add_row(name, what, *["–"] * 5)
            continue
        seen = ["yes" if yes else "no" for yes in (about.data, about.labels, about.trains)]
        rows.add_row(name, what, *seen, about.passes, about.source)
    console().print(rows)
    say(_LETTERS)
