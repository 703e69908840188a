"""The public CIFAR-10 ResNet-20, quantized: how much is lost at 8, 4 and mixed bits?

python studies/cifar_resnet20.py DATA [--epochs 6] [--seeds 3] [--mixed eagl uniform …] [--json results.json]

Calibration is chosen on training images that nothing else here uses; test images only give the final scores.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RULES = bitplan.Rules(narrow=0)  # a ResNet-20 has no layer with 128 input features
HELD_OUT = 2_000
TEMPERATURE = 4.0


def main() -> None:
    """Run the study and print its table."""
    options = arguments()
    torch.set_num_threads(options.threads)
    train, held_out = split(images(options.data / "cifar10", "train"))
    test = images(options.data / "cifar10", "test")
    results: dict[str, Any] = {"epochs": options.epochs, "seeds": options.seeds, "test images": len(test[1])}
    model, example = bitplan.load_model("resnet20")
    model = bitplan.load_checkpoint(options.data / "weights" / "resnet20-12fca82f.th", model)
    graph = bitplan.trace(model, example, rules=RULES, name="resnet20")
    results["float"] = show("float", accuracy(model, test))

    eight = bitplan.Plan.uniform(graph, "w8a8")
    settings = [{"method": "lsq"}, *({"method": "faq", "percentile": p} for p in (99.9, 99.99, 99.999, 100.0))]
    calibrated = [calibrate(bitplan.quantize(model, eight, **setting), train[0][:1024]) for setting in settings]
    chosen = max(range(len(settings)), key=lambda index: accuracy(calibrated[index], held_out))
    results["w8a8 calibrated"] = [
        {**setting, "held out": accuracy(one, held_out), "test": accuracy(one, test), "chosen": index == chosen}
        for index, (setting, one) in enumerate(zip(settings, calibrated, strict=True))
    ]
    for row in results["w8a8 calibrated"]:
        show(f"w8a8 calibrated {row}", row["test"])

    starts = []
    for seed in range(options.seeds):
        four = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
        calibrate(four, train[0][:1024])
        results.setdefault("w4a4 calibrated", show("w4a4 calibrated", accuracy(four, test)))
        tune_(four, model, train, options.epochs, seed)
        starts.append(four)
        results.setdefault("w4a4 tuned", []).append(show(f"w4a4 tuned, seed {seed}", accuracy(four, test)))
        write(options.json, results)
    results["entropies"] = bitplan.estimate("eagl", starts[0], graph).rows
    costs = bitplan.price("bmac", graph)
    for method in options.mixed:
        plan = bitplan.select(graph, bitplan.estimate(method, starts[0], graph), costs, budget="70%")
        for seed in range(options.seeds):
            mixed = bitplan.quantize(starts[0], plan)
            tune_(mixed, model, train, options.epochs, seed)
            score = show(f"70% {method}, seed {seed}", accuracy(mixed, test))
            results.setdefault(f"70% {method}", []).append(score)
            write(options.json, results)
    write(options.json, results)
    for name, scores in results.items():
        if isinstance(scores, list) and all(isinstance(score, float) for score in scores) and len(scores) > 1:
            print(f"{name:24} {statistics.mean(scores):6.2f} ± {statistics.stdev(scores):.2f}")


def arguments() -> argparse.Namespace:
    """What to run, and where the data lies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mixed", nargs="*", default=[], help="methods to compare at a 70 %% budget")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def images(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """All images of a part, normalized, (N, 3, 32, 32), and their labels; decoded once."""
    files = sorted(folder.glob(f"cifar10-{part}-*.parquet"))
    if not files:
        raise SystemExit(
            f"{folder} has no cifar10-{part}-*.parquet: put the images of https://www.cs.toronto.edu/~kriz/cifar.html "
            "there as parquet, with columns webp (the bytes of an image file) and label"
        )
    tables = [pyarrow.parquet.read_table(file) for file in files]
    pixels = [np.asarray(Image.open(io.BytesIO(data))) for table in tables for data in table["webp"].to_pylist()]
    labels = [label for table in tables for label in table["label"].to_pylist()]
    batch = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
    return (batch - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1), torch.tensor(labels)


def split(data: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The training images, and the last of them, which choose the calibration and train nothing."""
    return (data[0][:-HELD_OUT], data[1][:-HELD_OUT]), (data[0][-HELD_OUT:], data[1][-HELD_OUT:])


def calibrate(model: nn.Module, batch: Tensor) -> nn.Module:
    """Set the input steps from some training images."""
    bitplan.calibrate_(model, batch.split(256))
    return model


def tune_(model: nn.Module, teacher: nn.Module, data: tuple[Tensor, Tensor], epochs: int, seed: int) -> None:
    """A plain loop: SGD at 0.01 with a cosine, shifted and mirrored images, the float network as teacher."""
    generator = torch.Generator().manual_seed(seed)
    groups = bitplan.parameter_groups(model, lr=0.01, weight_decay=1e-4)
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True)
    total = epochs * (len(data[1]) // 128)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5 * (1 + math.cos(math.pi * n / total)))
    model.to(memory_format=torch.channels_last).train()
    for _ in range(epochs):
        for batch, _ in shuffled(data, generator):
            images = batch.contiguous(memory_format=torch.channels_last)
            with torch.no_grad():
                target = F.log_softmax(teacher(images) / TEMPERATURE, dim=1)
            optimizer.zero_grad(set_to_none=True)
            found = F.log_softmax(model(images) / TEMPERATURE, dim=1)
            loss = TEMPERATURE**2 * F.kl_div(found, target, log_target=True, reduction="batchmean")
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


def shuffled(data: tuple[Tensor, Tensor], generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of 128 in random order, each shifted by up to 4 pixels and mirrored as a whole."""
    order = torch.randperm(len(data[1]), generator=generator)
    for rows in order.split(128)[: len(order) // 128]:
        batch = F.pad(data[0][rows], (4, 4, 4, 4))
        top, left = (int(torch.randint(0, 9, (), generator=generator)) for _ in range(2))
        mirror = torch.rand(len(rows), generator=generator) < 0.5
        batch = batch[:, :, top : top + 32, left : left + 32]
        yield torch.where(mirror.view(-1, 1, 1, 1), batch.flip(3), batch), data[1][rows]


@torch.no_grad()
def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Percent of images classified right."""
    model.eval()
    right = sum(
        int((model(batch).argmax(1) == labels).sum())
        for batch, labels in zip(data[0].split(500), data[1].split(500), strict=True)
    )
    return 100 * right / len(data[1])


def show(what: str, score: float) -> float:
    """Print a score with the time."""
    print(f"{time.strftime('%H:%M:%S')} {what}: {score:.2f}", flush=True)
    return score


def write(path: Path | None, results: dict[str, Any]) -> None:
    """Keep what is known so far."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
