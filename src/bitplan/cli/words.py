"""What is typed, looked at before a verb begins: words that mean nothing, and outputs that must not be written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from bitplan.core.checkpoints import ABOUT, ENDINGS
from bitplan.core.errors import InputError, UnknownName
from bitplan.core.runs import RunFolder
from bitplan.core.store import is_below, is_same, refuse_no_file, through_links
from bitplan.core.temporary import clear_left

Function = TypeVar("Function", bound=Callable[..., Any])
_OUTPUTS = ("output", "html")  # options that name what is written
_TO_FOLDERS = ("quantize", "finetune", "export")  # verbs whose output may be a folder, and which look at it themselves


class Verb(TyperCommand):
    """A verb, whose words are refused in one line, and whose outputs are looked at before it begins."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the words of the verb."""
        with _refusing(ctx, args):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Write through links, and never over what is read."""
        for name in _OUTPUTS:
            output = ctx.params.get(name)
            if output is not None:
                _refuse_own_source(output, [value for key, value in ctx.params.items() if key != name])
                ctx.params[name] = written = through_links(output)
                if ctx.command.name not in _TO_FOLDERS:
                    refuse_no_file(written)
                clear_left(written.parent, written.name)
        return super().invoke(ctx)


def _refuse_own_source(output: Path, others: list[Any]) -> None:
    """Refuse an output that is, holds, or is a part of what was typed beside it, by whatever name; or a run's own."""
    run = RunFolder.owning(output)
    if run is not None:
        raise InputError(f"{output} is among the files that the run {run.path} keeps itself: write to another name")
    typed = [one for value in others for one in (value if isinstance(value, list | tuple) else (value,))]
    for one in typed:
        if isinstance(one, str | Path) and str(one):
            source = Path(one)
            said = f"{output} is also what is read ({one}), and would be replaced: write to another name"
            if is_same(source, output) or _is_part(output, source):
                raise InputError(said)
            if (output / ABOUT).is_file() and is_below(source, output):
                raise InputError(f"{output} holds what is read ({one}), and would be replaced: write to another name")


def _is_part(output: Path, source: Path) -> bool:
    """Whether a file is among those that a folder of weights is read from."""
    read = output.name in (ABOUT, "config.json") or output.name.endswith((*ENDINGS, ".index.json"))
    return read and output.is_file() and source.is_dir() and is_below(output, source)


class Verbs(TyperGroup):
    """Several verbs; alone, the word for them shows which there are."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the words before the verb."""
        if not args:
            return super().parse_args(ctx, args)
        with _refusing(ctx, args):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the verb."""
        if args and args[0] not in self.commands:
            raise UnknownName("verb", args[0], self.commands, hint=f"`{ctx.command_path} --help` lists them")
        return super().resolve_command(ctx, args)


@contextmanager
def _refusing(ctx: Any, args: list[str]) -> Iterator[None]:
    """Say in one line what is wrong with typed words, where typer would draw a box."""
    typed = list(args)  # the parser takes words away
    try:
        yield
    except Exception as error:
        if not hasattr(error, "format_message"):  # only click's have it, which typer may bring itself
            raise
        raise _refusal(error, ctx, typed) from None


def _refusal(error: Any, ctx: Any, typed: list[str]) -> InputError:
    """What is wrong, and with which word; then what there is, or where it is explained."""
    verb, explained = f"`{ctx.command_path}`", f"`{ctx.command_path} --help` explains all"
    param = getattr(error, "param", None)
    if hasattr(error, "possibilities"):
        known = [name for one in ctx.command.params for name in one.opts if name.startswith("--")]
        return UnknownName(f"option of {verb}", error.option_name, [*known, "--help"], explained)
    if param is None:
        return InputError(f"{str(error.message).rstrip('.')}: {explained}")
    name = param.opts[0] if param.param_type_name == "option" else param.metavar or param.name.upper()
    if hasattr(error, "param_type"):  # it is missing
        return InputError(f"{verb} needs {name}: {param.help or explained}")
    given, _, _ = ctx.command.make_parser(ctx).parse_args(args=typed)
    return InputError(f"{name} {given.get(param.name)!r} cannot be used: {str(error.message).rstrip('.')}; {explained}")


class App(typer.Typer):
    """The command line, every command of which is a `Verb`."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Function], Function]:
        """Add a verb."""
        return super().command(name, cls=Verb, **options)
