"""`-o` writes what it names, through links, and nothing else; and what stands in names is shown, never obeyed."""

import json
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file

import bitplan
from bitplan.cli.show import bar
from bitplan.cli.terminal import tell_traceback
from bitplan.core.escaping import ShownLines, escape_json, escape_text
from bitplan.core.studies import Study
from bitplan.store.files import load, save

EVIL = "\x1b]0;owned\x07\x1b[8m\x9b2J\u202e\r"
ESCAPED = r"\x1b]0;owned\x07\x1b[8m\x9b2J\u202e\r"


@pytest.fixture
def graph(run):
    assert run("steps", "trace", "digits_resnet", "--rules", "narrow=0", "-o", "graph.json")[0] == 0
    return Path("graph.json")


def test_a_link_stays_and_what_it_points_to_is_written(run, graph):
    Path("place").mkdir()
    Path("place/old.json").write_text("old")
    for link, target in (("link", "place/old.json"), ("second", "link"), ("dangling", "place/new.json")):
        Path(link).symlink_to(target)
    for link, target in (("second", "place/old.json"), ("dangling", "place/new.json")):
        assert run("steps", "price", "bmac", graph, "-o", link)[0] == 0
        assert load(target, bitplan.Costs).name == "bmac"
        assert Path(link).is_symlink()
    assert sorted(os.listdir("place")) == ["new.json", "old.json"]


def test_a_checkpoint_is_written_through_a_link_too(run, tmp_path):
    words = ("quantize", "digits_resnet", "--bits", "w4a4", "--task", "digits", "--samples", "16", "-o")
    assert run(*words, "real")[0] == 0
    Path("link").symlink_to("real")
    before = Path("real/model.safetensors").read_bytes()
    assert run(*words, "link", "--seed", "1")[0] == 0
    assert Path("link").is_symlink()
    assert Path("real/model.safetensors").read_bytes() != before
    code, _, err = run("quantize", "link", "--bits", "w2a2", "-o", "real")
    assert (code, err) == (2, "error: real is also what is read (link), and would be replaced: write to another name\n")


def pipe():
    os.mkfifo("pipe")
    return "pipe"


def hard_link():
    os.link("graph.json", "same.json")
    return "same.json"


def circle():
    Path("one").symlink_to("two")
    Path("two").symlink_to("one")
    return "one"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (lambda: "graph.json", "graph.json is also what is read (graph.json)"),
        (lambda: "./x/../graph.json", "graph.json is also what is read (graph.json)"),
        (hard_link, "same.json is also what is read (graph.json)"),
        (pipe, "cannot write pipe: it is a pipe, not a file"),
        (lambda: "/dev/null", "cannot write /dev/null: it is a device, not a file"),
        (lambda: ".", "cannot write .: it is a folder, not a file"),
        (circle, "cannot write one: its links go in a circle"),
    ],
)
def test_what_must_not_be_written_is_refused_and_stays(run, graph, target, said):
    Path("x").mkdir()
    name, before = target(), graph.read_bytes()
    for words in (
        ("steps", "price", "bmac", graph, "-o", name),
        ("plan", graph, "--gain", "uniform", "--budget", "70%", "-o", "page.html", "-o", name),
    ):
        code, _, err = run(*words)
        assert (code, err.count("\n")) == (2, 1)
        assert said in err
    assert graph.read_bytes() == before
    assert Path("/dev/null").is_char_device()


@pytest.fixture
def of_a_run(run, graph):
    """A folder that is a run's as far as `-o` can tell, and a checkpoint that was kept in it."""
    study = {"name": "x", "task": "digits", "model": "digits_resnet", "choices": ["w2a2", "w4a4"], "budgets": ["70%"]}
    rest = {"methods": [{"name": "uniform"}], "seeds": [0], "start": {"weights": "x"}, "recipe": {"steps": 1}}
    save(Study(**study, **rest), "run/study.json")
    save(load(graph, bitplan.Graph), "run/graph.json")
    assert run("quantize", "digits_resnet", "--bits", "w4a4", "--rules", "narrow=0", "-o", "run/starts/a")[0] == 2
    assert run("quantize", "digits_resnet", "--bits", "w4a4", "--rules", "narrow=0", "-o", "a")[0] == 0
    os.mkdir("run/starts")
    os.rename("a", "run/starts/a")
    Path("link").symlink_to("run/starts")
    return graph


