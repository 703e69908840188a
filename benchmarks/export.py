"""Exporting: time, and size and speed in ONNX Runtime against float and against onnxruntime's own 8-bit quantization.

python -m benchmarks.export
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bitplan
from benchmarks.timing import in_turn
from bitplan.adapters.onnxruntime import Session
from bitplan.adapters.onnxscript import graph_of
from bitplan.models.zoo import load_model

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


def main() -> None:
    """Print one table per kind of file."""
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    network, _ = load_model("resnet20")
    image = torch.randn(1, 3, 32, 32)
    print("\nResNet-20 (CIFAR), one image")
    compare(network, image, {"w4a4 + w2a2": ("onnx", "w2a2,w4a4", {}), "w8a8": ("onnx", "w8a8,w8a8", {})}, static=True)
    for tokens in (1, TOKENS):
        print(f"\n{LAYERS} feed-forward pairs of BERT-base's size, {tokens} tokens")
        targets: dict[str, Any] = {"matmulnbits 4": ("matmulnbits", "w4a16", {})}
        for bits in (2, 4, 8):  # at level 0 the runtime has a fast routine for 4 bits only
            targets[f"matmulnbits {bits}, level 4"] = ("matmulnbits", f"w{bits}a16", {"accuracy_level": 4})
        compare(Stack(), torch.randn(1, tokens, WIDTH), targets, static=False)


def compare(network: nn.Module, example: Tensor, targets: dict[str, Any], *, static: bool) -> None:
    """Seconds to export and to run, and bytes, of each target, in one run; ratios to float."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files = {"float": as_float(network, example, root / "float.onnx")}
        files["onnxruntime's int8"] = quantized_by_runtime(root, example, static=static)
        exporting = {}
        for name, (to, precisions, options) in targets.items():
            model = planned(network, example, precisions)
            files[name] = root / f"{len(files)}.onnx"
            write = lambda model=model, to=to, path=files[name], options=options: bitplan.export(  # noqa: E731
                model, path, to, example=example, force=True, **options
            )
            exporting |= {name: in_turn({name: write}, rounds=1)[name]}
        sessions = {name: Session(path, threads=1) for name, path in files.items()}
        array = example.numpy()
        runs = {name: (lambda session=session: session.run([array])) for name, session in sessions.items()}
        seconds = in_turn(runs, rounds=15)
        print(f"{'file':24} {'export s':>9} {'KB':>9} {'× smaller':>10} {'ms':>9} {'× faster':>9}")
        size = files["float"].stat().st_size
        for name, path in files.items():
            took = f"{exporting[name]:9.1f}" if name in exporting else f"{'':9}"
            smaller, faster = size / path.stat().st_size, seconds["float"] / seconds[name]
            kilobytes = path.stat().st_size / 1000
            print(f"{name:24} {took} {kilobytes:9.0f} {smaller:10.2f} {1000 * seconds[name]:9.2f} {faster:9.2f}")


def planned(network: nn.Module, example: Tensor, precisions: str) -> nn.Module:
    """The network quantized: at one precision, or every second group at the lower of two."""
    rules = bitplan.Rules(first=None, last=None, narrow=0)
    graph = bitplan.trace(network, example, rules=rules, name="network")
    low, high = (*precisions.split(","), precisions)[:2]
    plan = bitplan.Plan.uniform(graph, high)
    lowered = {layer.name: bitplan.Precision.parse(low) for group in graph.groups[::2] for layer in group.layers}
    model = bitplan.quantize(network, plan.model_copy(update={"precisions": plan.precisions | lowered})).eval()
    bitplan.calibrate_(model, [torch.cat([example] * 2)])
    return model


def as_float(network: nn.Module, example: Tensor, path: Path) -> Path:
    """The float network as torch writes it."""
    batch = torch.cat([example] * 2)
    free = ({0: torch.export.Dim("batch")},)
    path.write_bytes(graph_of(network.eval(), (batch,), {}, free, opset=21).SerializeToString())
    return path


def quantized_by_runtime(root: Path, example: Tensor, *, static: bool) -> Path:
    """The float file after onnxruntime's own quantization: static for convolutions, dynamic for linear layers."""
    from onnxruntime import quantization

    source, target = root / "float.onnx", root / "int8.onnx"
    name = Session(source).inputs[0]

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left: list[dict[str, np.ndarray]] = [{name: example.numpy()}]

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self.left.pop() if self.left else None

    if static:
        quantization.quantize_static(source, target, Reader())
    else:
        quantization.quantize_dynamic(source, target)
    return target


if __name__ == "__main__":
    main()
