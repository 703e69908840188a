"""The classes of commands: bad words are refused in one line, and outputs are checked before a command begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from bitplan.core.errors import InputError, UnknownName

Function = TypeVar("Function", bound=Callable[..., Any])
_MAY_WRITE_FOLDERS = ("quantize", "finetune", "export")  # they check their output themselves
_FILE = "file"  # the command of a group for words that name no other command


class Command(TyperCommand):
    """A command that refuses bad words in one line and checks its outputs before it begins."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the words behind the command."""
        with _refusing(ctx, args):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Replace outputs by the files that links lead to, and refuse those that are also read."""
        outputs = ctx.params.get("output")
        if outputs:
            is_list = isinstance(outputs, list | tuple)
            others = [value for key, value in ctx.params.items() if key != "output"]
            as_folder = ctx.command.name in _MAY_WRITE_FOLDERS
            checked = [check_output(Path(one), others, as_folder) for one in (outputs if is_list else [outputs])]
            ctx.params["output"] = checked if is_list else checked[0]
        return super().invoke(ctx)


class CommandGroup(TyperGroup):
    """Several commands. The group without a word behind it shows its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the words before the command."""
        if not args:
            return super().parse_args(ctx, args)
        with _refusing(ctx, args):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names, or the group's command for files."""
        if args and args[0] not in self.commands:
            if _FILE in self.commands:
                return _FILE, self.commands[_FILE], args
            raise UnknownName("command", args[0], self.commands, hint=f"`{ctx.command_path} --help` lists them")
        return super().resolve_command(ctx, args)


class App(typer.Typer):
    """A group of commands, each a `Command`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=CommandGroup, no_args_is_help=True, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Function], Function]:
        """Add a command."""
        return super().command(name, cls=Command, **options)


@contextmanager
def _refusing(ctx: Any, args: list[str]) -> Iterator[None]:
    """Raise an InputError of one line where typer would draw a box."""
    typed = list(args)  # the parser takes words away
    try:
        yield
    except Exception as error:
        if not hasattr(error, "format_message"):  # only click's have it, which typer may bring itself
            raise
        raise _refusal(error, ctx, typed) from None


def _refusal(error: Any, ctx: Any, typed: list[str]) -> InputError:
    """Return the error that says which word is wrong, and which there are or where they are explained."""
    command, explained = f"`{ctx.command_path}`", f"`{ctx.command_path} --help` explains all"
    param = getattr(error, "param", None)
    if hasattr(error, "possibilities"):
        known = [name for one in ctx.command.params for name in one.opts if name.startswith("--")]
        return UnknownName(f"option of {command}", error.option_name, [*known, "--help"], explained)
    if param is None:
        return InputError(f"{str(error.message).rstrip('.')}: {explained}")
    name = param.opts[0] if param.param_type_name == "option" else param.metavar or param.name.upper()
    if hasattr(error, "param_type"):  # it is missing
        return InputError(f"{command} needs {name}: {param.help or explained}")
    given, _, _ = ctx.command.make_parser(ctx).parse_args(args=typed)
    return InputError(f"{name} {given.get(param.name)!r} cannot be used: {str(error.message).rstrip('.')}; {explained}")


def check_output(output: Path, others: list[Any], as_folder: bool) -> Path:
    """Return the file or folder that an output leads to, if it may be written beside the other words typed."""
    from bitplan.store.files import check_regular_file, clear_left, follow_links

    _refuse_own_source(output, others)
    target = follow_links(output)
    if not as_folder:
        check_regular_file(target)
    clear_left(target.parent, target.name)
    return target


def _refuse_own_source(output: Path, others: list[Any]) -> None:
    """Refuse an output that is, holds, or is a part of an input, by whatever name; or a file that a run keeps."""
    from bitplan.core.records import ABOUT
    from bitplan.store.files import is_below, is_same
    from bitplan.store.run_folder import RunFolder

    run = RunFolder.owning(output)
    if run is not None:
        raise InputError(f"{output} is among the files that the run {run.path} keeps itself: write to another name")
    typed = [one for value in others for one in (value if isinstance(value, list | tuple) else (value,))]
    for one in typed:
        if isinstance(one, str | Path) and str(one):
            source = Path(one)
            if is_same(source, output) or _is_part(output, source):
                raise InputError(f"{output} is also what is read ({one}), and would be replaced: write to another name")
            if (output / ABOUT).is_file() and is_below(source, output):
                raise InputError(f"{output} holds what is read ({one}), and would be replaced: write to another name")


def _is_part(output: Path, source: Path) -> bool:
    """Return True if a file is among those that a folder of weights is read from."""
    from bitplan.core.records import ABOUT, ENDINGS
    from bitplan.store.files import is_below

    is_read = output.name in (ABOUT, "config.json") or output.name.endswith((*ENDINGS, ".index.json"))
    return is_read and output.is_file() and source.is_dir() and is_below(output, source)