@pytest.mark.parametrize("name", ["graph.json", "costs.json", "trials/x.json", "starts/a/checkpoint.json", "leases/x"])
def test_what_a_run_keeps_is_written_by_the_run_alone(run, of_a_run, name):
    """Also what is not there yet, and whatever it is that is read."""
    there = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    for words in (
        ("steps", "price", "bmac", "run/graph.json", "-o", f"run/{name}"),
        ("steps", "price", "bmac", "graph.json", "-o", f"run/x/../{name}"),
        ("run", "tables", "run", "-o", f"run/{name}"),
        ("report", "run", "-o", f"run/{name}"),
        ("quantize", "link/a", "--bits", "w2a2", "-o", f"run/{name}"),
    ):
        code, _, err = run(*words)
        assert (code, err.count("\n")) == (2, 1)
        assert "is among the files that the run" in err
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == there


def test_beside_what_a_run_keeps_there_is_room(run, of_a_run):
    assert run("steps", "price", "bmac", "graph.json", "-o", "run/mine.json")[0] == 0
    assert run("steps", "price", "bmac", "graph.json", "-o", "run/mine.json")[0] == 0
    assert run("steps", "trace", "digits_resnet", "-o", "run/mine/graph.json")[0] == 0


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("place/net/checkpoint.json", "place/net/checkpoint.json is also what is read (place/net)"),
        ("place/net/model.safetensors", "place/net/model.safetensors is also what is read (place/net)"),
        ("link/model.safetensors", "link/model.safetensors is also what is read (place/net)"),
        ("place", "place holds what is read (place/net), and would be replaced"),
    ],
)
def test_no_part_of_what_is_read_is_written_over(run, output, said):
    quantize = ("quantize", "digits_resnet", "--bits", "w4a4", "--rules", "narrow=0", "-o")
    assert run(*quantize, "place")[0] == 0
    assert run(*quantize, "place/net")[0] == 0
    Path("link").symlink_to("place/net")
    there = {path: path.read_bytes() for path in Path("place").rglob("*") if path.is_file()}
    for words in (("quantize", "place/net", "--bits", "w2a2"), ("export", "place/net", "--format", "packed")):
        code, _, err = run(*words, "-o", output)
        assert (code, err.count("\n")) == (2, 1)
        assert said in err
    assert {path: path.read_bytes() for path in Path("place").rglob("*") if path.is_file()} == there


def test_a_checkpoint_takes_nothing_else_away(run):
    """A folder that is written again loses what it had, so it must not have had more."""
    quantize = ("quantize", "digits_resnet", "--bits", "w4a4", "--rules", "narrow=0", "-o")
    assert run(*quantize, "net")[0] == 0
    assert run(*quantize, "net")[0] == 0
    Path("net/notes.txt").write_text("mine")
    code, _, err = run(*quantize, "net")
    said = "error: net holds notes.txt beside its checkpoint, which would be lost: choose another name"
    assert (code, err.splitlines()[-1]) == (2, said)
    assert Path("net/notes.txt").read_text() == "mine"


def test_what_a_killed_command_left_is_removed_by_the_next(run, graph):
    imports = "import os; from bitplan.store.files import atomic_file"
    write = "with atomic_file('out.json') as half: half.touch(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", f"{imports}\n{write}"], check=False)
    assert len(list(Path().glob(".out.json.*"))) == 1
    assert run("steps", "price", "bmac", graph, "-o", "out.json")[0] == 0
    assert sorted(os.listdir()) == ["graph.json", "out.json"]


def test_links_in_a_run_are_replaced_not_followed(tmp_path):
    """A stranger's run must not have files elsewhere overwritten."""
    (tmp_path / "mine.txt").write_text("mine")
    run = bitplan.RunFolder(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "graph.json").symlink_to("../mine.txt")
    run.keep(bitplan.trace(*bitplan.load_model("digits_resnet", weightless=True)))
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert not (tmp_path / "run" / "graph.json").is_symlink()


