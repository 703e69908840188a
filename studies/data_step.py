"""What does it cost in accuracy to learn the step of the images from every eighth of them, or not at all?

python studies/data_step.py digits [--steps 100] [--seeds 10] [--json digits.json]
python studies/data_step.py DATA [--steps 60] [--seeds 3] [--json cifar.json]

One recipe and the same seeds for all: the digits of the demo by its ResNet, or the public CIFAR-10 ResNet-20 (DATA is
the folder of `studies/README.md`), all layers at w4a4, first and last at w8a8. What the JSON file has already is not
computed again.
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
from bitplan.quant import layer_types
from bitplan.tasks.base import Task

EVERY = {"all samples": 1, "every eighth": 8, "fixed": 0}


def main() -> None:
    """Train what is missing and print the table."""
    options = arguments()
    torch.set_num_threads(1)
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    task, floating, first = on_digits() if options.data == "digits" else on_cifar(Path(options.data))
    graph = bitplan.trace(floating, task.example(), rules=bitplan.Rules(narrow=0))
    plan = bitplan.Plan.uniform(graph, "w4a4")
    recipe = bitplan.Recipe(steps=options.steps, batch_size=64, lr=0.01)
    for seed, (name, every) in itertools.product(range(options.seeds), EVERY.items()):
        key = f"{name}, seed {seed}"
        if key not in results:
            model = bitplan.quantize(floating, plan)
            bitplan.calibrate_(model, itertools.islice(task.batches("train", 64, seed=seed), 4), forward=task.forward)
            quantizer = model.get_submodule(first).input_quantizer
            before = quantizer.step.item()
            quantizer.step.requires_grad_(every > 0)
            layer_types.EVERY = every or 1
            bitplan.finetune_(model, task, recipe, seed=seed)
            results[key] = [bitplan.evaluate(model, task), quantizer.step.item() / before]
            print(f"{key}: {results[key][0]:.2f}, step × {results[key][1]:.4f}", flush=True)
            options.json.write_text(json.dumps(results, indent=1))
    show(results, options.seeds)


def on_digits() -> tuple[Task, nn.Module, str]:
    """The demo's float network, and the name of its first convolution."""
    task = bitplan.load_task("digits")
    model, _ = bitplan.load_model("digits_resnet")
    bitplan.finetune_(model, task, bitplan.Recipe(steps=200, lr=0.05), seed=0)
    return task, model, first_of(model)


def on_cifar(data: Path) -> tuple[Task, nn.Module, str]:
    """The public ResNet-20."""
    model, _ = bitplan.load_model("resnet20")
    model = bitplan.load_checkpoint(data / "weights" / "resnet20-12fca82f.th", model)
    return Cifar10(data=str(data / "cifar10")), model, first_of(model)


def first_of(model: nn.Module) -> str:
    """The convolution that reads the images."""
    return next(name for name, module in model.named_modules() if isinstance(module, nn.Conv2d))


def show(results: dict[str, list[float]], seeds: int) -> None:
    """Means, spreads and differences from learning by all samples."""
    scores = {name: [results[f"{name}, seed {seed}"][0] for seed in range(seeds)] for name in EVERY}
    for name, found in scores.items():
        apart = [one - other for one, other in zip(found, scores["all samples"], strict=True)]
        error = statistics.stdev(apart) / seeds**0.5
        steps = [results[f"{name}, seed {seed}"][1] for seed in range(seeds)]
        print(
            f"{name:13} {statistics.mean(found):.2f} ± {statistics.stdev(found):.2f}, difference "
            f"{statistics.mean(apart):+.3f} ± {error:.3f}, step × {statistics.mean(steps):.4f}"
        )


def arguments() -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("data_step.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
