"""Writing ONNX of a deep network: what capturing takes beside torch's own export of the float network.

python -m benchmarks.capture
"""

from __future__ import annotations

import io
import logging
import tempfile
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import torch

import bitplan
from benchmarks.exported import ALL_LAYERS, planned
from benchmarks.rows import Row, table
from benchmarks.timing import in_turn
from bitplan.exporters.capture import capture
from bitplan.models.zoo import load_model

MOST = {"resnet20": None, "resnet44": 4.0}  # CPU seconds: half of what it took before


def rows() -> list[Row]:
    """CPU time of the whole export, of the capture in it, and of `torch.onnx.export` of the float network."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    made = []
    for name in MOST:
        network, example = load_model(name)
        data = torch.randn(2, *example.shape[1:])
        model = planned(network.eval(), data, "w4a4", rules=ALL_LAYERS).eval()
        with tempfile.TemporaryDirectory() as folder:
            ways = {
                "export": lambda model=model, data=data, path=Path(folder) / "a.onnx": bitplan.export(
                    model, path, "onnx", example=data, force=True
                ),
                "capture": lambda model=model, data=data: capture(model, data, opset=21),
                "float": lambda network=network, data=data: _float(network, data),
            }
            ways["float"]()  # torch sets things up at its first
            seconds = in_turn(ways, rounds=2, clock=time.process_time)
        peer = "torch.onnx.export of the float network"
        made.append(Row(f"{name}: capture", seconds["capture"], seconds["float"], peer, target=1.0))
        made.append(Row(f"{name}: the whole export", seconds["export"], seconds["float"], peer))
        made.append(Row(f"{name}: the whole export", seconds["export"], unit="CPU s", target=MOST[name]))
    return made


def _float(network: torch.nn.Module, data: torch.Tensor) -> None:
    with redirect_stdout(io.StringIO()):
        torch.onnx.export(network, (data,), dynamo=True, verbose=False)


def main() -> None:
    """Print the table."""
    print(table(rows()))


if __name__ == "__main__":
    main()
