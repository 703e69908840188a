"""Sound files of bitplan's own formats, small: `python -m benchmarks.fuzz --seeds` writes them anew.

The other files of the corpus (tables, texts, images, files of other libraries) do not depend on bitplan.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

import bitplan
from benchmarks.fuzz.readers import graph, optimizer_of, quantized, training
from bitplan.core.records import ABOUT, Checkpoint
from bitplan.core.trials import Recipe
from bitplan.store.files import load, write_bytes, write_text
from bitplan.testing.networks import hand_made_graph


def write_seeds(corpus: Path) -> None:
    """Write one or a few sound files for every reader of a format of ours, under `corpus/READER`."""
    for write in (_records, _exported, _trainings):
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
