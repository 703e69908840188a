"""A folder of what users type by mistake: files of the wrong kind, cut off, empty; code that fails; a run."""

from __future__ import annotations

import io
import json
import pickle
import struct
import sys
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import bitplan
from bitplan.store.files import save
from bitplan.testing.networks import hand_made_graph

sys.path.insert(0, str(Path(__file__).parents[1] / "reports"))
from report_runs import digits_run

FACTORIES = """
import torch
from torch import nn

def good():
    parts = [nn.Linear(*sizes) for sizes in ((200, 300), (300, 300), (300, 300), (300, 300), (300, 10))]
    return nn.Sequential(*parts), torch.empty(1, 200)

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
    def forward(self, x):
        return self.one(x) + self.missing

class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
    def forward(self, x):
        return self.one(x) if x.sum() < 100 else x

class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
    def forward(self, *, pixels):
        return self.one(pixels)

def broken(): return Broken(), torch.empty(1, 4)
def decides(): return Decides(), torch.empty(1, 4)
def keywords(): return Keywords(), torch.empty(1, 4)
def narrow(): return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)), torch.empty(1, 4)
def lonely(): return nn.Linear(4, 4), torch.empty(1, 4)
def without_layers(): return nn.Sequential(nn.ReLU()), torch.empty(1, 4)
def misfit(): return good()[0], torch.empty(1, 100)
def no_example(): return good()[0]
def three(): return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3)), torch.empty(1, 1, 8, 8)
def needs(width, depth, *, bias=True): ...
def fails(): return {}['weights']
def silent(): raise OSError
def exits(): raise SystemExit(3)
def text(): return "a model"
def a_class(): return nn.Linear
def nothing(): return None
def state(): return good()[0].state_dict()
number = 1
"""

STUDY = """
name = "small"
task = "digits"
model = "digits_resnet"
choices = ["w2a2", "w4a4"]
budgets = ["70%"]
seeds = [0]
[rules]
narrow = 0
[recipe]
steps = 2
batch_size = 16
[start]
[start.float_recipe]
steps = 2
[[methods]]
name = "uniform"
"""


class Evil:
    """A pickle that wants to run a command."""

    def __reduce__(self):
        import os

        return os.system, ("echo owned",)


