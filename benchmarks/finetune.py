"""Fine-tuning against a bare PyTorch loop: the same network, data, optimizer and steps, in turn.

    python -m benchmarks.finetune

All times are the processor's, of one thread in a process that keeps what it frees, as bitplan's own do: otherwise the
allocator gives back in one training what it keeps in the next, and steps of one and the same loop differ by a tenth.
A training pays for its steps, and for what comes once. Both are in the ratio of the whole, and each line says them
apart: what a step takes of a bare one (medians over all steps), and how much more comes once than around a bare loop.
Once come two looks at how the network scores, before and after, at a 48th of all samples that are trained on, 512 at
most; and in a folder hashes of the network, a log, and a checkpoint that is flushed to the disk.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitplan
from benchmarks.rows import Row, table
from bitplan.core.malloc_tuning import keep_freed_memory
from bitplan.quant.parameters import parameter_groups

BATCH, STEPS, ROUNDS = 64, 24, 3
BARE = "a bare loop"
RECIPE = bitplan.Recipe(steps=STEPS, batch_size=BATCH, lr=0.01)
Tick = Callable[[], bool]
"""Called before every step; never says that it is time to stop."""
Train = Callable[[nn.Module, "Noise", Tick], None]


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


def bare(model: nn.Module, task: Noise, tick: Tick, *, channels_last: bool) -> None:
    """What one would write by hand, the loss printed nowhere."""
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(parameter_groups(model, lr=0.01, weight_decay=1e-4), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    model.train()
    for images, labels in task.batches("train", BATCH, 0):
        tick()
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()


def networks() -> Iterator[tuple[str, nn.Module, Noise]]:
    """Yield a ResNet-20 in float and with LSQ."""
    model, example = bitplan.load_model("resnet20")
    task = Noise(torch.randn(BATCH * STEPS, 3, 32, 32), torch.randint(0, 10, (BATCH * STEPS,)))
    yield "resnet20 float", model, task
    plan = bitplan.Plan.uniform(bitplan.trace(model, example, rules=bitplan.Rules(narrow=0)), "w4a4")
    quantized = bitplan.quantize(model, plan)
    bitplan.calibrate_(quantized, [task.images[:BATCH]])
    yield "resnet20 w4a4", quantized, task


def finetuned(model: nn.Module, task: Noise, tick: Tick) -> None:
    """By `finetune_`, which asks before every step whether to stop."""
    bitplan.finetune_(model, task, RECIPE, stop=tick)


def finetuned_in_folder(model: nn.Module, task: Noise, tick: Tick) -> None:
    """The same in a folder that survives a kill."""
    with tempfile.TemporaryDirectory() as folder:
        bitplan.finetune_(model, task, RECIPE, stop=tick, folder=folder)


OURS: dict[str, Train] = {"finetune_": finetuned, "finetune_ in a folder": finetuned_in_folder}


@dataclass(frozen=True)
class Timed:
    """CPU seconds of a whole training, and of the median step."""

    whole: float
    step: float

    @property
    def once(self) -> float:
        """What does not come with every step."""
        return self.whole - STEPS * self.step


def timed(train: Train, model: nn.Module, task: Noise) -> Timed:
    """Train a copy; the clock is looked at before every step."""
    trained, ticks = copy.deepcopy(model), []

    def tick() -> bool:
        ticks.append(time.process_time())
        return False

    start = time.process_time()
    train(trained, task, tick)
    whole = time.process_time() - start
    return Timed(whole, statistics.median(later - earlier for earlier, later in pairwise(ticks)))


def measured() -> Iterator[tuple[str, dict[str, list[Timed]]]]:
    """Every way to train each network, round by round; the bare loop is that of the faster memory layout."""
    keep_freed_memory()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, model, task in networks():
        layouts = [partial(bare, channels_last=last) for last in (False, True)]
        faster = min(layouts, key=lambda layout: timed(layout, model, task).step)
        ways: dict[str, Train] = {BARE: faster, **OURS}
        rounds = [{way: timed(train, model, task) for way, train in ways.items()} for _ in range(ROUNDS)]
        yield name, {way: [one[way] for one in rounds] for way in ways}


def rows() -> list[Row]:
    """`finetune_`, alone and in a folder that survives a kill, against the faster bare loop."""
    made = []
    for name, ways in measured():
        peers = ways[BARE]
        for way in OURS:
            whole, step = (_ratio(ways[way], peers, attrgetter(what)) for what in ("whole", "step"))
            once = 1000 * (_median(ways[way], attrgetter("once")) - _median(peers, attrgetter("once")))
            ours, peer = (_median(one, attrgetter("whole")) for one in (ways[way], peers))
            note = f"a step {step:.2f}, and {once:.0f} ms more once"
            title = f"{name}, {STEPS} steps, {way}"
            made.append(Row(title, ours, peer, BARE, unit="CPU s", target=1.05, times=whole, note=note))
    return made


def _ratio(ours: Sequence[Timed], peers: Sequence[Timed], what: Callable[[Timed], float]) -> float:
    """The median of the ratios of every round."""
    return statistics.median(what(one) / what(peer) for one, peer in zip(ours, peers, strict=True))


def _median(every: Sequence[Timed], what: Callable[[Timed], float]) -> float:
    return statistics.median(map(what, every))


def main() -> None:
    """Print the table."""
    print(table(rows()))


if __name__ == "__main__":
    main()
