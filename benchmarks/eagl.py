"""EAGL against merely reading the bytes and against the paper's snippet: `python -m benchmarks.eagl`.

All is timed in turns within one process, by the processor's time of all threads, so that a busy machine counts little.
Ratios of the fastest turns say what the code can do, ratios of the medians what it did meanwhile.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit, types
from safetensors.numpy import save_file

from benchmarks.rows import Row
from bitplan.core.precision import parse_choices
from bitplan.gains.counting.pieces import threads
from bitplan.gains.counting.scheme import Scheme, Weights, count_weights
from bitplan.gains.eagl import Eagl
from bitplan.graph.names import read_graph
from bitplan.weights.opened import open_checkpoint
from bitplan.weights.tensors import Tensor

Taken = dict[str, tuple[float, float]]
_PIECE = 1 << 22  # bytes per job of the read loop


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


def reader(buffers: list[np.ndarray]) -> Callable[[], object]:
    """The tuned read loop: sums of 64-bit words, in jobs of 4 MB, on threads that are there already."""
    pool = ThreadPoolExecutor(threads())
    parts = [part[i : i + _PIECE] for part in buffers for i in range(0, part.size, _PIECE)]
    words = [part[: part.size // 8 * 8].view(np.uint64) for part in parts]
    return lambda: list(pool.map(_read, words))


def snippet(weights: list[torch.Tensor], steps: list[torch.Tensor], bits: int = 4) -> list[float]:
    """The paper's appendix, on all tensors."""
    found = []
    low = -(2 ** (bits - 1))
    for weight, step in zip(weights, steps, strict=True):
        codes = ((weight / step).clamp(low, -low - 1).round().contiguous().view(-1) + (-low)).int()
        p = torch.bincount(codes, minlength=2**bits).float() / codes.numel() + 1e-10
        found.append(float(-(p * p.log2()).sum()))
    return found