@pytest.fixture
def hostile(run, graph):
    """Files in which every name is hostile."""
    renamed = json.loads(graph.read_text().replace('"blocks.2.conv1"', json.dumps(f"{EVIL}layer")))
    del renamed["id"], renamed["checksum"]
    renamed["model"] = EVIL
    Path("graph.json").write_text(json.dumps(renamed))
    save_file(
        {f"{EVIL}{n}.weight": __import__("numpy").zeros((256, 256), "float32") for n in range(3)}, "net.safetensors"
    )
    Path(f"{EVIL}.json").write_text("{")
    Path("bad.toml").write_text(
        f'name = {json.dumps(EVIL[:-1])}\n"{ESCAPED.replace(chr(92) + "x", chr(92) + "u00")}" = 1\n'
    )
    plan = run("plan", "graph.json", "--gain", "uniform", "--budget", "70%", "--json")[1]
    Path("plan.json").write_text(plan)
    Path("other.json").write_text(json.dumps(json.loads(plan.replace("w2a2", "w4a4")) | {"id": None, "checksum": None}))


@pytest.mark.parametrize(
    "words",
    [
        ("steps", "trace", "graph.json"),
        ("plan", "graph.json", "--gain", "uniform", "--budget", "70%"),
        ("plan", "graph.json", "--gain", "uniform", "--budget", "70%", "--explain"),
        ("plan", "graph.json", "--gain", "uniform", "--budget", "70%", "--json"),
        ("show", "frontier", "graph.json", "--gain", "uniform"),
        ("steps", "price", "bmac", "graph.json"),
        ("steps", "trace", "net.safetensors"),
        ("steps", "trace", "net.safetensors", "--rules", f"link={EVIL}"),
        ("show", "validate", f"{EVIL}.json", "graph.json"),
        ("show", "diff", "plan.json", "other.json"),
        ("sweep", "bad.toml"),
        ("steps", "price", EVIL, "graph.json"),
        ("steps", "price", f"--{EVIL}", "graph.json"),
        (EVIL,),
        ("steps", "trace", f"{EVIL}:network"),
        ("export", "plan.json", "--format", "llama_cpp", "-o", f"{EVIL}out", "--widen"),
    ],
    ids=lambda words: " ".join(words).encode("unicode_escape").decode()[:60],
)
def test_names_are_shown_and_not_obeyed(run, hostile, words):
    _, out, err = run(*words)
    said = out + err
    assert said
    assert [character for character in said if not character.isprintable() and character != "\n"] == []


def test_what_is_shown_says_the_same():
    assert escape_text(f"a {EVIL} é ± \n\tb") == f"a {ESCAPED} é ± \n\tb"
    assert escape_text("\udcff") == r"\udcff"
    text = json.dumps({EVIL + "\U000e0001": "é"}, ensure_ascii=False)
    assert json.loads(escape_json(text)) == json.loads(text)
    assert escape_json(text).isprintable()


def test_on_a_terminal_only_our_own_colours_have_an_effect(tmp_path):
    """In a real one: the names of layers in a table, beside bars in colour."""
    graph = bitplan.trace(*bitplan.load_model("digits_resnet", weightless=True))
    layers = [layer.model_copy(update={"name": f"{layer.name}{EVIL}"}) for layer in graph.layers]
    save(graph.model_copy(update={"layers": tuple(layers), "links": ()}), tmp_path / "graph.json")
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "bitplan", "steps", "trace", "graph.json"]
    plain = {"TERM": "xterm-256color", "COLUMNS": "200"}
    subprocess.run(words, cwd=tmp_path, stdout=theirs, stderr=theirs, check=True, env=os.environ | plain)
    os.close(theirs)
    said = b""
    while chunk := _read(ours):
        said += chunk
    assert rb"\x1b]0;owned\x07" in said
    assert b"\x1b[" in said, "our own"
    for bad in (b"\x1b]", b"\x07", b"\x1b[8m", "\x9b".encode(), "\u202e".encode()):
        assert bad not in said


def _read(terminal):
    try:
        return os.read(terminal, 65536)
    except OSError:  # closed at the other end
        return b""


def test_logs_bars_and_tracebacks_are_shown_too(capsys, monkeypatch):
    record = logging.LogRecord("x", logging.WARNING, "", 0, "layer %s", (EVIL,), None)
    assert ShownLines().format(record) == f"layer {ESCAPED}"
    tell_traceback(ValueError, ValueError(EVIL), None)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with bar("starting") as move:
        move(1, 2, f"{EVIL}[bold]x")
    said = capsys.readouterr().err
    assert said.count(ESCAPED) == 2
    assert f"{ESCAPED}[bold]x" in said
    assert "\x1b]" not in said
