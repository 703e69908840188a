"""Forward passes of w4a4 networks computed in integers, against PyTorch's float in its best form; and `evaluate`.

    python -m benchmarks.integer [--rounds 15] [--threads 1]

Float is timed plain, with batch normalizations folded, the same in channels_last, and frozen by TorchScript, which
packs weights for oneDNN; ratios are to the fastest of these. All take turns in one process; weights are random.
"""

from __future__ import annotations

import argparse
import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

import bitplan
from benchmarks.exported import planned
from benchmarks.matmulnbits import TOKENS, WIDTH, Stack
from benchmarks.rows import Row
from benchmarks.timing import in_turn
from bitplan.adapters import torchvision
from bitplan.models.zoo import load_model
from bitplan.plugins.integer import integer
from bitplan.tasks.digits import Digits

Runs = dict[str, Callable[[], Any]]


def main() -> None:
    """Print one table per network and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    arguments, _ = parser.parse_known_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # TorchScript is deprecated
    with torch.inference_mode():
        for name, batches in (("resnet18", (1, 8)), ("mobilenet_v2", (1, 8))):
            network = torchvision.build(name, num_classes=1000)
            for batch in batches:
                compare(f"{name}, {batch} × 3×224×224", network, torch.randn(batch, 3, 224, 224), arguments.rounds)
        compare("resnet20, 128 × 3×32×32", load_model("resnet20")[0], torch.randn(128, 3, 32, 32), arguments.rounds)
        for tokens in (1, TOKENS):
            title = f"feed-forward pairs of BERT-base, {tokens} tokens"
            compare(title, Stack(), torch.randn(1, tokens, WIDTH), arguments.rounds)
    scored(arguments.rounds)


def rows(rounds: int = 15) -> list[Row]:
    """Networks computed in integers against the best of PyTorch's float forms, one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    made = []
    with torch.inference_mode():
        for name, batch, side in (("resnet18", 1, 224), ("mobilenet_v2", 1, 224), ("resnet20", 128, 32)):
            own = torchvision.build(name, num_classes=1000) if side > 32 else load_model(name)[0]
            runs, _, _ = contest(own, torch.randn(batch, 3, side, side))
            seconds = in_turn(runs, rounds)
            best = min(took for form, took in seconds.items() if form.startswith("float"))
            taken = 1e3 * seconds["integer"], 1e3 * best
            made.append(Row(f"{name}, {batch} × {side}×{side}", *taken, "best float", "ms", 1.0))
    return made


def contest(network: nn.Module, x: Tensor) -> tuple[Runs, nn.Module, nn.Module]:
    """Every float form, the quantized network and its integer copy on one batch; then these two."""
    network = network.eval()
    with torch.inference_mode(False):
        model = planned(network, x, "w4a4").eval()
        made = integer(model)
    runs = floats(network, x) | {"quantized": lambda: model(x), "integer": lambda: made(x)}
    for run in runs.values():
        run()
    return runs, model, made


def compare(title: str, network: nn.Module, x: Tensor, rounds: int) -> None:
    """One table, and how many answers are those of the quantized network."""
    runs, model, made = contest(network, x)
    show(title, runs, rounds)
    same = (made(x).argmax(1) == model(x).argmax(1)).float().mean()
    print(f"answers as of the quantized network: {same:.3f}")


def floats(network: nn.Module, x: Tensor) -> Runs:
    """The float network in the forms that PyTorch offers."""
    folded = fuse(network)
    last = copy.deepcopy(folded)
    last_x = x
    if x.dim() == 4:
        last, last_x = last.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        frozen = torch.jit.optimize_for_inference(torch.jit.freeze(torch.jit.trace(folded, x)))
    return {
        "float": lambda: network(x),
        "float, folded": lambda: folded(x),
        "float, folded, channels_last": lambda: last(last_x),
        "float, frozen": lambda: frozen(x),
    }


def scored(rounds: int) -> None:
    """The time that `evaluate` takes for the digits, in float and at w4a4."""
    task = Digits()
    network, example = load_model("digits_resnet")
    model = planned(network.eval(), torch.randn(64, *example.shape[1:]), "w4a4").eval()
    made = integer(model)
    models = {"float": network, "quantized": model, "integer, folded": made}
    show(
        "evaluate digits_resnet", {name: (lambda m=m: bitplan.evaluate(m, task)) for name, m in models.items()}, rounds
    )


def show(title: str, runs: Runs, rounds: int) -> None:
    for run in runs.values():
        run()
        run()
    seconds = in_turn(runs, rounds)
    best = min(took for name, took in seconds.items() if name.startswith("float"))
    print(f"\n{title}, {torch.get_num_threads()} thread(s)")
    print(f"{'':30} {'ms':>9} {'× faster than the best float':>30}")
    for name, took in seconds.items():
        print(f"{name:30} {1000 * took:9.2f} {best / took:30.2f}")


if __name__ == "__main__":
    main()
