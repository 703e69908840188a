"""What is typed, looked at before a verb begins: words that mean nothing, and outputs that must not be written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from bitplan.core.errors import InputError
from bitplan.core.shown import shown
from bitplan.core.store import is_same, through_links

Function = TypeVar("Function", bound=Callable[..., Any])
_OUTPUTS = ("output", "html")  # options that name what is written


class Verb(TyperCommand):
    """A verb, whose outputs are looked at before it begins."""

    def invoke(self, ctx: Any) -> Any:
        """Write through links, and never over what is read."""
        for name in _OUTPUTS:
            output = ctx.params.get(name)
            if output is not None:
                _refuse_own_source(output, [value for key, value in ctx.params.items() if key != name])
                ctx.params[name] = through_links(output)
        return super().invoke(ctx)


def _refuse_own_source(output: Path, others: list[Any]) -> None:
    """Refuse an output that is among the files and folders that were typed beside it, by whatever name."""
    typed = [one for value in others for one in (value if isinstance(value, list | tuple) else (value,))]
    for one in typed:
        if isinstance(one, str | Path) and is_same(Path(one), output):
            raise InputError(f"{output} is also what is read ({one}), and would be replaced: write to another name")


class Verbs(TyperGroup):
    """All verbs; what is wrong with typed words is shown escaped, since a file's name may be among them."""

    def make_context(self, *given: Any, **options: Any) -> Any:
        """Read the words before the verb."""
        with _escaping():
            return super().make_context(*given, **options)

    def invoke(self, ctx: Any) -> Any:
        """Read the words of the verb, and do it."""
        with _escaping():
            return super().invoke(ctx)


@contextmanager
def _escaping() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if hasattr(error, "format_message"):  # click's, which typer may bring itself
            error.message = shown(str(error.message))  # type: ignore[attr-defined]
        raise


class App(typer.Typer):
    """The command line, every command of which is a `Verb`."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Function], Function]:
        """Add a verb."""
        return super().command(name, cls=Verb, **options)
