"""Every command that a page shows has a name, options and values that the command line takes."""

import re
import shlex

import click
import pytest
import typer
from pages import PAGES, blocks_of, name_of

from bitplan.cli.app import app

COMMAND = typer.main.get_command(app)
TYPED = [
    (f"{block}: {line}", line)
    for page in PAGES
    for block in blocks_of(page)
    for line in block.commands
    if line.startswith("bitplan ")
]
INLINE = re.compile(r"`(bitplan [^`\n]+)`")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def command_of(words):
    """The command that the first words name, its context, and the words behind them."""
    command, context = COMMAND, click.Context(COMMAND, info_name="bitplan")
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, list(words))
        if hasattr(command, "resolve_command"):
            context = click.Context(command, info_name=name, parent=context)
    return command, context, words


def parsed(line):
    """What the command line makes of a line, without running it."""
    command, context, words = command_of(shlex.split(line)[1:])
    return command.make_context(command.name, words, parent=context)


@pytest.mark.parametrize("line", [line for _, line in TYPED], ids=[name for name, _ in TYPED])
def test_every_command_in_a_block_is_understood(line):
    with parsed(line):
        pass


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_in_a_sentence_has_a_name_and_options_that_exist(page):
    for line in INLINE.findall(FENCED.sub("", page.read_text())):
        for part in line.split(" · "):
            words = [word for word in part.removeprefix("bitplan ").split() if word not in ("…", "COMMAND", "--help")]
            if not words or words[0].startswith("-"):
                continue
            command, _, rest = command_of(words)
            known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            options = [word for word in rest if re.fullmatch(r"-o|--[a-z-]+", word)]
            assert set(options) <= known, f"{line}: {set(options) - known}"


def test_there_are_commands_and_a_wrong_one_is_seen():
    assert len(TYPED) > 50
    with pytest.raises(Exception, match="unknown option of `bitplan plan`"):
        parsed("bitplan plan MODEL --bugdet 70%")
    with pytest.raises(Exception, match="unknown command"):
        parsed("bitplan plant MODEL")
