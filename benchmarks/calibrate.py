"""Calibration against a forward pass of the same quantized network in inference, and of the float one, in turn.

OMP_NUM_THREADS=1 python -m benchmarks.calibrate
"""

from __future__ import annotations

import time
import warnings

import torch

import bitplan
from benchmarks.rows import Row, table
from benchmarks.timing import in_turn
from bitplan.adapters import torchvision

BATCHES = 4


def rows(rounds: int = 5) -> list[Row]:
    """LSQ's first steps, which look at means, and FAQ's, which look at percentiles: ResNet-18, batches of 64."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = [torch.randn(64, 3, 32, 32) for _ in range(BATCHES)]
    model = torchvision.build("resnet18", num_classes=10).eval()
    plan = bitplan.Plan.uniform(bitplan.trace(model, images[0][:1]), "w4a4")
    found = []
    for method in ("lsq", "faq"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantized = bitplan.quantize(model, plan, method=method).eval()
        bitplan.calibrate_(quantized, images)
        seconds = in_turn(
            {
                "calibrate_": lambda quantized=quantized: bitplan.calibrate_(quantized, images),
                "forward": lambda quantized=quantized: forward(quantized, images),
                "float": lambda: forward(model, images),
            },
            rounds=rounds,
            clock=time.process_time,
        )
        name = f"calibrating ResNet-18, {method}"
        found.append(Row(name, seconds["calibrate_"], seconds["forward"], "its forward passes", target=1.2))
        found.append(Row(name, seconds["calibrate_"], seconds["float"], "forward passes in floats"))
    return found


@torch.no_grad()
def forward(model: torch.nn.Module, images: list[torch.Tensor]) -> None:
    """Every batch once."""
    for batch in images:
        model(batch)


def main() -> None:
    """Print the table."""
    print(table(rows()))


if __name__ == "__main__":
    main()
