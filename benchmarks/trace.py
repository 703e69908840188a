"""Tracing by shapes against what it replaces: one forward pass on real data, and torch.export of the same model.

python -m benchmarks.trace
"""

from __future__ import annotations

import warnings

import torch

import bitplan
from benchmarks.timing import in_turn
from bitplan.models.zoo import load_model


def main() -> None:
    """Print seconds and ratios for three networks."""
    warnings.simplefilter("ignore")
    print(f"{'model':14} {'trace':>8} {'forward':>8} {'export':>8}  trace ÷ forward, trace ÷ export")
    for name in ("resnet50", "vit_b_16", "densenet121"):
        model, example = load_model(name)
        model.eval()
        data = torch.zeros(example.shape)
        with torch.no_grad():
            seconds = in_turn(
                {
                    "trace": lambda model=model, example=example: bitplan.trace(model, example),
                    "forward": lambda model=model, data=data: model(data),
                    "export": lambda model=model, data=data: torch.export.export(model, (data,)),
                },
                rounds=3,
            )
        trace, forward, export = seconds.values()
        print(f"{name:14} {trace:8.3f} {forward:8.3f} {export:8.3f}  {trace / forward:.2f}, {trace / export:.2f}")


if __name__ == "__main__":
    main()
