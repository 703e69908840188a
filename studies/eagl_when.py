"""When does EAGL work? Rank correlation of cheap gains with what lowering each group really costs, once it is trained.

python studies/eagl_when.py DATA [--work eagl_when] [--figure eagl_when.svg]
python studies/eagl_when.py digits --epochs 0.2 1 --choices w2a2,w4a4 --steps 5 --work /tmp/when   # tries it out

DATA is the folder of `studies/README.md`. The public CIFAR-10 ResNet-20 is quantized at the higher precision (4, 8 or 3
bits) and trained for 1, 3, 10 and 30 epochs of half of the training images (`--share`); from each of these starts every
group in turn is lowered (to 2, 4 or 2 bits) and fine-tuned, twice with other batches, on nine tenths of these images;
the rise of the loss on the others is the effect that gains should foretell. Trainings multiply in bfloat16, which takes
three quarters of the time on processors that have it; `--precision no` is for others. `again` is the rank correlation
of the two effects: no method can be expected to be much above it. What the folder (`--work`) has already is not
computed again: killed, it goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bitplan
from bitplan.core.malloc_tuning import keep_freed_memory
from bitplan.core.records import Gains, Graph
from bitplan.gains.base import Context
from bitplan.stats.ranksum import rank_correlation
from bitplan.store.record_store import RecordStore
from bitplan.tasks.base import Task, choosing_task

METHODS: dict[str, dict[str, Any]] = {"eagl": {}, "hawq": {"probes": 64, "samples": 256}, "drift": {}}
HOLD_OUT = 0.1


def main() -> None:
    """Train and estimate what is missing, then print the table."""
    options = arguments()
    torch.set_num_threads(1)
    keep_freed_memory()
    whole, floating = on_digits() if options.data == "digits" else on_cifar(Path(options.data))
    task = whole if options.share == 1 else whole.hold_out(1 - options.share)[0]
    graph = bitplan.trace(floating, task.example(), rules=bitplan.Rules(narrow=0))
    options.work.mkdir(parents=True, exist_ok=True)
    kept = options.work / "correlations.json"
    results: dict[str, dict[str, float | None]] = json.loads(kept.read_text()) if kept.exists() else {}
    for epochs, choices in itertools.product(options.epochs, options.choices):
        key = f"{choices} after {epochs:g} epochs"
        if key not in results:
            place = options.work / key.replace(" ", "-").replace(",", "-")
            start = started(floating, graph, task, choices, epochs, options.precision, place)
            results[key] = correlations(start, graph, task, choices, options.steps, options.precision, place)
            kept.write_text(json.dumps(results, indent=1))
        print(f"{key}: {in_words(results[key])}", flush=True)
    if options.figure:
        draw(results, options.epochs, options.choices, options.figure)


def started(
    floating: nn.Module, graph: Graph, task: Task, choices: str, epochs: float, precision: Any, place: Path
) -> nn.Module:  # fmt: skip
    """The network at the highest choice, trained for so long."""
    model = bitplan.quantize(floating, bitplan.Plan.uniform(graph, choices.split(",")[-1]))
    bitplan.calibrate_(model, itertools.islice(task.batches("train", 128, seed=0), 4), forward=task.forward)
    recipe = bitplan.Recipe(epochs=epochs, batch_size=128, lr=0.01, precision=precision)
    bitplan.finetune_(model, task, recipe, seed=0, folder=place / "start")
    return model


def correlations(
    start: nn.Module, graph: Graph, task: Task, choices: str, steps: int, precision: Any, place: Path
) -> dict[str, float | None]:  # fmt: skip
    """The rank correlation of each method with the effect, and of the effect with itself measured again."""
    recipe = bitplan.Recipe(steps=steps, batch_size=128, lr=0.0025, precision=precision)
    judged = choosing_task(task, HOLD_OUT)

    def estimate(method: str, seed: int, **told: Any) -> Gains:
        context = Context(task=judged, recipe=recipe, seed=seed, store=RecordStore.at(place / "jobs"))
        return bitplan.estimate(method, start, graph, choices=choices, context=context, **told)

    first, second = (estimate("alps", seed, steps=steps) for seed in (0, 1))
    rows = {name: tuple(a + b for a, b in zip(row, second.rows[name], strict=True)) for name, row in first.rows.items()}
    effect = first.model_copy(update={"rows": rows})
    found = {method: rank_correlation(estimate(method, 0, **told), effect) for method, told in METHODS.items()}
    return {"score of the start": bitplan.evaluate(start, task), "again": rank_correlation(first, second), **found}


def on_digits() -> tuple[Task, nn.Module]:
    """A small float network, to try this out."""
    task = bitplan.load_task("digits")
    model, _ = bitplan.load_model("digits_resnet")
    bitplan.finetune_(model, task, bitplan.Recipe(steps=60, lr=0.05), seed=0)
    return task, model


def on_cifar(data: Path) -> tuple[Task, nn.Module]:
    """The public ResNet-20."""
    model, _ = bitplan.load_model("resnet20")
    model = bitplan.load_checkpoint(data / "weights" / "resnet20-12fca82f.th", model)
    return bitplan.load_task("cifar10", data=str(data / "cifar10")), model


def in_words(found: dict[str, float | None]) -> str:
    """A line of the table."""
    return ", ".join(f"{name} –" if value is None else f"{name} {value:.2f}" for name, value in found.items())


def draw(results: dict[str, dict[str, float | None]], epochs: list[float], choices: list[str], path: Path) -> None:
    """Rank correlation against epochs, a panel for each range of precisions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(choices), 2.8), layout="constrained")
    for place, pair in enumerate(choices):
        axes = figure.add_subplot(1, len(choices), place + 1)
        for method in (*METHODS, "again"):
            heights = [results[f"{pair} after {length:g} epochs"][method] for length in epochs]
            told = [(length, height) for length, height in zip(epochs, heights, strict=True) if height is not None]
            style = {"linestyle": ":", "color": "0.5"} if method == "again" else {"marker": "o"}
            axes.plot(*zip(*told, strict=True) if told else ([], []), label=method, **style)
        axes.set(xscale="log", xlabel="epochs of the start", title=pair, ylim=(-1, 1))
        axes.set_xticks(epochs, [f"{length:g}" for length in epochs])
        axes.minorticks_off()
    figure.axes[0].set_ylabel("rank correlation with the effect")
    figure.axes[-1].legend()
    figure.savefig(path)


def arguments() -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--epochs", type=float, nargs="+", default=[1, 3, 10, 30])
    parser.add_argument("--choices", nargs="+", default=["w2a2,w4a4", "w4a4,w8a8", "w2a2,w3a3"])
    parser.add_argument("--share", type=float, default=0.5, help="of the training images that are used")
    parser.add_argument("--steps", type=int, default=20, help="of each fine-tuning with one group lowered")
    parser.add_argument("--precision", choices=("bf16", "no"), default="bf16")
    parser.add_argument("--work", type=Path, default=Path("eagl_when"))
    parser.add_argument("--figure", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
