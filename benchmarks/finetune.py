"""Fine-tuning against a bare PyTorch loop: the same network, data, optimizer and steps, in turn.

OMP_NUM_THREADS=1 python -m benchmarks.finetune
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitplan
from benchmarks.rows import Row
from benchmarks.timing import in_turn
from bitplan.quant.parameters import parameter_groups

BATCH, STEPS = 64, 6


@dataclass(frozen=True)
class Noise:
    """Images in memory with labels that say nothing: only the time matters."""

    images: Tensor
    labels: Tensor
    name: str = "noise"
    metric: str = "top-1"
    higher_is_better: bool = True
    version: int = 1

    def example(self) -> Tensor:
        """One image."""
        return self.images[:1]

    def size(self, split: str) -> int:
        """As many for every split."""
        return len(self.labels)

    def batches(self, split: str, batch_size: int, seed: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled by the seed."""
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(seed or 0))
        for rows in order.split(batch_size):
            yield self.images[rows], self.labels[rows]

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        """Scores."""
        return model(batch[0])

    def loss(self, outputs: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(outputs, batch[1])

    def logits(self, outputs: Any) -> tuple[Tensor, ...]:
        """The scores themselves."""
        return (outputs,)

    def batch_score(self, outputs: Any, batch: tuple[Tensor, Tensor]) -> float:
        """Percent right."""
        return 100 * (outputs.argmax(1) == batch[1]).float().mean().item()

    def score(self, model: nn.Module) -> float:
        """Nothing to learn here."""
        return 0.0


def bare(model: nn.Module, task: Noise, *, channels_last: bool) -> None:
    """What one would write by hand, the loss printed nowhere."""
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(parameter_groups(model, lr=0.01, weight_decay=1e-4), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    model.train()
    for images, labels in task.batches("train", BATCH, 0):
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()


def networks() -> Iterator[tuple[str, nn.Module, Noise]]:
    """A ResNet-20: in float, with LSQ, and with LSQ fused."""
    model, example = bitplan.load_model("resnet20")
    task = Noise(torch.randn(BATCH * STEPS, 3, 32, 32), torch.randint(0, 10, (BATCH * STEPS,)))
    yield "resnet20 float", model, task
    plan = bitplan.Plan.uniform(bitplan.trace(model, example, rules=bitplan.Rules(narrow=0)), "w4a4")
    for fused in (False, True):
        quantized = bitplan.quantize(model, plan, fused=fused)
        bitplan.calibrate_(quantized, [task.images[:BATCH]])
        yield f"resnet20 w4a4{' fused' if fused else ''}", quantized, task


COLUMNS = ("bare", "bare channels_last", "finetune_", "finetune_ in a folder")


def measured() -> Iterator[tuple[str, dict[str, float]]]:
    """Seconds of every way to train each network."""
    warnings.simplefilter("ignore")
    columns = COLUMNS
    recipe = bitplan.Recipe(steps=STEPS, batch_size=BATCH, lr=0.01)
    for name, model, task in networks():

        def contest(
            train: Callable[[nn.Module, Noise], object], model: nn.Module = model, task: Noise = task
        ) -> Callable[[], None]:
            return lambda: void(train(copy.deepcopy(model), task))

        def kept(model: nn.Module, task: Noise) -> None:
            with tempfile.TemporaryDirectory() as folder:
                bitplan.finetune_(model, task, recipe, folder=folder)

        seconds = in_turn(
            {
                columns[0]: contest(lambda model, task: bare(model, task, channels_last=False)),
                columns[1]: contest(lambda model, task: bare(model, task, channels_last=True)),
                columns[2]: contest(lambda model, task: bitplan.finetune_(model, task, recipe)),
                columns[3]: contest(kept),
            },
            rounds=3,
        )
        yield name, seconds


def rows() -> list[Row]:
    """`finetune_`, alone and in a folder that survives a kill, against the faster bare loop."""
    made = []
    for name, seconds in measured():
        peer = min(seconds[COLUMNS[0]], seconds[COLUMNS[1]])
        for column in COLUMNS[2:]:
            made.append(Row(f"{name}, {STEPS} steps, {column}", seconds[column], peer, "a bare loop", target=1.05))
    return made


def main() -> None:
    """Print samples per second and ratios."""
    print(f"{'samples/s':20} " + " ".join(f"{name:>22}" for name in COLUMNS) + "   finetune_ ÷ best bare")
    for name, seconds in measured():
        speeds = {column: BATCH * STEPS / value for column, value in seconds.items()}
        ratio = speeds["finetune_"] / max(speeds[COLUMNS[0]], speeds[COLUMNS[1]])
        print(f"{name:20} " + " ".join(f"{speeds[column]:22.0f}" for column in COLUMNS) + f"   {ratio:.3f}", flush=True)


def void(_: object) -> None:
    """Drop a result."""


if __name__ == "__main__":
    main()