def make(folder: Path) -> None:
    """Write all of it."""
    _records(folder)
    _tables(folder)
    _weights(folder)
    _texts(folder)
    digits_run(folder / "run")
    digits_run(folder / "begun", results=False)
    network = _calibrated(bitplan.quantize(*_small()))
    bitplan.save_checkpoint(network, folder / "q", spec="digits_resnet")
    for name in ("headless", "beheaded"):
        bitplan.save_checkpoint(network, folder / name, spec="digits_resnet")
    (folder / "headless" / "model.safetensors").unlink()
    (folder / "beheaded" / "checkpoint.json").write_text("{}")
    bitplan.save_checkpoint(bitplan.load_model("digits_resnet")[0], folder / "float", spec="digits_resnet")
    for name in ("empty", "of_pictures", "cifar"):
        (folder / name).mkdir()
    (folder / "of_pictures" / "cat.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "file").write_text("a file\n")
    _cifar(folder / "cifar" / "cifar-10-batches-py")


def _small():
    model, example = bitplan.load_model("digits_resnet")
    return model, bitplan.Plan.uniform(bitplan.trace(model, example, rules=bitplan.Rules(narrow=0)), "w4a4")


def _calibrated(network):
    task = bitplan.load_task("digits")
    bitplan.calibrate_(network, [next(iter(task.batches("train", 16, None)))], forward=task.forward)
    return network


def _records(folder: Path) -> None:
    graph = hand_made_graph()
    save(graph, folder / "graph.json")
    save(bitplan.Plan.uniform(graph, 4), folder / "plan.json")
    save(bitplan.estimate("uniform", None, graph), folder / "gains.json")
    save(bitplan.price("bmac", graph), folder / "bmac.json")
    save(bitplan.price("memory", graph), folder / "memory.json")
    save(bitplan.price("bmac", graph, "w2a2,w3a3,w4a4"), folder / "three.json")
    other = bitplan.trace(*bitplan.load_model("digits_resnet", weightless=True), rules=bitplan.Rules(narrow=0))
    save(other, folder / "other_graph.json")
    save(bitplan.estimate("uniform", None, other), folder / "other_gains.json")
    text = (folder / "graph.json").read_text()
    for name, content in {
        "cut": text[:200],
        "newer": text.replace('"format": 1', '"format": 9'),
        "edited": text.replace('"macs": ', '"macs": 1'),
        "renamed": text.replace('"bitplan": "graph"', '"bitplan": "grpah"'),
        "text": "hello",
        "none": "",
        "list": "[1, 2]",
        "number": "3",
        "object": "{}",
        "twice": '{"kind": "graph", "kind": "plan"}',
        "nan": '{"kind": "graph", "layers": NaN}',
        "huggingface": '{"architectures": ["BertModel"], "hidden_size": 32}',
    }.items():
        (folder / f"{name}.json").write_text(content)
    (folder / "utf16.json").write_bytes(text.encode("utf-16"))
    (folder / "picture.json").write_bytes(b"\x89PNG\r\n\xff")


def _tables(folder: Path) -> None:
    head, rows = "layer,w2a2,w4a4", "side,1,2\nb,1,2\nc,1,2"
    for name, content in {
        "no_rows": "layer,gain\n",
        "nothing": "",
        "nan": "layer,gain\na,1\nside,1\nb,nan\nc,1\n",
        "inf": "layer,gain\na,1\nside,1\nb,inf\nc,1\n",
        "words": "layer,gain\na,much\nside,1\nb,1\nc,1\n",
        "unknown": "layer,gain\na,1\nside,1\nb,1\nc,1\nbb,1\n",
        "lacking": "layer,gain\na,1\nb,1\n",
        "doubled": "layer,gain\na,1\na,1\nside,1\nb,1\nc,1\n",
        "headless": "a,1\nb,2\n",
        "semicolons": "layer;gain\na;1\nb;1\n",
        "negative": f"{head}\na,1,-2\n{rows}\n",
        "fraction": f"{head}\na,1,2.5\n{rows}\n",
        "short": f"{head}\na,1\n{rows}\n",
        "falling": f"{head}\na,5,2\n{rows}\n",
        "odd_choice": f"layer,w2a2,w5a5\na,1,2\n{rows}\n",
        "odd_unit": f"# unit: parsecs\n{head}\na,1,2\n{rows}\n",
    }.items():
        (folder / f"{name}.csv").write_text(content)
    (folder / "utf16.csv").write_bytes("layer,gain\na,1\n".encode("utf-16"))


def _weights(folder: Path) -> None:
    ones = {f"{name}.weight": torch.ones(300, 300) for name in "abcd"}
    save_file(ones, folder / "net.safetensors")
    save_file({"a.weight": torch.ones(300, 300, dtype=torch.int8)}, folder / "ints.safetensors")
    save_file(ones | {"b.weight": torch.full((300, 300), float("nan"))}, folder / "nan.safetensors")
    save_file({"a.weight": torch.ones(300)}, folder / "flat.safetensors")
    (folder / "none.safetensors").write_bytes(b"")
    (folder / "cut.safetensors").write_bytes((folder / "net.safetensors").read_bytes()[:1000])
    (folder / "text.safetensors").write_text("hello")
    (folder / "huge.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    torch.save({"a": Evil()}, folder / "evil.pth")
    (folder / "evil.pkl").write_bytes(pickle.dumps(Evil()))
    torch.save(torch.nn.Linear(4, 4), folder / "whole.pth")
    torch.save(ones, folder / "cut.pth")
    (folder / "cut.pth").write_bytes((folder / "cut.pth").read_bytes()[:500])
    torch.save([1, 2, 3], folder / "list.pth")
    (folder / "none.pth").write_bytes(b"")
    (folder / "text.pth").write_text("hello")
    (folder / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    (folder / "model.onnx").write_bytes(b"\x08\x07hello")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("weights.npy", b"x")
    for name in ("weights.npz", "archive.zip"):
        (folder / name).write_bytes(packed.getvalue())
    (folder / "weights.h5").write_bytes(b"\x89HDF\r\n\x1a\n")


def _texts(folder: Path) -> None:
    (folder / "bad_factories.py").write_text(FACTORIES)
    (folder / "bad_raises.py").write_text("raise RuntimeError('my own bug')\n")
    (folder / "bad_syntax.py").write_text("def build(:\n")
    (folder / "bad_imports.py").write_text("import no_such_library\ndef build(): ...\n")
    (folder / "notebook.ipynb").write_text(json.dumps({"cells": [], "nbformat": 4}))
    (folder / "study.toml").write_text(STUDY)
    for name, (old, new) in {
        "no_methods": ('[[methods]]\nname = "uniform"', ""),
        "no_budget": ('budgets = ["70%"]', "budgets = []"),
        "odd_budget": ("70%", "lots"),
        "low_budget": ("70%", "1%"),
        "odd_method": ('name = "uniform"', 'name = "unifrom"'),
        "odd_option": ('name = "uniform"', 'name = "uniform"\noptions = { sise = 3 }'),
        "odd_task": ('task = "digits"', 'task = "digit"'),
        "odd_model": ("digits_resnet", "digits_resent"),
        "odd_cost": ("[rules]", 'cost = "bmacs"\n[rules]'),
        "odd_choice": ('"w4a4"', '"4bit"'),
        "odd_key": ('name = "small"', 'name = "small"\nsedes = [0]'),
        "odd_quantizer": ("[start]", "[start]\noptions = { method = 'pcat' }"),
        "few_bits": ("[start]", "[start]\noptions = { method = 'ternary' }"),
        "odd_recipe": ("steps = 2\nbatch_size", "stpes = 2\nbatch_size"),
        "nan_recipe": ("batch_size = 16", "batch_size = 16\nlr = nan"),
        "odd_engine": ("[rules]", "[engine]\nname = 'lcal'\n[rules]"),
        "odd_seed": ("seeds = [0]", 'seeds = ["a"]'),
        "same_seed": ("seeds = [0]", "seeds = [0, 0]"),
        "no_model": ('model = "digits_resnet"', ""),
        "falling": ('["w2a2", "w4a4"]', '["w4a4", "w2a2"]'),
        "of_code": ("digits_resnet", "bad_factories:good"),
        "elsewhere": ('name = "small"', 'name = "../small"'),
    }.items():
        assert old in STUDY
        (folder / f"{name}.toml").write_text(STUDY.replace(old, new, 1))
    (folder / "cut.toml").write_text("epochs = = 3")
    (folder / "none.toml").write_text("")
    (folder / "utf16.toml").write_bytes("epochs = 3".encode("utf-16"))
    (folder / "recipe.toml").write_text("epochs = 1\nsteps = 2\n")
    (folder / "odd_rate.toml").write_text("steps = 2\nlr = -1\n")


def _cifar(folder: Path) -> None:
    """The files of CIFAR-10 with a few pictures each, as its authors pack them."""
    folder.mkdir()
    images = {b"data": torch.zeros(20, 3072, dtype=torch.uint8).numpy(), b"labels": list(range(10)) * 2}
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(pickle.dumps(images, protocol=2))
