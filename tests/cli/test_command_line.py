"""The shape of the command line: its commands, their options and defaults, commands that others bring, `show FILE`."""

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import bitplan
from bitplan.cli.app import app, build
from bitplan.cli.options import read_recipe, read_rules, split_input
from bitplan.core.errors import InputError
from bitplan.core.option_parsing import read_named
from bitplan.core.registry import COMMANDS

TOP = "plan quantize finetune evaluate export verify measure sweep compare report demo list show run steps"
GROUPS = {
    "run": "status tables results additivity ceiling data store",
    "steps": "trace price estimate select",
    "show": "file frontier diff validate",
}


def leaves(command, path=()):
    """Every command below one, with the words that name it."""
    inner = getattr(command, "commands", {})
    if not inner:
        yield path, command
    for name, one in inner.items():
        yield from leaves(one, (*path, name))


ALL = dict(leaves(typer.main.get_command(app)))


def test_the_commands_are_these():
    top = typer.main.get_command(app).commands
    assert sorted(top) == sorted(TOP.split())
    for group, names in GROUPS.items():
        assert sorted(top[group].commands) == sorted(names.split())


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_a_command_has_few_options_and_its_help_shows_every_default(path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    options = [one for one in ALL[path].params if one.param_type_name == "option" and one.name != "help"]
    assert len(options) <= 20
    said = CliRunner().invoke(app, [*path, "--help"]).output
    optional = [one for one in options if not one.required and not (one.is_flag and one.default is False)]
    for option in optional:
        assert isinstance(option.show_default, str) or option.default not in (None, [], ()), option.name
    assert said.count("[default: ") >= len(optional)


def test_panels_and_nothing_hidden_in_the_help():
    said = CliRunner().invoke(app, ["--help"]).output
    for panel in ("From a model to a file", "Compare methods", "Look", "More"):
        assert panel in said


def test_others_add_commands_by_name_and_within_a_group():
    def greet(name: str = "you") -> None:
        """Greet somebody."""
        typer.echo(f"hello {name}")

    with COMMANDS.registered("greet", greet), COMMANDS.registered("run.greet", greet):
        own = build()
        for words in (["greet"], ["run", "greet"]):
            assert CliRunner().invoke(own, [*words, "--name", "me"]).output == "hello me\n"
    assert "greet" not in ALL


def test_show_shows_any_record_and_its_options_may_come_first(run, graph):
    words = ("plan", "graph.json", "--gain", "uniform", "--budget", "70%", "-o", "plan.json", "-o", "plan.html")
    bitplan.save(graph, "graph.json")
    assert run(*words)[0] == 0
    assert run("steps", "estimate", "uniform", "graph.json", "-o", "gains.json")[0] == 0
    for file, text in (("graph.json", "to choose"), ("plan.json", "70% of bmac"), ("gains.json", "group")):
        code, out, err = run("show", file)
        assert (code, err) == (0, "")
        assert text in out
        assert json.loads(run("show", "--json", file)[1]) == json.loads(Path(file).read_text())
    code, _, err = run("show", "plan.html")
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("lsq", "lsq", {}),
        ("local:workers=2,threads=1", "local", {"workers": 2, "threads": 1}),
        ("racing:budgets=60%,70%,time=hours", "racing", {"budgets": "60%,70%", "time": "hours"}),
        ("haq:judge=(drift:samples=8,lowest=2),spend=9", "haq", {"judge": "drift:samples=8,lowest=2", "spend": 9}),
        ("mine:task:data=a:b", "mine:task", {"data": "a:b"}),
    ],
)
def test_options_stand_behind_a_name(text, name, options):
    assert read_named(text, "--x") == (name, options)


def test_rules_come_from_a_file_and_from_words_over_it(tmp_path):
    file = tmp_path / "rules.toml"
    file.write_text('[rules]\nnarrow = 0\nfirst = "w4a4"\nfix = ["a.*=w8a8"]\nlink = ["none"]\n')
    rules, links = read_rules("w2a2,w4a4", [str(file), "first=free,last=free", "fix=b=w4a4"])
    assert (rules.first, rules.last, rules.narrow, links) == (None, None, 0, ["none"])
    assert {name: str(precision) for name, precision in rules.fix.items()} == {"a.*": "w8a8", "b": "w4a4"}
    with pytest.raises(InputError, match="did you mean narrow"):
        read_rules("", ["narow=0"])
    with pytest.raises(InputError, match="neither a .toml file nor KEY=VALUE"):
        read_rules("", ["narrow"])


def test_a_recipe_names_its_teacher_and_a_file_may_not_name_code(tmp_path):
    recipe, teacher = read_recipe(["epochs=2,lr=0.1", "teacher=resnet20", "teacher_weights=w.pth"])
    assert (recipe.epochs, recipe.lr) == (2, 0.1)
    assert teacher == {"teacher": "resnet20", "teacher_weights": "w.pth"}
    file = tmp_path / "recipe.toml"
    file.write_text('epochs = 1\nteacher = "evil:build"\n')
    with pytest.raises(InputError, match=r"evil:build.*--trust"):
        read_recipe([str(file)])
    assert read_recipe([str(file)], trust=True)[1] == {"teacher": "evil:build"}


def test_an_example_is_shapes_or_values_or_both():
    assert split_input(None) == (None, False)
    assert split_input("values") == (None, True)
    assert split_input("1x4,1x3:int64,values") == ("1x4,1x3:int64", True)


def test_no_help_text_has_a_default_of_its_own():
    texts = [one.help or "" for command in ALL.values() for one in command.params if hasattr(one, "help")]
    assert not [text for text in texts if re.search(r"\[default|unless said", text)]
