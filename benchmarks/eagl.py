"""EAGL against merely reading the bytes: `python -m benchmarks.eagl`.

Both take turns within one process, by the CPU time of all threads, so that a busy machine counts little.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types
from safetensors.numpy import save_file

from benchmarks.rows import Row
from benchmarks.timing import in_turn
from bitplan.core.precision import parse_choices
from bitplan.gains.eagl import Eagl
from bitplan.gains.histogram import Scheme, Weights, count_weights
from bitplan.graph.names import read_graph
from bitplan.weights.opened import open_checkpoint
from bitplan.weights.tensors import Tensor

CHOICES = parse_choices("w2a2,w4a4")


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The 54 weights of ResNet-50: 53 convolutions and the classifier."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7)]
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            shapes += [(width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                shapes.append((4 * width, inputs, 1, 1))
            inputs = 4 * width
    return [*shapes, (1000, 2048)]


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
    arrays = {
        f"l{i}.weight": rng.standard_normal(shape, np.float32) * np.float32(0.02)
        for i, shape in enumerate(resnet50_shapes())
    }
    return arrays, [np.float32(2 * np.abs(array).mean() / np.sqrt(7)).reshape(1) for array in arrays.values()]


def write_llm(path: Path) -> None:
    """About 2 GB of bf16 in the shapes of a 1 B language model."""
    shapes = {"model.embed_tokens.weight": (32768, 2048), "lm_head.weight": (32768, 2048)}
    for i in range(15):
        block = f"model.layers.{i}"
        shapes |= {f"{block}.self_attn.{n}_proj.weight": (2048, 2048) for n in ("q", "o")}
        shapes |= {f"{block}.self_attn.{n}_proj.weight": (512, 2048) for n in ("k", "v")}
        shapes |= {f"{block}.mlp.{n}_proj.weight": (8192, 2048) for n in ("gate", "up")}
        shapes |= {f"{block}.mlp.down_proj.weight": (2048, 8192)}
    header, place = {}, 0
    for name, shape in shapes.items():
        end = place + 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    bell = np.random.default_rng(0).standard_normal(1 << 22, np.float32) * np.float32(0.02)
    patterns = (bell.view(np.uint32) >> 16).astype(np.uint16)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for turn, (rows, columns) in enumerate(shapes.values()):
            file.write(np.resize(np.roll(patterns, 7919 * turn), rows * columns).tobytes())


def large_file(folder: Path) -> Bench:
    """A language model's file, with a search for every step."""
    path = folder / "llm.safetensors"
    write_llm(path)
    graph = read_graph(path)
    return (
        "2 GB of bf16, mapped, mse steps",
        lambda: Eagl().layer_gains(path, graph, CHOICES),
        lambda: read([tensor.data.view(np.uint8) for tensor in open_checkpoint(path).tensors.values()]),
    )


def main() -> None:
    """Print the rows."""
    for row in rows():
        print(" ".join(row.cells()))


if __name__ == "__main__":
    main()
