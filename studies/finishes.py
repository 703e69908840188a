"""What does the finish of weights that nobody trains give on images? The public CIFAR-10 ResNet-20 and MobileNetV2.

python studies/finishes.py DATA [--json finishes.json] [--only NETWORK PRECISION …]

All layers but the first and last, which have 8 bits, at w4a4 and w4a8 (ResNet-20, one step for a weight) and at w4a8
(MobileNetV2, a step for each output channel), finished by rounding, compensated rounding and tuning. ResNet-20 sees 512
training images, and is scored on the first 2,000 of the test file; MobileNetV2 sees 256 images of the calibration file,
and is scored on 1,000 of the validation file, one of each class. What the JSON file has already is not done again. DATA
is the folder of `studies/README.md`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import bitplan
from bitplan.adapters.torch import inference
from bitplan.plugins.data.cifar10 import Cifar10
from bitplan.plugins.data.imagenet import ImageNet
from bitplan.store.files import write_text

FINISHES = ("round", "compensate", "tune")
RULES = bitplan.Rules(narrow=0)


@dataclass(frozen=True)
class Case:
    """A network, its precisions and options, and how many images it sees and is scored on."""

    model: str
    weights: str
    precisions: tuple[str, ...]
    per_channel: bool
    seen: int
    at_once: int
    scored: int

    def task(self, data: Path) -> Cifar10 | ImageNet:
        """Where its images are."""
        return Cifar10(data / "cifar10") if self.model == "resnet20" else ImageNet(data / "imagenet", workers=1)


CASES = (
    Case("resnet20", "resnet20-12fca82f.th", ("w4a4", "w4a8"), False, 512, 64, 2000),
    Case("mobilenet_v2", "mobilenet_v2-b0353104.pth", ("w4a8",), True, 256, 16, 1000),
)


def main() -> None:
    """Do what is missing, and print all of it."""
    options = arguments()
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    for case in CASES:
        wanted = {f"{case.model} {precision} {finish}": (precision, finish) for precision, finish in every(case)}
        lacking = {name: one for name, one in wanted.items() if name not in results}
        if options.only:
            lacking = {name: one for name, one in lacking.items() if name.rpartition(" ")[0] in " ".join(options.only)}
        if not lacking:
            continue
        model, example = bitplan.load_model(case.model)
        model = bitplan.load_checkpoint(options.data / "weights" / case.weights, model)
        graph = bitplan.trace(model, example, rules=RULES, name=case.model)
        if f"{case.model} float" not in results:
            results[f"{case.model} float"] = {"top1": top1(model, images(case, options.data, "test"))}
        batches = [batch for batch, _ in images(case, options.data, "train")]
        for name, (precision, finish) in lacking.items():
            begun = time.process_time()
            plan = bitplan.Plan.uniform(graph, precision)
            made = bitplan.quantize(model, plan, finish=finish, batches=batches, per_channel=case.per_channel)
            took = time.process_time() - begun
            results[name] = {"top1": top1(made, images(case, options.data, "test")), "cpu_seconds": round(took)}
            write_text(options.json, json.dumps(results, indent=1))
            print(f"{name}: {results[name]}", flush=True)
    for name, found in results.items():
        print(f"{name:45} {found['top1']:.2f}")


def every(case: Case) -> Iterator[tuple[str, str]]:
    """Each precision with each finish."""
    return itertools.product(case.precisions, FINISHES)


def images(case: Case, data: Path, split: str) -> Iterator[tuple[Tensor, Tensor]]:
    """As many as a case asks for, in batches, in the order of the files."""
    left = case.seen if split == "train" else case.scored
    for batch, labels in case.task(data).batches(split, case.at_once):
        yield batch[:left], labels[:left]
        left -= len(batch)
        if left <= 0:
            return


def top1(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> float:
    """In percent."""
    right = total = 0
    with inference(model), torch.no_grad():
        for batch, labels in batches:
            right += int((model(batch).argmax(1) == labels).sum())
            total += len(labels)
    return 100 * right / total


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--json", type=Path, default=Path("finishes.json"))
    parser.add_argument("--only", nargs="*", metavar="CASE", help="such as 'resnet20 w4a4'")
    return parser.parse_args()


if __name__ == "__main__":
    main()
