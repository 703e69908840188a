"""Every reader of files that users hand to bitplan: what it reads, and how its files are damaged.

A reader is given one file, with what it needs beside it already there. It returns, or raises bitplan's own errors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bitplan
from benchmarks.fuzz import mutations
from benchmarks.fuzz.mutations import Mutate
from bitplan.core.errors import FileError, InputError
from bitplan.core.record import Record
from bitplan.core.records import ABOUT, TENSORS
from bitplan.core.rules import Rules
from bitplan.core.trials import Recipe, Run
from bitplan.store.files import load, write_text
from bitplan.testing.networks import hand_made_graph


@dataclass(frozen=True)
class Reader:
    """How a kind of file is read, what its file is called, how it is damaged, and what must lie beside it."""

    read: Callable[[Path], Any]
    name: str
    mutate: tuple[Mutate, ...] = (mutations.of_bytes,)
    beside: Callable[[Path], Any] = lambda folder: None


@cache
def network() -> nn.Module:
    """The network whose files are damaged: two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))


@cache
def graph() -> bitplan.Graph:
    """Its graph."""
    return bitplan.trace(network(), torch.zeros(1, 8), rules=Rules(first=None, last=None, narrow=0), name="net")


def quantized(precision: str = "w4a4") -> nn.Module:
    """A copy of it at one precision."""
    made = bitplan.quantize(network(), bitplan.Plan.uniform(graph(), precision))
    bitplan.calibrate_(made, [torch.linspace(-1, 2, 32).view(4, 8)])
    return made


