"""Weight-only files for ONNX Runtime (`matmulnbits`): size and speed beside float and its own 8-bit quantization."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import bitplan
from benchmarks.export import as_float, planned, quantized_by_runtime
from benchmarks.rows import Row
from benchmarks.timing import in_turn
from bitplan.adapters.onnxruntime import Session

WIDTH, INNER, LAYERS, TOKENS = 768, 3072, 4, 128  # a third of BERT-base's linear layers


class Stack(nn.Module):
    """BERT-base's feed-forward pairs, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) for _ in range(LAYERS)]
        self.layers = nn.Sequential(*(part for pair in pairs for part in pair))

    def forward(self, x: Tensor) -> Tensor:
        """(B, tokens, width) → the same."""
        out: Tensor = self.layers(x)
        return out


def rows() -> list[Row]:
    """Return the time of 4-bit files with one token and with many, then their size."""
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    made, sizes = [], {}
    for tokens in (1, TOKENS):
        example, network = torch.randn(1, tokens, WIDTH), Stack()
        with tempfile.TemporaryDirectory() as folder:
            files = {"float": as_float(network, example, Path(folder) / "float.onnx")}
            int8 = quantized_by_runtime(files["float"], Path(folder) / "int8.onnx", example, static=False)
            files |= {"onnxruntime's int8": int8, "ours": Path(folder) / "ours.onnx"}
            model = planned(network, example, "w4a16")
            bitplan.export(model, files["ours"], "matmulnbits", example=example, accuracy_level=4)
            seconds = timed(files, example)
            sizes = {name: path.stat().st_size / 1e6 for name, path in files.items()}
        for peer in ("float", "onnxruntime's int8"):
            taken = 1e3 * seconds["ours"], 1e3 * seconds[peer]
            made.append(Row(f"4 bits, {tokens} token{'s' * (tokens > 1)}", *taken, peer, "ms", 1.0))
    return [*made, Row("4 bits, the file", sizes["ours"], sizes["onnxruntime's int8"], "onnxruntime's int8", "MB", 1.0)]


def timed(files: dict[str, Path], example: Tensor) -> dict[str, float]:
    """Seconds of each, in turn."""
    sessions = {name: Session(path, threads=1) for name, path in files.items()}
    array = example.numpy()
    runs = {name: (lambda session=session: session.run([array])) for name, session in sessions.items()}
    return in_turn(runs, rounds=15)
