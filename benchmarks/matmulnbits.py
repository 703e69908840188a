"""Weight-only files for ONNX Runtime (`matmulnbits`): size and speed beside float and its own 8-bit quantization.

python -m benchmarks.matmulnbits
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bitplan
from benchmarks.exported import as_float, planned, quantized_by_runtime
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
    """4-bit files against float and against onnxruntime's own 8 bits, with one token and with many; then their size."""
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    made, sizes = [], {"ours": 0.0, "onnxruntime's int8": 0.0}
    for tokens in (1, TOKENS):
        example, network = torch.randn(1, tokens, WIDTH), Stack()
        with tempfile.TemporaryDirectory() as folder:
            files = contestants(network, example, Path(folder)) | {"ours": Path(folder) / "ours.onnx"}
            model = planned(network, example, "w4a16")
            bitplan.export(model, files["ours"], "matmulnbits", example=example, accuracy_level=4)
            seconds = timed(files, example)
            sizes = {name: path.stat().st_size / 1e6 for name, path in files.items()}
        for peer in ("float", "onnxruntime's int8"):
            taken = 1e3 * seconds["ours"], 1e3 * seconds[peer]
            made.append(Row(f"4 bits, {tokens} token{'s' * (tokens > 1)}", *taken, peer, "ms", 1.0))
    return [*made, Row("4 bits, the file", sizes["ours"], sizes["onnxruntime's int8"], "onnxruntime's int8", "MB", 1.0)]


def contestants(network: nn.Module, example: Tensor, root: Path) -> dict[str, Path]:
    """The files of others."""
    files = {"float": as_float(network, example, root / "float.onnx")}
    files["onnxruntime's int8"] = quantized_by_runtime(files["float"], root / "int8.onnx", example, static=False)
    return files


def timed(files: dict[str, Path], example: Tensor) -> dict[str, float]:
    """Seconds of each, in turn."""
    sessions = {name: Session(path, threads=1) for name, path in files.items()}
    array = example.numpy()
    runs = {name: (lambda session=session: session.run([array])) for name, session in sessions.items()}
    return in_turn(runs, rounds=15)


def main() -> None:
    """Print one table per kind of file."""
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    for tokens in (1, TOKENS):
        print(f"\n{LAYERS} feed-forward pairs of BERT-base's size, {tokens} tokens")
        targets: dict[str, Any] = {"matmulnbits 4": ("matmulnbits", "w4a16", {})}
        for bits in (2, 4, 8):  # at level 0 the runtime has a fast routine for 4 bits only
            targets[f"matmulnbits {bits}, level 4"] = ("matmulnbits", f"w{bits}a16", {"accuracy_level": 4})
        compare(Stack(), torch.randn(1, tokens, WIDTH), targets)


def compare(network: nn.Module, example: Tensor, targets: dict[str, Any]) -> None:
    """Seconds to export and to run, and bytes, of each target, in one run; ratios to float."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files = contestants(network, example, root)
        exporting = {}
        for name, (to, precisions, options) in targets.items():
            model = planned(network, example, precisions)
            files[name] = root / f"{len(files)}.onnx"
            write = lambda model=model, to=to, path=files[name], options=options: bitplan.export(  # noqa: E731
                model, path, to, example=example, force=True, **options
            )
            exporting |= {name: in_turn({name: write}, rounds=1)[name]}
        seconds = timed(files, example)
        print(f"{'file':24} {'export s':>9} {'KB':>9} {'× smaller':>10} {'ms':>9} {'× faster':>9}")
        size = files["float"].stat().st_size
        for name, path in files.items():
            took = f"{exporting[name]:9.1f}" if name in exporting else f"{'':9}"
            smaller, faster = size / path.stat().st_size, seconds["float"] / seconds[name]
            kilobytes = path.stat().st_size / 1000
            print(f"{name:24} {took} {kilobytes:9.0f} {smaller:10.2f} {1000 * seconds[name]:9.2f} {faster:9.2f}")


if __name__ == "__main__":
    main()
