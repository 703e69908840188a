"""What does a network pay in accuracy for being made for integer kernels? The public CIFAR-10 ResNet-20.

python studies/cifar_integer.py DATA [--epochs 6] [--seeds 5] [--steps N] [--threads 2] [--json results.json]

With and without `integer=True`, by one recipe and the same seeds: all layers at w4a4, trained from the float network
with its answers as targets; then, from each, a mix of w4a4 and w2a2 at 70 % of the bit-MACs, trained half as long.
What the JSON file has already is not computed again. DATA is the folder of `studies/README.md`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path

import torch
from torch import nn

import bitplan
from bitplan.plugins.data.cifar10 import Cifar10

RULES = bitplan.Rules(narrow=0)  # a ResNet-20 has no layer with 128 input features
KINDS = {"plain": False, "integer": True}


def main() -> None:
    """Train what is missing and print the table."""
    options = arguments()
    torch.set_num_threads(options.threads)
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    task = Cifar10(data=str(options.data / "cifar10"))
    floating, example = bitplan.load_model("resnet20")
    floating = bitplan.load_checkpoint(options.data / "weights" / "resnet20-12fca82f.th", floating)
    graph = bitplan.trace(floating, example, rules=RULES, name="resnet20")
    plans = {"w4a4": bitplan.Plan.uniform(graph, "w4a4"), "4/2 at 70%": mixed(floating, graph)}
    for seed, kind in itertools.product(range(options.seeds), KINDS):
        missing = [name for name in plans if f"{name}, {kind}, seed {seed}" not in results]
        if not missing:
            continue
        model = floating
        for place, (name, plan) in enumerate(plans.items()):
            model = trained(model, plan, task, floating, recipe_of(options, place), seed=seed, integer=KINDS[kind])
            score = bitplan.evaluate(model, task)
            results[f"{name}, {kind}, seed {seed}"] = score
            print(f"{name}, {kind}, seed {seed}: {score:.2f}", flush=True)
            options.json.write_text(json.dumps(results, indent=1))
    for name in plans:
        show(name, results, options.seeds)


def mixed(model: nn.Module, graph: bitplan.Graph) -> bitplan.Plan:
    """A plan at 70 % that depends on nothing that was trained, so that all networks follow it."""
    return bitplan.select(graph, bitplan.estimate("uniform", model, graph), bitplan.price("bmac", graph), budget="70%")


def recipe_of(options: argparse.Namespace, place: int) -> bitplan.Recipe:
    """One recipe; the second network of a seed is trained half as long."""
    length = {"steps": options.steps} if options.steps else {"epochs": options.epochs / (1 + place)}
    return bitplan.Recipe(**length, lr=0.01, distill=1.0, temperature=4.0)


def trained(
    start: nn.Module,
    plan: bitplan.Plan,
    task: Cifar10,
    teacher: nn.Module,
    recipe: bitplan.Recipe,
    *,
    seed: int,
    integer: bool,
) -> nn.Module:
    """A network of the plan, calibrated where it is new, after its training."""
    model = bitplan.quantize(start, plan, integer=integer)
    if start is teacher:
        batches = itertools.islice(task.batches("train", 128, seed=seed), 4)
        bitplan.calibrate_(model, batches, forward=task.forward)
    bitplan.finetune_(model, task, recipe, teacher=teacher, seed=seed)
    return model


def show(name: str, results: dict[str, float], seeds: int) -> None:
    """Mean and standard deviation of both kinds, and of their difference seed by seed, with its standard error."""
    both = {kind: [results[f"{name}, {kind}, seed {seed}"] for seed in range(seeds)] for kind in KINDS}
    both["difference"] = [one - other for one, other in zip(both["integer"], both["plain"], strict=True)]
    for kind, scores in both.items():
        spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        if spread and kind == "difference":
            spread += f", standard error {statistics.stdev(scores) / len(scores) ** 0.5:.2f}"
        print(f"{name:12} {kind:10} {statistics.mean(scores):6.2f}{spread}")


def arguments() -> argparse.Namespace:
    """What to run, and where the data lies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=None, help="instead of epochs, to try it out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("cifar_integer.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
