"""What stands in a file is never imported unless the user says so: a stranger's folder, by every command."""

import os
import shutil
import sys

import pytest

import bitplan
from bitplan.core.errors import Untrusted
from bitplan.core.studies import Study
from bitplan.store.engines import Local
from bitplan.store.files import load, save
from bitplan.store.run_folder import RunFolder
from bitplan.study import context
from bitplan.study.networks import trained_network

EVIL = """
from pathlib import Path
from torch import nn

Path("it-ran").touch()

def network():
    layers = [nn.Flatten(), nn.Linear(64, 16)]
    for _ in range(2):
        layers += [nn.ReLU(), nn.Linear(16, 16)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(16, 10))
"""
STUDY = """
name = "gift"
task = "digits"
model = "evil:network"
choices = ["w2a2", "w4a4"]
budgets = ["70%"]
seeds = [0]
[rules]
narrow = 0
[recipe]
steps = 2
[start]
[start.float_recipe]
steps = 2
[start.recipe]
steps = 2
[[methods]]
name = "eagl"
"""


def ran(folder):
    return (folder / "it-ran").exists() or "evil" in sys.modules


def forget():
    sys.modules.pop("evil", None)


@pytest.fixture(scope="module")
def gift(tmp_path_factory):
    """What a stranger sends: code, a study that names it, a run of that study, and a checkpoint that names it too."""
    folder = tmp_path_factory.mktemp("gift")
    (folder / "evil.py").write_text(EVIL)
    (folder / "study.toml").write_text(STUDY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        bitplan.sweep(bitplan.read_study("study.toml"), "run", trust=True)
        start = RunFolder(folder / "run").starts.path(RunFolder(folder / "run").results[1].trial.id)
        network = bitplan.load_checkpoint(start, bitplan.load_model("evil:network")[0])
        bitplan.save_checkpoint(network, "checkpoint", spec="evil:network")
        bitplan.export(network, "net.safetensors", "packed", spec="evil:network")
    forget()
    (folder / "it-ran").unlink()
    return folder


@pytest.fixture
def opened(gift, run, tmp_path):
    """A copy of it where the command line is; nothing of it was imported yet."""
    shutil.copytree(gift, tmp_path, dirs_exist_ok=True)
    before = list(sys.path)
    sys.path[:] = [entry for entry in before if entry != str(gift)]
    context._checkpoint.cache_clear()  # keyed by paths, which are relative here
    forget()
    yield tmp_path
    forget()
    sys.path[:] = before


CHECKPOINT = [
    ("evaluate", "checkpoint", "--task", "digits"),
    ("quantize", "checkpoint", "--bits", "w2a2", "--input", "1x1x8x8", "-o", "out"),
    ("finetune", "checkpoint", "--task", "digits", "--recipe", "steps=2", "-o", "out"),
    ("export", "checkpoint", "--format", "packed", "-o", "out.safetensors"),
    ("verify", "net.safetensors", "--against", "checkpoint", "--task", "digits", "--limit", "5"),
    ("steps", "trace", "checkpoint", "--input", "1x1x8x8"),
    ("plan", "checkpoint", "--budget", "70%", "--rules", "narrow=0", "--input", "1x1x8x8"),
    ("show", "frontier", "checkpoint", "--rules", "narrow=0", "--input", "1x1x8x8"),
    ("steps", "estimate", "eagl", "run/graph.json", "--model", "checkpoint"),
]
RUN = [
    ("evaluate", "run", "--task", "digits"),
    ("finetune", "run", "--task", "digits", "--recipe", "steps=2", "-o", "out"),
    ("export", "run", "--format", "packed", "-o", "out.safetensors"),
    ("verify", "net.safetensors", "--against", "run", "--limit", "5"),
    ("run", "additivity", "run", "--pairs", "0", "--networks", "3"),
    ("steps", "estimate", "eagl", "run/graph.json", "--model", "run"),
]
TOML = [
    ("sweep", "study.toml", "--run", "new"),
    ("sweep", "study.toml", "--dry-run"),
    ("sweep", "study.toml", "--run", "run"),
]
TEACHER = [
    (
        "finetune",
        "digits_resnet",
        "--task",
        "digits",
        "--recipe",
        "steps=2",
        "--recipe",
        "teacher=checkpoint",
        "-o",
        "out",
    ),
    ("finetune", "digits_resnet", "--task", "digits", "--recipe", "steps=2", "--recipe", "teacher=run", "-o", "out"),
]
ALL = [
    *((words, "checkpoint/checkpoint.json") for words in [*CHECKPOINT, TEACHER[0]]),
    *((words, "run/study.json") for words in [*RUN, TEACHER[1]]),
    *((words, "study.toml") for words in TOML),
]


@pytest.mark.parametrize(("words", "file"), ALL, ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_what_a_file_names_is_not_imported_unasked(run, opened, words, file):
    code, _, err = run(*words)
    assert not ran(opened)
    assert (code, len(err.splitlines())) == (2, 1), err
    assert err.startswith(f"error: {file} names code to import (evil:network)")
    assert "--trust" in err


@pytest.mark.parametrize("words", [*CHECKPOINT, *RUN, *TOML], ids=" ".join)
def test_it_is_where_the_user_says_so(run, opened, words):
    code, _, err = run(*words, "--trust")
    of_another_network = words[:4] == ("verify", "net.safetensors", "--against", "run")
    assert code == int(of_another_network), err
    assert ran(opened)


@pytest.mark.parametrize("words", [words for words in CHECKPOINT if words[0] in ("evaluate", "export")], ids=" ".join)
def test_who_names_the_factory_needs_no_more(run, opened, words):
    code, _, err = run(*words, "--model", "evil:network")
    assert code == 0, err


@pytest.mark.parametrize(
    "words",
    [
        ("run", "status", "run"),
        ("compare", "run"),
        ("run", "tables", "run", "--which", "layers"),
        ("run", "tables", "run", "--which", "agreement"),
        ("report", "run", "-o", "page.html"),
        ("show", "validate", "run/study.json", "checkpoint/checkpoint.json"),
        ("run", "store", "clean", "run", "study.toml"),
        ("export", "run", "--format", "llama_cpp", "-o", "recipe.txt"),
        ("quantize", "digits_resnet", "--plan", "checkpoint", "-o", "out"),
    ],
    ids=" ".join,
)
def test_looking_at_a_run_imports_nothing(run, opened, words):
    run(*words)
    assert not ran(opened)


def test_a_run_does_not_choose_where_its_jobs_go(run, opened):
    """Who answers as a Ray cluster sends pickles back."""
    study = load(opened / "run" / "study.json", Study)
    far = {"model": "digits_resnet", "engine": "cluster", "engine_options": {"address": "198.51.100.7:6379"}}
    save(study.model_copy(update=far), opened / "run" / "study.json")
    code, _, err = run("run", "additivity", "run", "--pairs", "1")
    assert code == 2
    assert "run/study.json sends its jobs elsewhere (engine cluster, address=198.51.100.7:6379)" in err


def test_in_python_too(opened):
    for reading in (
        lambda: bitplan.load_checkpoint("checkpoint"),
        lambda: bitplan.load_packed("net.safetensors"),
        lambda: bitplan.sweep(bitplan.read_study("study.toml"), "new"),
        lambda: trained_network(RunFolder(opened / "run"), RunFolder(opened / "run").results[-1]),
    ):
        with pytest.raises(Untrusted, match=r"names code to import \(evil:network\).*trust=True"):
            reading()
    assert not ran(opened)
    assert str(opened) not in sys.path
    assert bitplan.load_checkpoint("checkpoint", trust=True) is not None
    assert bitplan.load_packed("net.safetensors", trust=True) is not None


def test_the_current_folder_shadows_nothing_that_is_installed(run, opened):
    """Who names an installed package gets that one, whatever lies in the folder that she is in."""
    (opened / "colorsys.py").write_text(EVIL)
    code, _, err = run("steps", "trace", "colorsys:rgb_to_hls")
    assert code == 2
    assert not ran(opened)
    assert "needs the arguments r, g, b" in err


def test_nor_is_the_task_that_a_study_names(run, opened):
    text = STUDY.replace("evil:network", "digits_resnet").replace('task = "digits"', 'task = "evil:network"')
    (opened / "other.toml").write_text(text)
    for words in (
        ("sweep", "other.toml"),
        ("sweep", "other.toml", "--dry-run"),
        ("sweep", "other.toml", "--workers", "1"),
    ):
        code, _, err = run(*words)
        assert (code, err.count("names code to import (evil:network)")) == (2, 1)
        assert not ran(opened)


def test_nor_for_workers(opened):
    """A new Python looks there first for what it imports before it is told where else."""
    for name in ("multiprocessing", "pickle", "signal", "pydantic", "bitplan"):
        (opened / f"{name}.py").write_text("open('it-ran', 'w').close()")
    found = list(Local(workers=1).run(os.getenv, ["PYTHONSAFEPATH"]))
    assert found == [("PYTHONSAFEPATH", None)], "and what they start looks where it always did"
    assert not ran(opened)
    assert "PYTHONSAFEPATH" not in os.environ


def test_names_of_the_zoo_leave_the_path_alone(run, opened):
    before = list(sys.path)
    assert run("steps", "trace", "digits_resnet")[0] == 0
    assert sys.path == before
