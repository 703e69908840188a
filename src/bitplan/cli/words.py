"""What is typed, looked at before a verb begins: words that mean nothing, and outputs that must not be written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from bitplan.core.errors import InputError, UnknownName

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
                from bitplan.cli.outputs import checked  # records, which `--help` needs not

                others = [value for key, value in ctx.params.items() if key != name]
                ctx.params[name] = checked(Path(output), others, to_folder=ctx.command.name in _TO_FOLDERS)
        return super().invoke(ctx)


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
