"""docs/faq.md and the other pages that quote errors: each command gives the line that stands below it."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import bitplan

DOCS = Path(__file__).parents[2] / "docs"
QUOTED = re.compile(r"^\$ bitplan (.*)\n(error: .*)$", re.MULTILINE)
PAGES = ("faq.md", "budgets.md")
# What these say depends on trained weights, on this machine's torch, or on a library that is missing.
ELSEWHERE = ("lr=1e30", "edited.json", "--device", "plan resnet50", "-o tuned")
LINES = [
    pytest.param(command, line, id=f"{page}: {command}")
    for page in PAGES
    for command, line in QUOTED.findall((DOCS / page).read_text())
    if not any(part in command for part in ELSEWHERE)
]
MODULE = """
import torch
from torch import nn

class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(128, 128) for _ in range(4))

    def forward(self, x):
        x = self.b(self.a(x).relu())
        return self.d(self.c(x) if x.sum() > 0 else x)

def deciding():
    return Deciding(), torch.randn(1, 128)

def no_input():
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))

def two_layers():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), torch.randn(1, 64)

def raising():
    raise ValueError("no such file: weights.pt")

def wrong():
    return [torch.randn(8, 3, 8, 8) for _ in range(4)]

def nan():
    return [torch.full((8, 1, 8, 8), float("nan")) for _ in range(4)]
"""
STUDY = """
name = "mine"
model = "mymod:no_input"
task = { name = "digits" }
choices = ["w2a2", "w4a4"]
cost = "bmac"
budgets = ["70%"]
seeds = [0]
[recipe]
steps = 2
[start]
[start.float_recipe]
steps = 2
[start.recipe]
steps = 2
[[methods]]
name = "uniform"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the commands name: checkpoints of a network that nobody trained, a module, files of strangers."""
    home = tmp_path_factory.mktemp("faq")
    torch.manual_seed(0)
    model, example = bitplan.load_model("digits_resnet")
    graph = bitplan.trace(model, example, name="digits_resnet")
    plan = bitplan.select(
        graph, bitplan.estimate("uniform", None, graph), bitplan.price("bmac", graph), budget="70%"
    )  # fmt: skip
    bitplan.save(plan, home / "plan.json")
    bitplan.save_checkpoint(model, home / "float", spec="digits_resnet")
    quantized = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.save_checkpoint(quantized, home / "uncalibrated", spec="digits_resnet")
    bitplan.calibrate_(quantized, [torch.rand(16, 1, 8, 8)])
    for name in ("w4a4", "mixed"):
        bitplan.save_checkpoint(quantized, home / name, spec="digits_resnet")
    torch.save({"model": exec, "w": torch.zeros(4, 4)}, home / "code.pth")
    save_file({f"{name}.weight": torch.zeros(128, 128, dtype=torch.int8) for name in "abc"}, home / "int8.safetensors")
    for name, text in (("mymod.py", MODULE), ("study.toml", STUDY), ("digits.onnx", "")):
        (home / name).write_text(text)
    return home


@pytest.mark.parametrize(("command", "line"), LINES)
def test_a_quoted_error_is_the_one_that_is_said(run, monkeypatch, folder, command, line):
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "mymod", raising=False)
    code, _, err = run(*shlex.split(command))
    assert code == 2
    assert err.splitlines()[-1] == line


def test_there_are_lines_to_look_at():
    assert len(LINES) >= 25
