"""`bitplan plan MODEL --budget 70%` gives a plan on the first try, whatever MODEL is, and says what it took."""

import sys

import pytest

from bitplan.cli.studies import NEXT

MODULE = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bitplan

def data(seed, count=24):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 1, 8, 8, generator=generator), torch.arange(count) % 10)

loader = DataLoader(data(0), 8)

def made():
    return DataLoader(data(0), 8)

def broken():
    raise OSError("no such disk")

def needs(folder):
    return loader

def right(outputs, labels):
    return 100 * (outputs.argmax(1) == labels).float().mean()

def task(samples=24):
    return bitplan.task(train=data(0, samples), test=data(1), loss=F.cross_entropy, score=right)

def no_task():
    return loader

def net():
    torch.manual_seed(0)
    sizes = (1, 8, 16, 32)
    parts = [nn.Conv2d(one, two, 3, padding=1) for one, two in zip(sizes, sizes[1:])]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), torch.empty(1, 1, 8, 8)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of the user's in the current folder: a network, a loader, a task."""
    monkeypatch.setitem(sys.modules, "mine", None)
    del sys.modules["mine"]
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(MODULE)
    return "mine"


def test_a_plan_on_the_first_try_for_every_kind_of_model(run, mine):
    import torch

    def planned(target, taken, *more):
        code, out, err = run("plan", target, "--budget", "70%", *more)
        assert code == 0, err
        assert f"gains: auto takes {taken}, since " in err
        assert f"by {taken}, exact selection" in out
        return err

    assert "no trained weights" in planned("digits_resnet", "uniform")
    assert "rules: layers with fewer than 128 input features are not fixed" in planned("resnet20", "uniform")
    assert "(mse)" in planned(f"{mine}:net", "eagl")
    assert "calibrated at w4a4" in planned(f"{mine}:net", "drift", "--data", f"{mine}:loader")
    assert "calibrated at w4a4" in planned(f"{mine}:net", "drift", "--data", f"{mine}:made")
    planned(f"{mine}:net", "drift", "--task", f"{mine}:task")
    torch.save(sys.modules["mine"].net()[0].state_dict(), "float.pth")
    assert "(mse)" in planned("float.pth", "eagl")
    code, _, err = run("quantize", f"{mine}:net", "--bits", "w4a4", "--data", f"{mine}:loader", "-o", "start")
    assert (code, "no --task" in err) == (0, False)
    assert "learned steps" in planned("start", "eagl")
    run("steps", "trace", f"{mine}:net", "-o", "graph.json")
    assert "no trained weights" in planned("graph.json", "uniform")


def test_the_frontier_sees_data_too(run, mine):
    for typed in ("--data", f"{mine}:loader"), ("--task", f"{mine}:task"):
        code, out, err = run("show", "frontier", f"{mine}:net", "--budgets", "90%,70%", *typed)
        assert code == 0, err
        assert "gains: auto takes drift, since there is data" in err
        assert "70%" in out


def test_a_file_is_verified_on_data_of_hers(run, mine):
    run("quantize", f"{mine}:net", "--bits", "w4a4", "--data", f"{mine}:loader", "-o", "start")
    run("export", "start", "--model", f"{mine}:net", "--format", "onnx", "-o", "net.onnx")
    words = ("verify", "net.onnx", "--against", "start", "--model", f"{mine}:net")
    code, out, err = run(*words, "--data", f"{mine}:loader", "--speed")
    assert code == 0, err
    assert "x the speed of float" in out
    assert "the file does what the model does" in out
    code, _, err = run(*words, "--data", f"{mine}:loader", "--task", "digits")
    assert (code, "--data and --task are both" in err) == (2, True)


def test_methods_that_need_a_loss_take_a_task_of_the_users(run, mine):
    network = f"{mine}:net"
    words = ("plan", network, "--gain", "drop:samples=16", "--budget", "70%")
    code, _, err = run(*words, "--data", f"{mine}:loader")
    assert code == 2
    assert "--task package.module:task, a function that returns bitplan.task(…)" in err.splitlines()[-1]
    code, out, err = run(*words, "--task", f"{mine}:task:samples=16")
    assert code == 0, err
    assert "by drop" in out


