"""Training steps in a process that keeps what it frees, as those of the command line do, and in one that does not.

    python -m benchmarks.freed

Each is a process of its own, since that holds for a whole process; they take turns, and a figure is the processor's
time of eight steps (`core/malloc_tuning.py`).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.rows import Row, table

ROUNDS, STEPS = 7, 8
WAYS = ("usual", "kept")
NETWORKS = {
    "ResNet-20 w4a4, 128 images of 32 × 32": ("resnet20", 128),
    "ResNet-18 w4a4, 64 × 32 × 32": ("resnet18", 64),
}


def train(way: str, name: str, batch: int) -> None:
    """A process that trains for every line that it reads, and answers by the seconds."""
    if way == "kept":
        from bitplan.core.malloc_tuning import keep_freed_memory

        keep_freed_memory()
    import torch
    import torch.nn.functional as F

    import bitplan
    from benchmarks.training import Trainer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = bitplan.load_model(name)[0]
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    plan = bitplan.Plan.uniform(bitplan.trace(model, images[:1], rules=bitplan.Rules(narrow=0)), "w4a4")
    quantized = bitplan.quantize(model, plan)
    bitplan.calibrate_(quantized, [images])
    parameters = bitplan.parameter_groups(quantized, lr=1e-3)
    trainer = Trainer(quantized.train(), parameters, lambda model: F.cross_entropy(model(images), labels))
    for _ in sys.stdin:
        begin = time.process_time()
        for _ in range(STEPS):
            trainer.step()
        print(time.process_time() - begin, flush=True)


@contextmanager
def child(way: str, name: str, batch: int) -> Iterator[subprocess.Popen[str]]:
    """Such a process, until the block ends."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.freed", way, name, str(batch)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:  # fmt: skip
        yield process


def asked(process: subprocess.Popen[str]) -> float:
    """Seconds of the next steps."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def rows() -> list[Row]:
    """The medians over the rounds, and the median of their ratios."""
    made = []
    for what, (name, batch) in NETWORKS.items():
        with ExitStack() as stack:
            processes = {way: stack.enter_context(child(way, name, batch)) for way in WAYS}
            taken = [{way: asked(process) for way, process in processes.items()} for _ in range(ROUNDS + 1)][1:]
            for process in processes.values():
                assert process.stdin is not None
                process.stdin.close()
        usual, kept = ([one[way] for one in taken] for way in WAYS)
        ratio = statistics.median(mine / theirs for mine, theirs in zip(kept, usual, strict=True))
        ours, peer = statistics.median(kept), statistics.median(usual)
        made.append(Row(f"{what}, {STEPS} steps", ours, peer, "memory given back", "CPU s", 1.0, times=ratio))
    return made


def main() -> None:
    """Print the table, or be one of the processes."""
    if len(sys.argv) > 1:
        way, name, batch = sys.argv[1:]
        train(way, name, int(batch))
    else:
        print(table(rows()))


if __name__ == "__main__":
    main()
