"""EAGL against merely reading the bytes, interleaved in one process, by the CPU time of all threads."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types
from safetensors.numpy import save_file

from benchmarks.rows import Row
from benchmarks.streaming import write_llama
from benchmarks.timing import in_turn
from bitplan.core.precision import parse_choices
from bitplan.gains.eagl import Eagl
from bitplan.gains.histogram import Scheme, Weights, count_weights
from bitplan.graph.names import read_graph
from bitplan.models.zoo import load_model
from bitplan.weights.opened import open_checkpoint
from bitplan.weights.tensors import Tensor

CHOICES = parse_choices("w2a2,w4a4")


@njit((types.Array(types.uint64, 1, "C", readonly=True),), nogil=True, cache=True)
def _read(words: Any) -> Any:
    return np.sum(words)


def read(buffers: list[np.ndarray]) -> object:
    """Sum all bytes as words of 64 bits."""
    return [_read(part[: part.size // 8 * 8].view(np.uint64)) for part in buffers]


def rows() -> list[Row]:
    """Ratios of the fastest turns."""
    made = []
    with tempfile.TemporaryDirectory() as folder:
        for what, ours, peer in (in_memory(), quantized_file(Path(folder)), large_file(Path(folder))):
            ours()  # compiles, and brings the file into memory
            seconds = in_turn({"peer": peer, "ours": ours}, 10, clock=time.process_time)
            made.append(
                Row(what, 1e3 * seconds["ours"], 1e3 * seconds["peer"], "reading the same bytes", "CPU ms", target=4.0)
            )
    return made


Bench = tuple[str, Callable[[], object], Callable[[], object]]
"""What is measured, ours, and reading."""


def in_memory() -> Bench:
    """ResNet-50's weights with learned steps."""
    arrays, steps = _weights_and_steps()
    weights = [
        Weights(Tensor(name, "F32", array.shape, array.ravel()), learned=step, bits=4)
        for (name, array), step in zip(arrays.items(), steps, strict=True)
    ]
    buffers = [array.ravel().view(np.uint8) for array in arrays.values()]
    return "ResNet-50 in memory, learned steps", lambda: count_weights(weights, [4], Scheme()), lambda: read(buffers)


def quantized_file(folder: Path) -> Bench:
    """A file of weights with learned steps, as `save_checkpoint` writes it; from opening it to the gains."""
    arrays, steps = _weights_and_steps()
    path = folder / "quantized.safetensors"
    save_file(arrays | {f"{name}_quantizer.step": step for name, step in zip(arrays, steps, strict=True)}, path)
    graph = read_graph(path)
    return (
        "ResNet-50's quantized file, opened, mapped, counted",
        lambda: Eagl(steps="learned").layer_gains(path, graph, CHOICES),
        lambda: read([np.memmap(path, np.uint8, "r")]),
    )


def _weights_and_steps() -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(0)
    weights = dict(load_model("resnet50", weightless=True)[0].named_parameters())
    arrays = {
        name: rng.standard_normal(tuple(weight.shape), np.float32) * np.float32(0.02)
        for name, weight in weights.items()
        if weight.dim() > 1
    }
    return arrays, [np.float32(2 * np.abs(array).mean() / np.sqrt(7)).reshape(1) for array in arrays.values()]


def large_file(folder: Path) -> Bench:
    """A language model's file, with a search for every step."""
    write_llama(folder, blocks=4, sparse=False)
    path = folder / "model.safetensors"
    graph = read_graph(path)
    return (
        "2 GB of bf16, mapped, mse steps",
        lambda: Eagl().layer_gains(path, graph, CHOICES),
        lambda: read([tensor.data.view(np.uint8) for tensor in open_checkpoint(path).tensors.values()]),
    )