def training() -> Run:
    """The training that a resumed one must be."""
    return Run(recipe=Recipe(steps=4), seed=0, task="digits", network="n", weights="w")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """One that remembers something."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _record(path: Path) -> None:
    record = load(path, Record)
    again = Record.from_json(record.to_json())
    assert again.id == record.id


def _weights(path: Path) -> None:
    from bitplan.graph.names import trace_checkpoint
    from bitplan.weights.opened import open_checkpoint
    from bitplan.weights.torch_tensors import read_weights

    opened = open_checkpoint(path)
    read_weights(path)
    with suppress(InputError):  # about what was read, which is no longer about the file
        bitplan.estimate("eagl", opened, trace_checkpoint(opened, Rules(first=None, last=None, narrow=0)))


def _settings(path: Path) -> None:
    model = nn.Sequential(*network())
    model.config = type("Config", (), {"model_type": "bert", "num_attention_heads": 2, "hidden_act": "gelu"})()
    bitplan.load_weights_(model, path.parent)


def _table(path: Path) -> None:
    found, small = bitplan.price(str(path), hand_made_graph()), hand_made_graph()
    with suppress(InputError):
        bitplan.select(small, bitplan.estimate("uniform", None, small), found, budget="70%")


def _gains(path: Path) -> None:
    small = hand_made_graph()
    gains = bitplan.estimate("table", None, small, path=str(path))
    with suppress(InputError):
        bitplan.select(small, gains, bitplan.price("bmac", small), budget="70%")


def _recipe(path: Path) -> None:
    from bitplan.cli.options import read_recipe

    read_recipe([str(path)])


def _study(path: Path) -> None:
    from bitplan.study.spec import read_study

    Record.from_json(read_study(path).to_json())


def _exported(path: Path) -> None:
    from bitplan.exporters.base import exporter_of

    exporter_of(path).read(path)


def _packed(path: Path) -> None:
    from bitplan.exporters.packed import Packed

    Packed().read(path)
    bitplan.load_packed(path, network())


def _resumed(path: Path) -> None:
    from bitplan.tune.resume import TrainingFolder
    from bitplan.tune.validation import Judge

    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    judge = Judge(lambda model: (0.0,), 1, 1)
    TrainingFolder(path.parent, training()).restore_(model, optimizer_of(model), judge)


def _log(path: Path) -> None:
    from bitplan.tune.log import hash_of_lines, last_step, read_log

    read_log(path, up_to=3)
    last_step(path.parent)
    hash_of_lines(path, 3)


def _lease(path: Path) -> None:
    from bitplan.store.lease import SilentHolders, hold_lease, read_lease

    sign = read_lease(path)
    SilentHolders(patience=0).stale(path)
    with hold_lease(path, stale=sign.holder.token if sign else None):
        pass


def _checkpoint(path: Path) -> None:
    bitplan.load_checkpoint(path.parent, network())


def _parquet(path: Path) -> None:
    from bitplan.plugins.data.encoded_images import from_parquet

    from_parquet([path], 10)


def _image(path: Path) -> None:
    from bitplan.plugins.data import pillow

    with suppress(FileError):  # most have colours
        pillow.decode_classes(str(path))
    try:
        pillow.decode(str(path))
    except FileError as error:  # whoever knows its name adds it: `plugins/data/encoded_images.py`
        raise FileError(f"{path}: {error}") from None


def _batch(path: Path) -> None:
    from bitplan.plugins.data.cifar10 import read_batch

    read_batch(path, 10)


def _questions(path: Path) -> None:
    from bitplan.plugins.data.squad import read_questions

    read_questions(path.parent, "train")


def _tokenizer(path: Path) -> None:
    from bitplan.adapters.tokenizers import load_word_pieces

    load_word_pieces(path.parent)(["an apple"])


def _shards_beside(folder: Path) -> None:
    from safetensors.torch import save_file

    for part in ("0", "2"):
        tensors = {name: value for name, value in network().state_dict().items() if name.startswith(part)}
        save_file(tensors, folder / f"model-{part}.safetensors")


def _tensors_beside(folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(network().state_dict(), folder / TENSORS)


def _checkpoint_beside(folder: Path) -> None:
    bitplan.save_checkpoint(quantized(), folder / "whole")
    (folder / TENSORS).write_bytes((folder / "whole" / TENSORS).read_bytes())


def _words_beside(folder: Path) -> None:
    write_text(folder / "vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\nan\napple\n##s\n")


def _run_beside(folder: Path) -> None:
    write_text(folder / "run.json", training().to_json())


_JSON, _TEXT = (mutations.of_json, mutations.of_json, mutations.of_bytes), (mutations.of_text, mutations.of_bytes)
_HEADER, _PROTOBUF = (mutations.of_safetensors,), (mutations.of_protobuf,)

READERS: dict[str, Reader] = {
    "record": Reader(_record, "record.json", _JSON),
    "study": Reader(_study, "study.toml", _TEXT),
    "recipe": Reader(_recipe, "recipe.toml", _TEXT),
    "costs-csv": Reader(_table, "costs.csv", _TEXT),
    "costs-json": Reader(_table, "costs.json", _JSON),
    "gains-csv": Reader(_gains, "gains.csv", _TEXT),
    "safetensors": Reader(_weights, "model.safetensors", _HEADER),
    "pth": Reader(_weights, "model.pth", (mutations.of_zip,)),
    "old-pth": Reader(_weights, "old.pth"),
    "index": Reader(_weights, "model.safetensors.index.json", _JSON, _shards_beside),
    "settings": Reader(_settings, "config.json", _JSON, _tensors_beside),
    "checkpoint": Reader(_checkpoint, ABOUT, _JSON, _checkpoint_beside),
    "packed": Reader(_packed, "packed.safetensors", _HEADER),
    "onnx": Reader(_exported, "net.onnx", _PROTOBUF),
    "qonnx": Reader(_exported, "net.onnx", _PROTOBUF),
    "matmulnbits": Reader(_exported, "net.onnx", _PROTOBUF),
    "recipes": Reader(_exported, "recipe.json", _JSON),
    "llama": Reader(_exported, "recipe.txt", _TEXT),
    "resume": Reader(_resumed, "resume.safetensors", _HEADER, _run_beside),
    "log": Reader(_log, "log.jsonl", (*_JSON, mutations.of_text)),
    "lease": Reader(_lease, "lease", _JSON),
    "parquet": Reader(_parquet, "train.parquet"),
    "image": Reader(_image, "image.png"),
    "batch": Reader(_batch, "data_batch_1"),
    "squad": Reader(_questions, "train-v1.1.json", _JSON),
    "tokenizer": Reader(_tokenizer, "tokenizer.json", _JSON),
    "words": Reader(_tokenizer, "tokenizer_config.json", _JSON, _words_beside),
}