def test_finetune_and_evaluate_take_it_too(run, mine):
    run("quantize", f"{mine}:net", "--bits", "w4a4", "--task", f"{mine}:task", "-o", "start")
    words = ("--model", f"{mine}:net", "--task", f"{mine}:task")
    code, out, err = run("finetune", "start", *words, "--recipe", "steps=2", "--recipe", "batch_size=8", "-o", "tuned")
    assert code == 0, err
    code, again, _ = run("evaluate", "tuned", *words)
    assert code == 0
    assert again.split(" on ")[0] == out.split(" on ")[0]
    assert again.startswith("right ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "nowhere:loader"), "cannot import 'nowhere' of nowhere:loader"),
        (("--data", "mine:nothing"), "unknown data in mine 'nothing'"),
        (("--data", "loader"), "--data 'loader' is not package.module:loader"),
        (("--data", "mine:broken"), "mine:broken gives no data, its code raised OSError: no such disk"),
        (("--data", "mine:needs"), "it is called without arguments"),
        (("--data", "mine:loader", "--task", "digits"), "--data and --task are both what the network is run on"),
        (("--task", "mine:no_task"), "DataLoader is no task, for it has no"),
        (("--task", "mine:task:wrong=1"), "task mine:task cannot be made, TypeError"),
        (("--rules", "narrow=128"), "nothing left to choose in mine:net.*--rules narrow=0"),
    ],
)
def test_bad_data_is_one_line(run, mine, words, message):
    import re

    code, out, err = run("plan", f"{mine}:net", "--budget", "70%", *words)
    assert (code, out) == (2, "")
    assert re.search(f"error: .*{message}", err.splitlines()[-1]), err


def test_a_name_that_leads_nowhere_is_said_to(run):
    code, _, err = run("plan", "nosuchfolder", "--budget", "70%")
    assert code == 2
    assert err.startswith("error: unknown model 'nosuchfolder'")
    assert "random weights" not in err


STUDY = """
name = "own"
task = "mine:task"
model = "mine:net"
choices = ["w2a2", "w4a4"]
budgets = ["70%"]
seeds = [0]
references = false
rules = {narrow = 0}
start = {float_recipe = {steps = 2}}
recipe = {steps = 2, batch_size = 8, lr = 0.01}
methods = [{name = "drift", options = {samples = 16}}]
"""


def test_a_study_may_name_a_task_of_the_users_where_she_trusts_it(run, mine, tmp_path):
    (tmp_path / "study.toml").write_text(STUDY.replace('"mine:net"', '"digits_resnet"'))
    code, _, err = run("sweep", "study.toml", "--run", "run")
    assert code == 2
    assert "names code to import (mine:task)" in err
    (tmp_path / "study.toml").write_text(STUDY)
    code, _, err = run("sweep", "study.toml", "--run", "run", "--trust")
    assert code == 0, err
    code, out, _ = run("compare", "run")
    assert code == 0
    assert "right" in out or "drift" in out


def test_what_the_demo_says_to_do_next_works(run, mine, tmp_path):
    """Every command of its last lines, with what it leaves open filled in."""
    from safetensors.torch import save_file

    import bitplan

    save_file(bitplan.load_model("digits_transformer")[0].state_dict(), tmp_path / "model.safetensors")
    filled = NEXT.replace("MODEL", f"{mine}:net").replace("package.module:loader", f"{mine}:loader")
    lines = [line.strip().split("    ")[0] for line in filled.splitlines() if line.startswith("  bitplan ")]
    assert len(lines) == 4
    for line in lines:
        code, _, err = run(*line.split()[1:])
        assert code == 0, (line, err)
    assert (tmp_path / "plan.html").is_file()
