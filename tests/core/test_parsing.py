"""The one door for files: what is the file's fault is one line with its name, and what is ours stays a traceback."""

import csv
import json
import pickle
import struct
import zipfile
import zlib

import pytest

from bitplan.core.errors import FileError, InputError
from bitplan.core.parsing import explain_failures, parse_json, parse_toml
from bitplan.core.record import Record
from bitplan.core.trials import Recipe
from bitplan.store.files import load
from bitplan.store.user_tables import read_table

FAULTS = [
    ValueError("x"), TypeError("x"), KeyError("x"), IndexError("x"), AttributeError("x"), OverflowError("x"),
    ZeroDivisionError("x"), RecursionError("x"), MemoryError(), EOFError("x"), RuntimeError("x"), SystemError("x"),
    NotImplementedError("x"), OSError("no number"), OSError(2, "there is none"),
    UnicodeDecodeError("utf-8", b"", 0, 1, "x"),
    struct.error("x"), zlib.error("x"), csv.Error("x"), zipfile.BadZipFile("x"), pickle.UnpicklingError("x"),
    json.JSONDecodeError("x", "", 0), Exception("of a library"), ValueError("two\nlines"), InputError("of ours"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_whatever_a_parser_throws_is_one_line_with_the_name_of_the_file(fault):
    with pytest.raises(FileError) as raised, explain_failures("a/file.x", "a thing", "make it again"):
        raise fault
    assert "a/file.x" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_error_of_ours_that_names_the_file_stays_as_it_is():
    told = FileError("file.x has no rows")
    with pytest.raises(FileError) as raised, explain_failures("file.x", "a thing", "make it again"):
        raise told
    assert raised.value is told


@pytest.mark.parametrize(
    "bug", [NameError("x"), ModuleNotFoundError("x"), KeyboardInterrupt(), SystemExit(1)], ids=repr
)
def test_what_no_file_can_cause_is_not_blamed_on_it(bug):
    with pytest.raises(type(bug)) as raised, explain_failures("file.x", "a thing", "make it again"):
        raise bug
    assert raised.value is bug


def test_an_assertion_is_the_files_fault_where_a_library_makes_it_and_a_bug_where_we_do(monkeypatch):
    def fails():
        raise AssertionError("x")

    with pytest.raises(FileError), explain_failures("file.x", "a thing", "make it again"):
        fails()
    monkeypatch.setattr("bitplan.core.parsing._OWN", str(__file__))
    with pytest.raises(AssertionError), explain_failures("file.x", "a thing", "make it again"):
        fails()


def test_a_bug_after_parsing_shows_a_traceback():
    with explain_failures("file.x", "a thing", "make it again"):
        content = {}
    with pytest.raises(KeyError):
        content["lacking"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 2}', "'a' stands twice"),
        ('{"b": [{"a": 1, "a": 1}]}', "'a' stands twice"),
        ("[NaN]", "NaN is not finite"),
        ("[-Infinity]", "Infinity is not finite"),
        ("[1e999]", "1e999 is not finite"),
        ("9" * 5000, "of 5000 digits"),
        ("1" * 21, "of 21 digits"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "nested too deeply"),
        ('"\\ud800"', "surrogates"),
        (b"\xff\xfe", "invalid start byte"),
        ("[1, 2", "cut off"),
        ("[1,, 2]", "not JSON"),
    ],
)
def test_json_is_strict(text, words):
    with pytest.raises(FileError, match=words):
        parse_json(text)


def test_json_that_is_sound_is_read_as_it_is():
    value = {"a": [1, -(2**63), 2**64 - 1, 1e308, 5e-324, None, True, "é😀"], "b": {"a": {}}}
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = " + "[" * 5000, "nested too deeply"),
        ("a = nan", "not finite"),
        ("a = 1e999", "not finite"),
        ("a = " + "9" * 5000, "not TOML"),
        ("a = 0x" + "f" * 5000, "not TOML"),
        ("a = 1\na = 2", "not TOML"),
    ],
)
def test_toml_is_strict(text, words):
    with pytest.raises(FileError, match=words):
        parse_toml(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("field.csv", "layer,w4a4\n" + "x" * 140_000 + ",1"),
        ("twice.json", '{"a": 1, "a": 2}'),
        ("digits.json", '{"a": ' + "9" * 5000 + "}"),
        ("deep.json", "[" * 100_000),
    ],
)
def test_tables_name_their_file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(FileError, match=name):
        read_table(tmp_path / name)


@pytest.mark.parametrize("depth", [100, 250, 400, 990, 5000])
def test_a_record_may_nest_no_deeper_than_it_can_be_written_again(tmp_path, depth):
    """Where a value of any kind is allowed, it is read and can be written, or the file is refused."""
    path = tmp_path / "checkpoint.json"
    nested = "[" * depth + "]" * depth
    path.write_text(f'{{"bitplan": "checkpoint", "format": 1, "options": {{"a": {nested}}}}}')
    try:
        read = load(path, Record)
    except FileError:
        return
    assert Record.from_json(read.to_json()) == read


@pytest.mark.parametrize("written", ['"nan"', '"-inf"', '" Infinity"', "NaN", "1e999"])
def test_a_number_that_is_none_enters_no_record_as_a_text_either(tmp_path, written):
    text = '{"bitplan": "recipe", "format": 1, "steps": 3, "lr": %s}'
    (tmp_path / "r.json").write_text(text % "0.5")
    assert isinstance(load(tmp_path / "r.json", Record), Recipe)
    (tmp_path / "r.json").write_text(text % written)
    with pytest.raises(FileError, match="r.json"):
        load(tmp_path / "r.json", Record)