def interleaved(rounds: int, runs: dict[str, Callable[[], object]]) -> Taken:
    """Least and median seconds of each, taken in turns after one that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            begin = time.process_time()
            run()
            if turn:
                taken[name].append(time.process_time() - begin)
    return {name: (min(seconds), statistics.median(seconds)) for name, seconds in taken.items()}


def rows() -> list[Row]:
    """Ratios of the fastest turns."""
    made = []
    with tempfile.TemporaryDirectory() as folder:
        benches = {
            "ResNet-50 in memory, learned steps": (bench_resnet50, 1.5),
            "ResNet-50's quantized file, opened, mapped, counted": (lambda: bench_quantized(Path(folder)), 1.5),
            "2 GB of bf16, mapped, mse steps": (lambda: bench_file(Path(folder)), 2.0),
        }
        for what, (bench, target) in benches.items():
            (peer, _), (ours, _), *_ = bench()[1].values()
            made.append(Row(what, 1e3 * ours, 1e3 * peer, "reading the same bytes", "CPU ms", target))
    return made


def bench_quantized(folder: Path, rounds: int = 15) -> tuple[str, Taken, int]:
    """A file of weights with learned steps, as `save_checkpoint` writes it; from opening it to the gains."""
    arrays = {f"l{i}.weight": np.random.default_rng(i).standard_normal(s, np.float32) * 0.02 for i, s in _numbered()}
    steps = {
        f"l{i}.weight_quantizer.step": np.float32(2 * np.abs(arrays[f"l{i}.weight"]).mean() / np.sqrt(7)).reshape(1)
        for i, _ in _numbered()
    }
    path = folder / "quantized.safetensors"
    save_file(arrays | steps, path)
    graph, choices = read_graph(path), parse_choices("w2a2,w4a4")

    def read() -> object:
        mapped = np.memmap(path, np.uint8, "r")
        return reader([mapped[: mapped.size // 8 * 8]])()

    taken = interleaved(
        rounds,
        {
            "mapping and reading": read,
            "EAGL, opened and counted": lambda: Eagl(steps="learned").layer_gains(path, graph, choices),
        },
    )
    return "ResNet-50's quantized file: opened, mapped, counted", taken, path.stat().st_size


def _numbered() -> list[tuple[int, tuple[int, ...]]]:
    return list(enumerate(resnet50_shapes()))


def bench_resnet50(rounds: int = 15) -> tuple[str, Taken, int]:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, np.float32) * 0.02 for shape in resnet50_shapes()]
    steps = [np.float32(2 * np.abs(array).mean() / np.sqrt(7)) for array in arrays]
    weights = [
        Weights(Tensor(f"w{i}", "F32", array.shape, array.ravel()), learned=np.array([step]), bits=4)
        for i, (array, step) in enumerate(zip(arrays, steps, strict=True))
    ]
    tensors = [torch.from_numpy(array) for array in arrays]
    scales = [torch.tensor(step) for step in steps]
    taken = interleaved(
        rounds,
        {
            "reading the bytes": reader([array.ravel().view(np.uint8) for array in arrays]),
            "EAGL, learned steps": lambda: count_weights(weights, [4], Scheme()),
            "the paper's snippet": lambda: snippet(tensors, scales),
        },
    )
    size = sum(array.nbytes for array in arrays)
    return f"ResNet-50: {len(arrays)} fp32 tensors, {size / 4e6:.1f} M weights, {threads()} threads", taken, size


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


def bench_file(folder: Path, rounds: int = 5) -> tuple[str, Taken, int]:
    path = folder / "llm.safetensors"
    write_llm(path)
    graph, choices, size = read_graph(path), parse_choices("w2a2,w4a4"), path.stat().st_size

    def read() -> object:  # from opening the file on, as EAGL does
        return reader([tensor.data.view(np.uint8) for tensor in open_checkpoint(path).tensors.values()])()

    taken = interleaved(
        rounds,
        {
            "mapping and reading": read,
            "EAGL, mse per tensor": lambda: Eagl().layer_gains(path, graph, choices),
        },
    )
    return f"{size / 1e9:.2f} GB of bf16 safetensors, {len(graph.layers)} tensors, mapped, warm", taken, size


_FIRST_ANSWER = """
import sys, time
begin = time.perf_counter()
from bitplan.core.precision import parse_choices
from bitplan.gains.eagl import Eagl
from bitplan.graph.names import read_graph
graph = read_graph(sys.argv[1])
loaded = time.perf_counter()
Eagl().layer_gains(sys.argv[1], graph, parse_choices("w2a2,w4a4"))
print(loaded - begin, time.perf_counter() - loaded)
"""


def bench_first_answer(folder: Path) -> None:
    print("\nFirst answer of a new process on a small file, mse per tensor (import + estimate)")
    for dtype, width in (("F32", 4), ("BF16", 2)):
        path = folder / f"{dtype}.safetensors"
        entry = {"dtype": dtype, "shape": [64, 64], "data_offsets": [0, 4096 * width]}
        text = json.dumps({"a.weight": entry}).encode()
        bell = np.random.default_rng(0).standard_normal(4096, np.float32)
        data = bell if width == 4 else bell.view(np.uint16)[1::2]
        path.write_bytes(len(text).to_bytes(8, "little") + text + data.tobytes())
        cache = folder / f"cache-{dtype}"
        for state in ("no cache", "cached"):
            command = [sys.executable, "-c", _FIRST_ANSWER, str(path)]
            environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            loaded, estimated = map(float, done.stdout.split())
            print(f"  {dtype:5} {state:9} {loaded:5.2f} s + {estimated:5.2f} s = {loaded + estimated:5.2f} s")


def _table(title: str, taken: Taken, size: int) -> None:
    least, median = next(iter(taken.values()))
    print(f"\n{title}\n  {'':26} {'fastest':>12} {'':>12} {'median':>12}")
    for name, (low, middle) in taken.items():
        print(
            f"  {name:26} {1e3 * low:9.2f} ms {low / least:9.2f} × {1e3 * middle:9.2f} ms "
            f"{middle / median:9.2f} × {size / low / 1e9:8.1f} GB/s"
        )


def main() -> None:
    _table(*bench_resnet50())
    with tempfile.TemporaryDirectory() as folder:
        bench_first_answer(Path(folder))
        _table(*bench_quantized(Path(folder)))
        _table(*bench_file(Path(folder)))


if __name__ == "__main__":
    main()
