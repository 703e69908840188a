"""The sound files that all damage starts from, small: `python -m benchmarks.fuzz --seeds` writes them anew."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import nn

import bitplan
from benchmarks.fuzz.readers import graph, network, optimizer_of, quantized, training
from bitplan.core.records import ABOUT, Checkpoint
from bitplan.core.trials import Recipe
from bitplan.store.files import load, write_bytes, write_text
from bitplan.testing.networks import hand_made_graph

_STUDY = """name = "digits"
task = { name = "digits", data = "$HOME" }
model = "digits_resnet"
choices = ["w2a2", "w4a4"]
budgets = ["80%", "60%"]
seeds = [0, 1, 2]

[rules]
first = "w8a8"
fix = ["*.head=w8a8"]

[recipe]
steps = 100
lr = 0.01

[start]
float_recipe = { steps = 20 }

[engine]
name = "local"
workers = 2

[[methods]]
name = "eagl"

[[methods]]
name = "alps"
label = "ALPS"
recipe = { steps = 5 }
"""
_COSTS = "# unit: ns\nlayer,w2a2,w4a4,w8a8\nstem,1,2,3\na,10,20,40\nb,5,9,17\nside,1,2,3\nc,4,7,9\nhead,1,2,3\n"


def write_seeds(corpus: Path) -> None:
    """One or a few sound files for every reader, under `corpus/READER`."""
    for write in (_records, _texts, _weights, _exported, _trainings, _data):
        write(corpus)


def _records(corpus: Path) -> None:
    small = hand_made_graph()
    gains, costs = bitplan.estimate("uniform", None, small), bitplan.price("bmac", small)
    plan = bitplan.select(small, gains, costs, budget="70%")
    for record in (small, gains, costs, plan, Recipe(steps=3), training()):
        write_text(corpus / "record" / f"{record.kind()}.json", record.to_json())
    with TemporaryDirectory() as folder:
        bitplan.save_checkpoint(quantized(), Path(folder) / "whole")
        about = load(Path(folder) / "whole" / ABOUT, Checkpoint)
    write_text(corpus / "checkpoint" / ABOUT, about.to_json())


def _texts(corpus: Path) -> None:
    write_text(corpus / "study" / "study.toml", _STUDY)
    write_text(
        corpus / "recipe" / "recipe.toml",
        "[recipe]\nsteps = 100\nlr = 0.01\n",
    )
    write_text(corpus / "costs-csv" / "costs.csv", _COSTS)
    rows = [line.split(",") for line in _COSTS.splitlines()[2:]]
    table = {row[0]: dict(zip(("w2a2", "w4a4", "w8a8"), map(int, row[1:]), strict=True)) for row in rows}
    write_text(corpus / "costs-json" / "costs.json", json.dumps({"# unit": "ns"} | table))
    write_text(corpus / "gains-csv" / "gains.csv", "layer,w2a2,w4a4\na,0,1.5\nb,0,2\nside,0,1\nc,0.5,3e-1\n")


def _weights(corpus: Path) -> None:
    from safetensors.torch import save

    state = network().state_dict()
    write_bytes(corpus / "safetensors" / "model.safetensors", save(state, {"format": "pt"}))
    for name, zipped in (("pth", True), ("old-pth", False)):
        for kind, content in (("state", state), ("nested", {"epoch": 3, "model": state, "rng": b"12"})):
            out = io.BytesIO()
            torch.save(content, out, _use_new_zipfile_serialization=zipped)
            write_bytes(corpus / name / f"{kind}.pth", out.getvalue())
    names = {name: f"model-{name[0]}.safetensors" for name in state}
    write_text(corpus / "index" / "model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": names}))
    write_text(corpus / "settings" / "config.json", json.dumps({"model_type": "bert", "num_attention_heads": 2}))


def _exported(corpus: Path) -> None:
    example = torch.zeros(1, 8)
    with TemporaryDirectory() as folder:
        for name, to, precision in (
            ("packed", "packed", "w4a4"), ("onnx", "onnx", "w4a4"), ("qonnx", "qonnx", "w3a4"),
            ("matmulnbits", "matmulnbits", "w4a16"),
        ):  # fmt: skip
            path = Path(folder) / f"{name}.x"
            bitplan.export(quantized(precision), path, to, example=example)
            ending = ".safetensors" if name == "packed" else ".onnx"
            write_bytes(corpus / name / f"net{ending}", path.read_bytes())
    plan = bitplan.Plan.uniform(graph(), "w4a16")
    for to in ("mlx", "torchao", "compressed-tensors"):
        path = corpus / "recipes" / f"{to}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        options = {"group_size": 32} if to == "mlx" else {}
        bitplan.export(plan, path, to, force=True, **options)
    write_text(corpus / "llama" / "recipe.txt", "^blk\\.0\\.attn_q\\.weight$=q4_K\n^output\\.weight$=q8_0\n")


def _trainings(corpus: Path) -> None:
    from bitplan.tune.log import LogFile, LogLine
    from bitplan.tune.resume import Mark, TrainingFolder
    from bitplan.tune.validation import Judge, Look

    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    optimizer = optimizer_of(model)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    with TemporaryDirectory() as name:
        folder = TrainingFolder(name, training())
        log = LogFile(folder.log)
        for step in (1, 2):
            log.add(LogLine(step, 0, 0.5, None, 0.1, 100.0, 1.0))
        log.close()
        folder.save(model, optimizer, Mark(2, 1.5), Judge(lambda model: (0.0,), 1, 1, looks=[Look(0, (0.5,))]))
        state = Path(name) / "resume.safetensors"
        write_bytes(corpus / "log" / "log.jsonl", folder.log.read_bytes())
        write_bytes(corpus / "resume" / "sealed.safetensors", state.read_bytes())
    holder = {"machine": "m", "pid": 4, "born": "7", "token": "ab12"}
    write_text(corpus / "lease" / "lease", json.dumps(holder))


def _data(corpus: Path) -> None:
    import pyarrow
    import pyarrow.parquet
    from PIL import Image
    from tokenizers import BertWordPieceTokenizer

    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    for ending in ("png", "jpeg", "webp", "bmp", "gif"):
        out = io.BytesIO()
        picture.save(out, ending)
        write_bytes(corpus / "image" / f"image.{ending}", out.getvalue())
    rows = {"file": ["a", "b"], "label": [1, 2], "webp": [out.getvalue()] * 2}
    for packing in ("none", "zstd"):
        parquet = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(rows), parquet, compression=packing)
        write_bytes(corpus / "parquet" / f"{packing}.parquet", parquet.getvalue())
    content = {b"labels": [3], b"data": np.arange(3072).astype(np.uint8)[None]}
    write_bytes(corpus / "batch" / "data_batch_1", pickle.dumps(content, protocol=2))
    answer = {"text": "red", "answer_start": 2}
    asked = {"id": "1", "question": "?", "answers": [answer]}
    article = {"title": "t", "paragraphs": [{"context": "a red one", "qas": [asked]}]}
    write_text(corpus / "squad" / "train.json", json.dumps({"version": "1.1", "data": [article]}))
    words = {
        word: place for place, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "an", "apple", "##s"))
    }
    write_text(corpus / "tokenizer" / "tokenizer.json", BertWordPieceTokenizer(words).to_str())
    write_text(corpus / "words" / "tokenizer_config.json", json.dumps({"do_lower_case": False}))
